"""The last word of `runpod/pod.py`: any exception as one message and an exit code."""

import signal
import sys
from pathlib import Path

from h3dist.cloud.failures import Stopped
from h3dist.cloud.keys import Redactor
from h3dist.errors import H3Error


def explain(error: BaseException, redact: Redactor) -> int:
    """Say on stderr what went wrong, without a traceback, values or a secret. Returns the exit code."""
    if isinstance(error, H3Error):
        print(redact(f"pod.py: {error}"), file=sys.stderr)
        return error.exit_code
    if isinstance(error, Stopped):
        name = signal.Signals(error.signum).name
        print(f"pod.py: stopped by {name}; whatever was rented is given back", file=sys.stderr)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):  # such as a reader of our output that left
        return error.code if isinstance(error.code, int) else 1
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):  # the command line's own errors, which know how to show themselves
        if hasattr(error, "show"):
            error.show()
        return code
    print(redact(f"pod.py: unexpected {type(error).__name__}: {error} at {_place(error)}"), file=sys.stderr)
    return 1


def _place(error: BaseException) -> str:
    """Files and lines of the stack, without the values in it."""
    trace, frames = error.__traceback__, []
    while trace:
        frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(frames[-6:])
