"""Status files: what each rank says of itself, and what the launcher reads.

torchrun gives exit code 1 whatever a rank's own was, and does not say which rank failed first. So each keeps
one small JSON file in a folder that the launcher chose: its process, its stage, how it ended and why.
Standard library only; times are seconds since the epoch.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from h3dist.errors import H3Error

RUNNING, DONE, FAILED, STOPPED = "running", "done", "failed", "stopped"
LIFELINE = "lifeline"


@dataclass(frozen=True)
class Cause:
    """Why a run failed: an error's class and message, its exit code, and where it first came up."""

    kind: str
    message: str
    exit_code: int
    rank: int | None = None
    stage: str | None = None

    def text(self, world: int) -> str:
        """One line for the user, of one rank among `world`: "OutputError on rank 0 in mux: disk full"."""
        where = f" on rank {self.rank}" if self.rank is not None and world > 1 else ""
        return f"{self.kind}{where}{f' in {self.stage}' if self.stage else ''}: {self.message}"


@dataclass(frozen=True)
class Status:
    """One rank's word on itself. `born` tells its process from a later one of the same number."""

    rank: int
    pid: int
    born: int
    state: str = RUNNING
    stage: str | None = None
    ended: float | None = None
    cause: Cause | None = None

    def alive(self) -> bool:
        """Whether the rank's process still runs; a zombie does not."""
        return birth(self.pid) == self.born

    def vanished(self) -> bool:
        """Whether the process is gone without a word: killed from outside, or crashed in native code."""
        return self.state == RUNNING and not self.alive()


@dataclass(frozen=True)
class StatusFile:
    """The status file of one rank, written by that rank alone; every write replaces the file whole."""

    path: Path
    rank: int

    @classmethod
    def of(cls, folder: Path | str, rank: int) -> "StatusFile":
        """The file of `rank` in the launcher's status folder."""
        return cls(Path(folder) / f"rank{rank}.json", rank)

    def start(self) -> None:
        """Say that this process is `rank` and at work."""
        self._write(Status(self.rank, os.getpid(), birth(os.getpid()) or 0))

    def enter(self, stage: str) -> None:
        """Say which stage the rank is in from now on, for the message should it be killed there."""
        self._write(replace(self._read(), stage=stage))

    def done(self) -> None:
        """Say that the rank's work is complete."""
        self._write(replace(self._read(), state=DONE, ended=time.time()))

    def failed(self, error: BaseException) -> None:
        """Say that `error` ended the rank's work; its traceback goes to a file beside."""
        lines = traceback.format_exception(error)
        self.path.with_suffix(".traceback").write_text("".join(lines), errors="backslashreplace")
        now = self._read()
        cause = describe(error, self.rank, now.stage)
        self._write(replace(now, state=FAILED, ended=time.time(), cause=cause))

    def stopped(self) -> None:
        """Say that the rank left because it was told to, or because the launcher is gone."""
        self._write(replace(self._read(), state=STOPPED, ended=time.time()))

    def _read(self) -> Status:
        status = _load(self.path)
        assert status is not None, f"{self.path} before start()"
        return status

    def _write(self, status: Status) -> None:
        part = self.path.with_suffix(f".{status.state}")  # two threads never share one
        part.write_text(json.dumps(asdict(status)), encoding="ascii")
        os.replace(part, self.path)


def describe(error: BaseException, rank: int, stage: str | None) -> Cause:
    """What ended the work of `rank` in `stage`, as a `Cause`; where it passes on another's error, that one's.

    Anything but an `H3Error` is unexpected: exit code 1.
    """
    kind, message = type(error).__name__, str(error)
    if not isinstance(error, H3Error):
        return Cause(kind, message, 1, rank, stage)
    origin = rank if error.rank is None else error.rank
    return Cause(kind, message, error.exit_code, origin, error.stage or stage)


def load_rank(folder: Path, rank: int) -> Status | None:
    """What `rank` last said in the status folder, or None if it has not spoken yet."""
    return _load(StatusFile.of(folder, rank).path)


def load_all(folder: Path, world: int) -> list[Status]:
    """The status of every rank that has spoken yet, in rank order."""
    found = (load_rank(folder, rank) for rank in range(world))
    return [status for status in found if status is not None]


def _load(path: Path) -> Status | None:
    try:
        fields = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    cause = fields.pop("cause")
    return Status(**fields, cause=Cause(**cause) if cause else None)


def birth(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (Linux); None if it is gone or a zombie."""
    fields = _process_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def parent(pid: int) -> int | None:
    """The process that started `pid`; None if it is gone or a zombie."""
    fields = _process_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[1])


def _process_fields(pid: int) -> list[str] | None:
    """`/proc/PID/stat` from the third field, the state, on; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


@contextmanager
def hold_lifeline(folder: Path) -> Iterator[None]:
    """Hold a FIFO in `folder` open for writing: the kernel closes it even if this process is killed."""
    path = folder / LIFELINE
    os.mkfifo(path, 0o600)
    held = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield
    finally:
        os.close(held)


def watch_lifeline(folder: Path | str) -> Callable[[], bool]:
    """A question for a rank to ask now and then: has the launcher let go of the lifeline in `folder`?"""
    try:
        watched = os.open(Path(folder) / LIFELINE, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return lambda: True

    def let_go() -> bool:
        try:
            return os.read(watched, 1) == b""
        except BlockingIOError:  # nothing to read, but a writer: the launcher is there
            return False

    return let_go
