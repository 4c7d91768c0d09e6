"""Go through a matrix: one cell after the other, the JSON written after each. Nothing but a signal stops it."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from h3dist.errors import ConfigError, OutputError
from h3dist.matrix import document as documents
from h3dist.matrix import results
from h3dist.matrix.batch import SIGNALLED, Batch
from h3dist.matrix.config import MatrixConfig
from h3dist.matrix.prepare import Matrix, prepare
from h3dist.matrix.start import Starter
from h3dist.matrix.table import LiveTable
from h3dist.processes import on_signals
from h3dist.topology import read_ranks

TIME_IS_UP = 75
FINE = ("done", "skipped")


def run_matrix(config: MatrixConfig, words: Sequence[str], start: Starter | None = None) -> int:
    """Run every cell of the matrix that is not done, and print the JSON's path. Gives the exit code.

    `words` are the overrides that each cell's run takes; `start` says how a cell's ranks start, by default as
    the configuration says. 0: every cell is done or skipped; 1: some failed, took too long or ran out of memory;
    75: `total_seconds` are over, and some have not run.
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
    until = time.time() + matrix.config.total_seconds if matrix.config.total_seconds else None
    documents.keep(matrix, document)
    with LiveTable([own[planned.cell.key] for planned in matrix.cells]) as shown:

        def told(record: dict[str, Any]) -> None:
            if record["state"] != "running":
                documents.keep(matrix, document)
            shown.changed(record)

        for cells in matrix.batches:
            waiting = [planned for planned in cells if own[planned.cell.key]["state"] == "pending"]
            for planned in (each for each in cells if each not in waiting):
                shown.changed(own[planned.cell.key])
            code = Batch(matrix, waiting, own, document["cells"], until, told).run()
            if code > SIGNALLED:
                return code
    states = {own[planned.cell.key]["state"] for planned in matrix.cells}
    if "pending" in states:
        return TIME_IS_UP
    document["finished"] = True
    documents.keep(matrix, document)
    if not matrix.config.save_latents:
        shutil.rmtree(matrix.latents, ignore_errors=True)
    return int(not states.issubset(FINE))
