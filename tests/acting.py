"""A rank that acts a part instead of making a clip: what `workers.run` and the launcher do is all real.

Run as `python -m acting SCRATCH STATUS_DIR PARTS [WORD]...`, where PARTS names one part for each rank.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from h3dist import workers
from h3dist.errors import OutputError
from h3dist.status import birth
from h3dist.topology import read_ranks

SCRATCH, STATUS_DIR, PARTS = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
RANKS = read_ranks()


def appear() -> None:
    """Say that this rank is up, and wait for the others: whatever happens, happens to all of them."""
    born = {pid: birth(pid) for pid in (os.getpid(), os.getppid())}
    (SCRATCH / "new").mkdir(exist_ok=True)
    whole = SCRATCH / "new" / f"{RANKS.rank}"
    whole.write_text(json.dumps(born))
    whole.rename(SCRATCH / f"pid{RANKS.rank}")
    while len(list(SCRATCH.glob("pid*"))) < RANKS.world:
        time.sleep(0.01)
    time.sleep(0.2)


def act() -> None:
    appear()
    part = PARTS[RANKS.rank]
    if part == "well":
        print("said by rank", RANKS.rank, sys.argv[4:])
    elif part == "sleep":
        time.sleep(60)
    elif part == "raise":
        raise OutputError("the disk is full")
    elif part == "bug":
        raise KeyError("nobody foresaw this")
    elif part == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif part == "deaf":
        ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock, so that no thread of this process runs


if PARTS[RANKS.rank] == "mute":  # never reports, and takes no SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    appear()
    time.sleep(60)
else:
    temporary = SCRATCH / f"rank{RANKS.rank}.part"
    temporary.touch()
    workers.run(act, RANKS, STATUS_DIR or None, [str(temporary)])
