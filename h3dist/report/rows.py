"""One form for every measurement, ours and other people's: what a table row and a point of a picture are made from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any


@dataclass(frozen=True)
class Row:
    """One layout at one shape. Seconds and bytes; None where it is not known. Bytes are summed over ranks.

    `base` is the number of ranks that `speedup` and `efficiency` are over: 1, or the fewest that were measured.
    `stages` are seconds of a whole run, in order.
    """

    hardware: str
    layout: str
    ranks: int
    shape: str
    attention: str | None = None
    runner: str | None = None  # the program, where it is not ours
    step: float | None = None
    step_min: float | None = None
    step_max: float | None = None
    first_step: float | None = None
    predicted: float | None = None  # seconds a step, by the planner
    total: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    base: int = 1
    error: float | None = None
    equal: bool | None = None
    peak_memory: int | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    planned: Mapping[str, int] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)
    note: str | None = None

    @property
    def kind(self) -> tuple[str | None, ...]:
        """What rows share whose gains over each other mean something."""
        return self.hardware, self.shape, self.attention, self.runner

    @property
    def area(self) -> int:
        """Pixels of all frames."""
        return prod(map(int, self.shape.split("x")))

    @property
    def place(self) -> tuple[Any, ...]:
        """Where the row stands in its table: by pixels, then by ranks."""
        return self.area, self.attention or "", self.ranks, self.layout

    @property
    def gained(self) -> bool:
        """Whether the speed-up says anything: not of several ranks that the others are held against."""
        return self.speedup is not None and (self.ranks > self.base or self.ranks == 1)

    @property
    def gain(self) -> float | None:
        """The speed-up as if it were over one rank, for a curve beside the ideal: `base` ranks lie on it."""
        return None if self.efficiency is None else self.efficiency * self.ranks


def apart(rows: Sequence[Row]) -> list[str]:
    """What tells each of these rows from the others beside its shape, layout and number of ranks, in words."""
    names = [name for name in ("hardware", "runner", "attention") if len({getattr(row, name) for row in rows}) > 1]
    return [" ".join(getattr(row, name) or "" for name in names).strip() for row in rows]


@dataclass(frozen=True)
class Source:
    """One file of measurements: `facts` say where they come from, `faults` what did not run and why."""

    name: str
    title: str
    rows: tuple[Row, ...]
    facts: tuple[tuple[str, str], ...]
    faults: tuple[str, ...] = ()


def with_gains(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Fill in speed-up and efficiency where they are missing, over the fewest ranks measured of the same kind."""
    return tuple(row if row.speedup is not None else _gained(row, _base(row, rows)) for row in rows)


def _base(row: Row, rows: Iterable[Row]) -> Row | None:
    """The row to hold another against: of the same kind, on the fewest ranks, and of those the fastest."""
    same = [other for other in rows if other.kind == row.kind and other.step]
    return min(same, key=lambda other: (other.ranks, other.step), default=None)


def _gained(row: Row, base: Row | None) -> Row:
    if base is None or not row.step or (base.ranks == row.ranks and base is not row):
        return row
    speedup = base.step / row.step if base.step else None
    efficiency = None if speedup is None else speedup * base.ranks / row.ranks
    return replace(row, speedup=speedup, efficiency=efficiency, base=base.ranks)
