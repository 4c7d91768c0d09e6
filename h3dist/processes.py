"""The processes of one run: started, watched through their status files, and ended without exception.

Knows nothing of what the ranks do: any command will do whose ranks keep status files (`workers.run`).
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from h3dist.errors import RankError
from h3dist.outputs import remove
from h3dist.status import DONE, FAILED, Cause, Status, birth, hold_lifeline, load_all, load_rank, parent

GRACE_SECONDS = 8.0  # from the first failure, death or signal to SIGKILL
GONE_SECONDS = 1.5  # for the kernel to clear the killed away
LOOK_SECONDS = 0.1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CONSEQUENCES = (1, RankError.exit_code)  # exit codes of what another rank's death can bring about


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code, and the first cause where it failed by itself.

    `overdue` says that it was ended because its time was up.
    """

    exit_code: int
    cause: Cause | None = None
    overdue: bool = False


def launch_ranks(
    command: Sequence[str],
    status_dir: Path,
    world: int,
    parts: Sequence[str],
    *,
    environ: Mapping[str, str],
    log: Path,
    limit: float = float("inf"),
    meanwhile: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run `command`, which starts `world` ranks that report to `status_dir` (made here), to its end.

    SIGINT, SIGTERM and SIGHUP are forwarded to it. What still runs 8 s after the first failure, death or
    signal is killed, at a second signal at once, and so is a run of more than `limit` seconds; then the
    temporary files `parts` are removed. No process of the run is left on return. `log` is torchrun's own, for
    the signal that killed a rank. `meanwhile` is called some times a second while it runs.
    """
    status_dir.mkdir()
    received: list[int] = []
    with hold_lifeline(status_dir), on_signals(lambda number, _: received.append(number)):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **environ}
        )
        try:
            culprit = _watch(process, status_dir, world, received, time.monotonic() + limit, meanwhile)
            overdue = process.poll() is None and culprit is None and not received
        finally:
            end_ranks(process, status_dir, world)
            remove(parts)
        if _all_done(status_dir, world):
            return Outcome(0)
        if culprit is None and received:
            return Outcome(128 + received[0])
        if overdue:
            return Outcome(RankError.exit_code, _overdue(status_dir, world, limit), overdue=True)
        cause = _cause(culprit, log) if culprit else _unexplained(process.returncode, log)
        return Outcome(cause.exit_code, cause)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let `handler` take the signals that end a run; SIGHUP stays ignored where it was, as under nohup."""
    numbers = [n for n in FORWARDED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler: end this process by the usual clean-up, with the exit code that a shell expects."""
    raise SystemExit(128 + number)


def _watch(
    process: subprocess.Popen[bytes],
    status_dir: Path,
    world: int,
    received: list[int],
    deadline: float,
    meanwhile: Callable[[], object],
) -> Status | None:
    """Wait for the command's end, or until its time is up. Gives the rank that failed first, if one did."""
    culprit, forwarded = None, 0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        meanwhile()
        if not forwarded:
            culprit = culprit or first_culprit(status_dir, world)
        if culprit or received or _all_done(status_dir, world):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if len(received) > forwarded:
            deadline = time.monotonic() if forwarded else deadline
            forwarded = len(received)
            process.send_signal(received[-1])
    return culprit or (None if forwarded else first_culprit(status_dir, world))


def first_culprit(status_dir: Path, world: int) -> Status | None:
    """The rank whose failure came first, of those that have failed so far; None if there is none.

    A rank's own word comes before that of peers who pass it on, and a rank that vanished before errors that
    its peers may have of it, whoever wrote first.
    """
    statuses = load_all(status_dir, world)
    told = [(s.cause.rank != s.rank, s.ended, s) for s in statuses if s.state == FAILED and s.cause]
    failed = [status for *_, status in sorted(told, key=lambda item: item[:2])]
    plain = [s for s in failed if s.cause and s.cause.exit_code not in CONSEQUENCES]
    return next(iter([*plain, *(s for s in statuses if _vanished(s, status_dir)), *failed]), None)


def _vanished(status: Status, status_dir: Path) -> bool:
    """Whether a rank is gone without its last word; read again, for it may have come before the end."""
    return status.vanished() and load_rank(status_dir, status.rank) == status


def _all_done(status_dir: Path, world: int) -> bool:
    return [status.state for status in load_all(status_dir, world)] == [DONE] * world


def _cause(culprit: Status, log: Path) -> Cause:
    """The culprit's own error, or what is known of a rank that vanished."""
    if culprit.cause:
        return culprit.cause
    found = re.search(rf"exitcode *: -(\d+)\b.*\(pid: {culprit.pid}\)", _text(log))
    how = f"was killed by {signal.Signals(int(found[1])).name}" if found else "ended without a word"
    message = f"process {culprit.pid} {how}"
    return Cause("RankError", message, RankError.exit_code, culprit.rank, culprit.stage)


def _overdue(status_dir: Path, world: int, limit: float) -> Cause:
    """The run's time was up: what each rank was doing then."""
    stages = {status.rank: status.stage or "no stage yet" for status in load_all(status_dir, world)}
    told = ", ".join(f"rank {rank} in {stages.get(rank, 'its start, without a word')}" for rank in range(world))
    return Cause("RankError", f"still running after {limit:g} s: {told}", RankError.exit_code)


def _unexplained(code: int, log: Path) -> Cause:
    """No rank said that it failed, and not all said that they were done."""
    said = (line.strip() for line in reversed(_text(log).splitlines()))
    last = next((line for line in said if re.search(r"\w", line)), "no word in its log")  # torchrun rules lines
    return Cause("RankError", f"torchrun ended with code {code} and left ranks undone: {last}", RankError.exit_code)


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def end_ranks(process: subprocess.Popen[bytes], status_dir: Path, world: int) -> None:
    """Kill the command and every rank with their process groups, and wait until they are gone.

    The command is stopped first, so that it starts no rank while we look; ranks that have not spoken yet are
    found as its children.
    """
    groups = {status.pid for status in load_all(status_dir, world) if status.alive()}
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        groups |= children(process.pid) | {process.pid}
    born = {pid: birth(pid) for pid in groups}
    for pid in groups:
        _kill_group(pid)
    process.wait()
    deadline = time.monotonic() + GONE_SECONDS
    while any(birth(pid) == at is not None for pid, at in born.items()) and time.monotonic() < deadline:
        time.sleep(0.02)


def children(pid: int) -> set[int]:
    """The processes that `pid` started and that still run."""
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return {number for number in numbers if parent(number) == pid}


def _kill_group(pid: int) -> None:
    try:
        group = os.getpgid(pid)
        if group == os.getpgrp():  # never our own
            os.kill(pid, signal.SIGKILL)
        else:
            os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
