"""Status files: what each rank says of itself, and what the launcher reads.

torchrun gives exit code 1 whatever a rank's own was, and does not say which rank failed first. So each keeps
one small JSON file in a folder that the launcher chose: its process, its stage, how it ended and why.
Standard library only; times are seconds since the epoch.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from h3dist.errors import H3Error

RUNNING, DONE, FAILED, STOPPED = "running", "done", "failed", "stopped"


@dataclass(frozen=True)
class Cause:
    """Why a run failed: an error's class and message, its exit code, and where it first came up."""

    kind: str
    message: str
    exit_code: int
    rank: int | None = None
    stage: str | None = None

    def text(self) -> str:
        """One line for the user: "OutputError on rank 0 in mux: disk full"."""
        where = f" on rank {self.rank}" if self.rank is not None else ""
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

    def vanished(self) -> bool:
        """Whether the process is gone without a word: killed from outside, or crashed in native code."""
        return self.state == RUNNING and not alive(self.pid, self.born)


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
        """Say that `error` ended the rank's work."""
        now = self._read()
        cause = describe(error, self.rank, now.stage)
        self._write(replace(now, state=FAILED, ended=time.time(), cause=cause))

    def stopped(self) -> None:
        """Say that the rank left because it was told to, or because the launcher is gone."""
        self._write(replace(self._read(), state=STOPPED, ended=time.time()))

    def _read(self) -> Status:
        status = load(self.path)
        assert status is not None, f"{self.path} before start()"
        return status

    def _write(self, status: Status) -> None:
        part = self.path.with_suffix(f".{status.state}")  # two threads never share one
        part.write_text(json.dumps(asdict(status)), encoding="ascii")
        os.replace(part, self.path)


def describe(error: BaseException, rank: int, stage: str | None) -> Cause:
    """An error as a `Cause`; anything but an `H3Error` is unexpected, exit code 1.

    An error with a `rank` and a `stage` of its own, as one that all ranks agreed on, keeps them.
    """
    code = error.exit_code if isinstance(error, H3Error) else 1
    named = getattr(error, "rank", None)
    return Cause(
        type(error).__name__,
        str(error),
        code,
        rank if named is None else named,
        getattr(error, "stage", None) or stage,
    )


def load(path: Path) -> Status | None:
    """One status file, or None where there is none."""
    try:
        fields = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    cause = fields.pop("cause")
    return Status(**fields, cause=Cause(**cause) if cause else None)


def load_all(folder: Path, world: int) -> list[Status]:
    """The status of every rank that has spoken yet, in rank order."""
    found = (load(StatusFile.of(folder, rank).path) for rank in range(world))
    return [status for status in found if status is not None]


def birth(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (Linux); None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(pid: int, born: int) -> bool:
    """Whether the process `pid` that started at `born` still runs; a zombie does not."""
    return birth(pid) == born
