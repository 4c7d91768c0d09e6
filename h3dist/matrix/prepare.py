"""A matrix before it runs: every cell planned, and how each would start."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3dist.errors import PlanError
from h3dist.matrix import clip_run, random_run
from h3dist.matrix.cells import Cell, Feasible, Planned, batches, cells_of
from h3dist.matrix.config import MatrixConfig
from h3dist.matrix.start import Start, Starter
from h3dist.planner import this_machine
from h3dist.preflight import check_backend


@dataclass(frozen=True)
class Matrix:
    """A matrix that is about to run: its cells, the file of its JSON, how its cells start."""

    config: MatrixConfig
    words: list[str]  # the overrides that each cell's run takes
    backend: str  # what moves tensors between ranks
    cells: tuple[Planned, ...]
    path: Path
    start: Starter

    @property
    def latents(self) -> Path:
        """The folder of all cells' latents."""
        return self.path.with_name(f"{self.path.name}.latents")

    @property
    def batches(self) -> list[tuple[Planned, ...]]:
        """The cells that run in one start of ranks."""
        return batches(self.cells, together=self.config.together)

    def home(self, planned: Planned, folder: Path) -> Path:
        """Where the ranks of a cell leave what it gave, of the folder of its start."""
        return random_run.home(planned, folder) if self.config.denoise_only else folder

    def figures(self, home: Path) -> dict[str, Any] | None:
        """What the ranks of a cell measured, from its home; None while they have not."""
        return random_run.read_random(home) if self.config.denoise_only else clip_run.read_clip(home)


def prepare(config: MatrixConfig, words: list[str], path: Path, start: Starter | None = None) -> Matrix:
    """Plan every cell. Raises what a bad request, configuration or checkpoint raises.

    `start` says how a cell's ranks start; without it they start as the configuration says.
    """
    machine = this_machine(config)
    device = machine.device
    dims = random_run.dims_of(config.size if config.denoise_only else "released")  # a clip's plan knows its own
    feasible = Feasible(config, dims, len(machine.gpus))
    backend = check_backend(config, device)
    shared = random_run.random_settings if config.denoise_only else clip_run.clip_settings
    settings = shared(config, device) | {"backend": backend}
    if device == "cpu":
        settings["threads"] = config.runtime.threads

    def decide(cell: Cell) -> Planned:
        try:
            layout = feasible.layout(cell)
            if config.denoise_only:
                return Planned(cell, random_run.decide_random(cell, layout, config, machine))
            return Planned(cell, clip_run.decide_clip(cell, layout, config, words))
        except PlanError as error:
            return Planned(cell, reason=str(error))

    cells = tuple(map(decide, cells_of(config, settings)))
    return Matrix(config, words, backend, cells, path, start or starter(config, words))


def starter(config: MatrixConfig, words: list[str]) -> Starter:
    """How the cells of a configuration start."""

    def start(batch: Sequence[Planned], folder: Path, until: float | None = None) -> Start:
        if config.denoise_only:
            return random_run.start_random(batch, config, folder, until)
        (planned,) = batch
        return clip_run.start_clip(planned, config, words, folder)

    return start
