"""The cells of a matrix: which runs it is made of, in which order, and which of them cannot be."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from h3dist.config import Config
from h3dist.errors import ConfigError, PlanError
from h3dist.matrix.config import PLAINLY, Listed, MatrixConfig, Shape, exchange_of
from h3dist.plan import Layout, Plan, make_layout
from h3dist.plan.exchange import open_exchanges
from h3dist.planner import Decision

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import DenoiserDims


@dataclass(frozen=True)
class Cell:
    """One run of a matrix.

    `asked` is the word for its layout, `exchange` for how heads move, `settings` all that it shares with the others.
    """

    shape: Shape
    asked: str
    ranks: int
    attention: str
    repeat: int
    settings: Mapping[str, Any]
    exchange: str = PLAINLY

    @property
    def name(self) -> str:
        """For people: 864x480x141 ulysses 4 sdpa #1."""
        moved = "" if self.exchange == PLAINLY else f" {self.exchange}"
        return f"{self.shape} {self.asked} {self.ranks}{moved} {self.attention} #{self.repeat}"

    @property
    def key(self) -> str:
        """16 hexadecimal digits that tell this cell from every one of another configuration."""
        told = [str(self.shape), self.asked, self.ranks, self.attention, self.repeat, dict(self.settings)]
        told += [] if self.exchange == PLAINLY else [self.exchange]  # files from before there were others stay good
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Planned:
    """A cell with what was decided for it, or without that and the reason why it cannot run here."""

    cell: Cell
    decision: Decision | None = None
    reason: str | None = None

    @property
    def plan(self) -> Plan:
        """The plan of a cell that can run."""
        assert self.decision is not None, self.reason
        return self.decision.plan


def cells_of(config: MatrixConfig, settings: Mapping[str, Any]) -> Iterator[Cell]:
    """Every cell, baselines first, or those that are listed; a repeat begins when all cells have run once more."""
    if config.cells:
        yield from _listed(config, settings)
        return
    axes = (range(1, config.repeats + 1), config.shapes, sorted(set(config.worlds)), config.layouts, config.exchanges)
    for repeat, shape, ranks, asked, exchange, attention in product(*axes, config.attentions):
        yield Cell(Shape.of(shape), asked, ranks, attention, repeat, settings, exchange)


def _listed(config: MatrixConfig, settings: Mapping[str, Any]) -> Iterator[Cell]:
    """The cells that `cells` names, in its order."""
    listed = [Listed.of(text) for text in config.cells]
    for repeat, each, attention in product(range(1, config.repeats + 1), listed, config.attentions):
        own = {**settings, "steps": each.steps} if each.steps else settings
        yield Cell(each.shape, each.asked, each.ranks, attention, repeat, own, each.exchange)


def batches(cells: Iterable[Planned], *, together: bool) -> list[tuple[Planned, ...]]:
    """The cells that one start of ranks runs, one after the other: one, or `together` all of a layout on the same GPUs.

    In the order of the first of each; cells that cannot run are alone.
    """
    found: dict[object, list[Planned]] = {}
    for number, planned in enumerate(cells):
        shared = together and planned.decision is not None
        key = (planned.plan.layout, planned.decision.visible) if shared and planned.decision else number
        found.setdefault(key, []).append(planned)
    return [tuple(batch) for batch in found.values()]


def layout_of(cell: Cell, dims: "DenoiserDims") -> Layout:
    """The layout that a cell asks for. Raises `PlanError` where its number of ranks or the model has none such."""
    if "x" in cell.asked:
        sp, tp = map(int, cell.asked.split("x"))
        return make_layout("hybrid", cell.ranks, sp, tp, dims)
    return make_layout(cell.asked, cell.ranks, None, None, dims)


class Feasible:
    """Says of cell after cell why it need not or cannot run: too few devices, no such layout, the same as another."""

    def __init__(self, config: Config, dims: "DenoiserDims", gpus: int) -> None:
        self._dims, self.gpus = dims, gpus
        self._shared = config.runtime.backend == "gloo"
        self._seen: dict[tuple[Any, ...], Cell] = {}
        if config.runtime.device == "cuda" and not gpus:
            raise ConfigError("runtime.device=cuda: no GPU is visible; runtime.device=cpu runs on the processor")

    def layout(self, cell: Cell) -> Layout:
        """The cell's layout. Raises `PlanError` with the reason."""
        if 0 < self.gpus < cell.ranks and not self._shared:
            raise PlanError(f"{cell.ranks} ranks, {self.gpus} GPUs visible")
        layout = layout_of(cell, self._dims)
        moved = tuple(dict.fromkeys(each.on(layout) for each in open_exchanges(**vars(exchange_of(cell.exchange)))))
        first = self._seen.setdefault((cell.shape, layout, cell.attention, cell.repeat, moved), cell)
        if first is not cell and first.exchange != cell.exchange:
            raise PlanError(f"{cell.exchange} changes nothing in {layout}: it is the run of {first.exchange}")
        if first is not cell:
            raise PlanError(f"{layout} is the layout of {first.asked} {first.ranks}")
        return layout
