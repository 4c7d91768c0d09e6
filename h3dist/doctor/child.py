"""The child's side: `python -m h3dist.doctor.child SECONDS TASK [ARGUMENT]...` does one task and prints JSON lines.

It ends by SIGALRM a little after its time, should its parent be gone by then.
"""

import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from h3dist.errors import H3Error
from h3dist.workers import end_process

TASKS = {  # task: the module whose function of that name gives what to print
    "machine": "h3dist.doctor.asks",
    "files": "h3dist.doctor.files",
    "torch": "h3dist.doctor.asks",
    "encoders": "h3dist.doctor.asks",
    "copies": "h3dist.doctor.copies",
    "exchange": "h3dist.doctor.exchange",
}
EXTRA_SECONDS = 10


def main(seconds: str, task: str, *arguments: str) -> NoReturn:
    """Do a task and leave; what it yields is printed at once, so that whatever comes before a hang is known."""
    signal.alarm(int(float(seconds)) + EXTRA_SECONDS)
    work: Callable[..., Iterator[dict[str, Any]]] = getattr(importlib.import_module(TASKS[task]), task)
    try:
        for said in work(*arguments):
            print(json.dumps(said), flush=True)
    except H3Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        end_process(1)
    end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
