"""Go through a matrix: one cell after the other, the JSON written after each. Nothing but a signal stops it."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from h3dist.errors import ConfigError, OutputError
from h3dist.matrix import document as documents
from h3dist.matrix import parity, records, results
from h3dist.matrix.cells import Planned
from h3dist.matrix.config import MatrixConfig
from h3dist.matrix.prepare import Matrix, prepare
from h3dist.matrix.start import Starter
from h3dist.matrix.table import LiveTable
from h3dist.matrix.transport import transport
from h3dist.processes import Outcome, launch_ranks, on_signals
from h3dist.provenance import commit
from h3dist.status import describe
from h3dist.topology import read_ranks
from h3dist.torchrun import run_folder

SIGNALLED = 128  # exit codes above it: a signal
FINE = ("done", "skipped")


def run_matrix(config: MatrixConfig, words: Sequence[str], start: Starter | None = None) -> int:
    """Run every cell of the matrix that is not done, and print the JSON's path. Gives the exit code.

    `words` are the overrides that each cell's run takes; `start` says how a cell's ranks start, by default as
    the configuration says. 0: every cell is done or skipped; 1: some failed, ran out of time or out of memory.
    Raises an `H3Error` where the matrix itself cannot be run.
    """
    if read_ranks().elastic:
        raise ConfigError("a matrix starts torchrun for every cell; run `h3dist matrix` without torchrun")
    path = Path(config.results).absolute()
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {config.results}: there is no folder {path.parent}")
    with on_signals(_leave), results.hold(path):
        matrix = prepare(config, list(words), path, start)
        code = _run(matrix, documents.open_document(matrix))
    print(path)
    return code


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(SIGNALLED + number)


def _run(matrix: Matrix, document: dict[str, Any]) -> int:
    own = {record["key"]: record for record in document["cells"]}
    documents.keep(matrix, document)
    with LiveTable([own[planned.cell.key] for planned in matrix.cells]) as shown:
        for planned in matrix.cells:
            record = own[planned.cell.key]
            if record["state"] == "pending":
                shown.changed(record | {"state": "running"})
                code = _run_cell(matrix, planned, record, document["cells"])
                documents.keep(matrix, document)
                if code > SIGNALLED:
                    return code
            shown.changed(record)
    document["finished"] = True
    documents.keep(matrix, document)
    if not matrix.config.save_latents:
        shutil.rmtree(matrix.latents, ignore_errors=True)
    return int(any(own[planned.cell.key]["state"] not in FINE for planned in matrix.cells))


def _run_cell(matrix: Matrix, planned: Planned, record: dict[str, Any], cells: list[dict[str, Any]]) -> int:
    """Run one cell and complete its record. Gives the exit code of its run; above 128 a signal came.

    Whatever goes wrong with one cell stands in its record and leaves the others alone.
    """
    folder, begun = run_folder(), time.monotonic()
    record |= {"started": records.now(), "commit": commit()}
    try:
        outcome = _launch(matrix, planned, folder)
        if outcome == Outcome(0):
            _complete(matrix, planned, record, folder, time.monotonic() - begun)
            parity.compare(record, cells, folder, matrix.latents, save=matrix.config.save_latents)
    except Exception as error:
        outcome = Outcome(1, describe(error, 0, "the parent's part"))
    if outcome.cause:
        record |= records.ended(outcome, str(folder))
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome.exit_code


def _launch(matrix: Matrix, planned: Planned, folder: Path) -> Outcome:
    start = matrix.start(planned, folder)
    return launch_ranks(
        start.command,
        folder / "status",
        planned.cell.ranks,
        start.parts,
        environ=start.environ,
        log=folder / "torchrun.log",
        limit=start.limit,
    )


def _complete(matrix: Matrix, planned: Planned, record: dict[str, Any], folder: Path, wall: float) -> None:
    """The figures of a run that ended well."""
    figures = matrix.figures(folder)
    assert figures["plan_digest"] == planned.plan.digest, "the ranks ran another plan than the one recorded"
    record |= records.measured(planned.plan, figures, wall, text_sent=not matrix.config.denoise_only)
    record["transport"] = transport(folder, matrix.backend, planned.cell.ranks)
