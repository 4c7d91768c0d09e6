"""What a rank's process does around its work: it says how it fares, and it never outlives the run.

Signals are blocked, and one thread waits for them. A Python handler would run on the main thread, which may
sit in a collective for minutes, and would return to it; the thread removes temporary files, says so and ends
the process at once. The same thread looks whether whoever started the rank is still there.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from h3dist.errors import RankError
from h3dist.outputs import remove
from h3dist.status import StatusFile, describe, watch_lifeline
from h3dist.topology import Ranks

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
LOOK_SECONDS = 0.25
ENDING_SECONDS = 5  # a process that cannot even say how it ended leaves without


class Reporter(Protocol):
    """To whom a rank says how it fares."""

    def start(self) -> None: ...
    def done(self) -> None: ...
    def stopped(self) -> None: ...
    def failed(self, error: BaseException) -> None: ...


@dataclass(frozen=True)
class Terminal:
    """The reporter of a rank without a launcher, as under plain torchrun: it speaks of failure alone."""

    ranks: Ranks

    def start(self) -> None:
        """No word."""

    def done(self) -> None:
        """No word."""

    def stopped(self) -> None:
        """No word."""

    def failed(self, error: BaseException) -> None:
        """One line on stderr, after the traceback if nobody foresaw the error.

        An error that all ranks agreed on is left to the rank it came from, which is alive unless it is a
        `RankError`.
        """
        cause = describe(error, self.ranks.rank, None)
        if cause.rank != self.ranks.rank and cause.exit_code != RankError.exit_code:
            return
        if cause.exit_code == 1:
            traceback.print_exception(error)
        print(f"h3dist: error: {cause.text(self.ranks.world)}", file=sys.stderr)


@dataclass(frozen=True)
class Process:
    """This process and the ways it ends. `parts` are the temporary files it removes; work may add to them.

    Whoever takes `ending` first, the work or the signal thread, ends the process.
    """

    reporter: Reporter
    parts: list[str]
    abandoned: Callable[[], bool]
    ending: threading.Lock
    finished: threading.Event

    def fail(self, error: BaseException) -> NoReturn:
        """Clean up, report `error` and leave with its exit code, past any teardown that could hang."""
        self.ending.acquire(timeout=ENDING_SECONDS)
        try:
            remove(self.parts)
            self.reporter.failed(error)
        finally:
            end_process(describe(error, 0, None).exit_code)

    def finish(self) -> NoReturn:
        """Report success and leave; from now on a signal ends the process quietly."""
        with self.ending:
            self.reporter.done()
            self.finished.set()
        end_process(0)

    def watch(self) -> None:
        """The signal thread: wait for a signal, or for whoever started this process to be gone, and leave."""
        received = None
        while received is None and not self.abandoned():
            received = signal.sigtimedwait(SIGNALS, LOOK_SECONDS)
        self.ending.acquire(timeout=ENDING_SECONDS)
        try:
            if not self.finished.is_set():
                remove(self.parts)
                self.reporter.stopped()
        finally:
            end_process(0 if self.finished.is_set() else 128 + (received.si_signo if received else signal.SIGHUP))


def run(work: Callable[[], None], ranks: Ranks, status_dir: str | None, parts: list[str]) -> NoReturn:
    """Do a rank's `work`, report on it, to `status_dir` if a launcher reads one, else on the terminal, and leave.

    Where the work raises, a signal comes or the launcher vanishes, the process removes the temporary files
    `parts` before it ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # before any thread exists, so that all inherit it
    reporter = StatusFile.of(status_dir, ranks.rank) if status_dir else Terminal(ranks)
    process = Process(reporter, parts, _abandoned(ranks, status_dir), threading.Lock(), threading.Event())
    reporter.start()
    threading.Thread(target=process.watch, name="h3dist-signals", daemon=True).start()
    try:
        work()
    except BaseException as error:
        process.fail(error)
    process.finish()


def _abandoned(ranks: Ranks, status_dir: str | None) -> Callable[[], bool]:
    """Whether torchrun or the launcher, those of them that started this process, is gone."""
    parent = os.getppid()

    def orphaned() -> bool:
        return ranks.elastic and os.getppid() != parent

    if status_dir is None:
        return orphaned
    let_go = watch_lifeline(status_dir)
    return lambda: orphaned() or let_go()


def end_process(code: int) -> NoReturn:
    """Leave at once with an exit code, past the teardown of threads, which can hang, or abort what went well."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)
