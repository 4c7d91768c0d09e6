"""Child processes that cannot hold their parent up: each writes to files, and its whole group is killed in time.

A process that waits inside a driver may not even die of SIGKILL; then it is left, and said to be stuck.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import IO, Any

LOOK_SECONDS = 0.02
GRACE_SECONDS = 3.0  # that the others get once one of several has failed
DYING_SECONDS = 2.0  # from SIGKILL until a process counts as stuck


@dataclass(frozen=True)
class Child:
    """A command and what is added to its environment."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, negative for a signal, None where it was stopped because it was late.

    `said` are the JSON objects that it printed, one a line, and `words` the last line of its stderr.
    """

    code: int | None
    said: tuple[dict[str, Any], ...]
    words: str
    stuck: bool = False

    @property
    def fine(self) -> bool:
        return self.code == 0

    def why(self, limit: float) -> str:
        """In words, why it is not fine."""
        if self.stuck:
            return "it hangs inside the driver and cannot even be killed"
        if self.code is None:
            return f"no answer within {limit:g} s"
        told = f": {self.words}" if self.words else ""
        return f"ended by {signal.Signals(-self.code).name}{told}" if self.code < 0 else f"failed{told}"

    def value(self, name: str) -> Any:
        """The last value that it said under a name; None where it said none."""
        return next((line[name] for line in reversed(self.said) if name in line), None)


def run_children(children: Sequence[Child], limit: float, stop: Event) -> tuple[Ended, ...]:
    """Run all of them together, `limit` seconds at most, or until `stop` is set; none outlives this call, unless stuck.

    Once one has failed, the others have 3 s to end by themselves.
    """
    with tempfile.TemporaryDirectory(prefix="h3dist-doctor-") as folder:
        files = [(Path(folder, f"{n}.out"), Path(folder, f"{n}.err")) for n in range(len(children))]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for child, (out, err) in zip(children, files, strict=True):
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    running.append(_start(child, stdout, stderr))
            codes = _wait(running, limit, stop)
        finally:
            stuck = _end(running)
        return tuple(
            Ended(code, _objects(out), _last_line(err), process.pid in stuck)
            for code, process, (out, err) in zip(codes, running, files, strict=True)
        )


def _start(child: Child, stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        child.command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        env={**os.environ, **child.environ},
    )


def _wait(running: Sequence[subprocess.Popen[bytes]], limit: float, stop: Event) -> list[int | None]:
    """The exit codes; None for those that still run when the time is up."""
    deadline, failed = time.monotonic() + limit, False
    while True:
        codes = [process.poll() for process in running]
        if None not in codes or time.monotonic() > deadline or stop.wait(LOOK_SECONDS):
            return codes
        if any(codes) and not failed:
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)


def _end(running: Sequence[subprocess.Popen[bytes]]) -> set[int]:
    """Kill every process group; gives the processes that do not die of it."""
    for process in running:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    deadline, stuck = time.monotonic() + DYING_SECONDS, set()
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stuck.add(process.pid)
    return stuck


def _objects(path: Path) -> tuple[dict[str, Any], ...]:
    """The lines that are JSON objects; a line cut short is none."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return tuple(each for each in found if isinstance(each, dict))


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
