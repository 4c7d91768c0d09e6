"""The cells of one start of ranks: run, and each completed as soon as the ranks have left its figures."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from h3dist.errors import OutputError
from h3dist.matrix import parity, records
from h3dist.matrix.cells import Planned
from h3dist.matrix.prepare import Matrix
from h3dist.matrix.transport import transport
from h3dist.processes import Outcome, launch_ranks
from h3dist.provenance import commit
from h3dist.status import Cause, describe
from h3dist.torchrun import run_folder

Record = dict[str, Any]
SIGNALLED = 128  # exit codes above it: a signal
LEAST_SECONDS = 5.0  # with less to go ranks are not started
NO_FIGURES = Outcome(1, Cause("RankError", "the ranks ended well and left no figures", 1))


class Batch:
    """Some cells of one layout. Whatever goes wrong with one stands in its record and leaves the others alone.

    `own` are their records by key, changed in place, `every` those of the whole document; `told` hears of each that
    changed. No rank is started after `until`, as of `time.time()`.
    """

    def __init__(
        self,
        matrix: Matrix,
        cells: Sequence[Planned],
        own: Mapping[str, Record],
        every: list[Record],
        until: float | None,
        told: Callable[[Record], None],
    ) -> None:
        self._matrix, self._own, self._every, self._until, self._told = matrix, own, every, until, told
        self._waiting, self._begun = list(cells), 0.0

    def run(self) -> int:
        """Run the cells until all have ended or time is up. Gives the last exit code; above 128 a signal came."""
        code, before = 0, None
        while self._waiting and len(self._waiting) != before and code <= SIGNALLED and not self._late:
            before = len(self._waiting)  # ranks leave cells for want of time alone
            code = self._start()
        return code

    @property
    def _left(self) -> float:
        return self._until - time.time() if self._until else float("inf")

    @property
    def _late(self) -> bool:
        return self._left < LEAST_SECONDS

    def _start(self) -> int:
        """Start ranks for all that wait. The one that fails takes no other with it."""
        folder, self._begun = run_folder(), time.monotonic()
        self._next()
        try:
            outcome = self._launch(folder)
        except OutputError:
            raise
        except Exception as error:
            outcome = Outcome(1, describe(error, 0, "the parent's part"))
        if outcome == Outcome(0) and self._waiting and self._until is None:
            outcome = NO_FIGURES
        if outcome.cause and self._waiting and not self._late:
            self._end(self._waiting.pop(0), outcome, folder)
        elif not outcome.cause:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome.exit_code

    def _launch(self, folder: Path) -> Outcome:
        start = self._matrix.start(self._waiting, folder, self._until)
        outcome = launch_ranks(
            start.command,
            folder / "status",
            self._waiting[0].cell.ranks,
            start.parts,
            environ=start.environ,
            log=folder / "torchrun.log",
            limit=min(start.limit, self._left),
            meanwhile=lambda: self._harvest(folder),
        )
        self._harvest(folder)
        return outcome

    def _harvest(self, folder: Path) -> None:
        """Complete the cells whose figures are there."""
        for planned in tuple(self._waiting):
            home = self._matrix.home(planned, folder)
            figures = self._matrix.figures(home)
            if figures is None:
                continue
            self._waiting.remove(planned)
            try:
                self._complete(planned, figures, folder, home)
            except Exception as error:
                self._end(planned, Outcome(1, describe(error, 0, "the parent's part")), folder)
            else:
                self._told(self._own[planned.cell.key])
            self._next()

    def _next(self) -> None:
        """The first that waits is under way."""
        if self._waiting:
            self._told(self._own[self._waiting[0].cell.key] | {"state": "running"})

    def _complete(self, planned: Planned, figures: dict[str, Any], folder: Path, home: Path) -> None:
        """The figures of a cell that ended well; its wall time begins where the one before it ended."""
        record, now = self._own[planned.cell.key], time.monotonic()
        wall, self._begun = now - self._begun, now
        record |= {"started": records.now(), "commit": commit()}
        assert figures["plan_digest"] == planned.plan.digest, "the ranks ran another plan than the one recorded"
        record |= records.measured(planned.plan, figures, wall, text_sent=not self._matrix.config.denoise_only)
        record["transport"] = transport(folder, self._matrix.backend, planned.cell.ranks)
        parity.compare(record, self._every, home, self._matrix.latents, save=self._matrix.config.save_latents)

    def _end(self, planned: Planned, outcome: Outcome, folder: Path) -> None:
        """A cell that has no figures, and why."""
        record = self._own[planned.cell.key]
        record |= {"started": records.now(), "commit": commit()} | records.ended(outcome, str(folder))
        self._told(record)
