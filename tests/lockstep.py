"""N ranks of the model as threads of one process, with an exchange that moves tensors between them by hand.

It says what the moves mean, with no network, no padding and no layout arithmetic of the product; the real
exchange is tested over real processes elsewhere.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from h3dist.comm.forms import Turn
from h3dist.model.exchange import whole_product


@dataclass(frozen=True)
class Part:
    """One rank's part, with the fields of a plan's share that the model reads."""

    sp_index: int
    tp_index: int
    rows: tuple[int, int]
    group_rows: tuple[int, int]
    tp_heads: tuple[int, int]
    heads: tuple[int, int]
    ffn: tuple[int, int]

    @property
    def projected_rows(self) -> tuple[int, int]:
        return self.group_rows

    @property
    def projected_heads(self) -> tuple[int, int]:
        return self.tp_heads


def spread(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """[first, last) in `parts` pieces that differ by one at most, the longer ones first."""
    size, longer = divmod(last - first, parts)
    cuts = [first + index * size + min(index, longer) for index in range(parts + 1)]
    return list(itertools.pairwise(cuts))


def make_parts(rows: int, heads: int, ffn: int, sp: int, tp: int, unit: int = 16) -> list[Part]:
    """The parts of an sp x tp layout: ceil(rows / n) rows each, ragged heads, feed-forward in units."""
    chunk = -(-rows // (sp * tp))
    cuts = [min(index * chunk, rows) for index in range(sp * tp + 1)]
    parts = []
    for rank in range(sp * tp):
        s, t = divmod(rank, tp)
        tp_heads = spread(0, heads, tp)[t]
        low, high = spread(0, ffn // unit, tp)[t]
        own, group = (cuts[rank], cuts[rank + 1]), (cuts[s * tp], cuts[(s + 1) * tp])
        parts.append(Part(s, t, own, group, tp_heads, spread(*tp_heads, sp)[s], (low * unit, high * unit)))
    return parts


class Lockstep:
    """The meeting point of the ranks: `meet` gives every rank's value to every rank."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.slots: list = [None] * len(parts)
        self.barrier = threading.Barrier(len(parts), timeout=60)

    def meet(self, rank: int, value: object) -> list:
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def run(self, rank_main: Callable[[int, Part, HandExchange], object]) -> list:
        """rank_main(rank, part, exchange) of every rank at once; all results, or the first error."""

        def guarded(rank: int) -> object:
            try:
                return rank_main(rank, self.parts[rank], HandExchange(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.parts)) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(len(self.parts))]
        errors = [future.exception() for future in futures if future.exception()]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


class HandExchange:
    """The model's exchange for one rank of a Lockstep."""

    def __init__(self, world: Lockstep, rank: int) -> None:
        self.world, self.rank, self.part = world, rank, world.parts[rank]
        self.tp_group = [r for r, p in enumerate(world.parts) if p.sp_index == self.part.sp_index]
        self.sp_group = [r for r, p in enumerate(world.parts) if p.tp_index == self.part.tp_index]
        self.amax_calls = 0

    def gather_rows(self, x: Tensor) -> Tensor:
        values = self.world.meet(self.rank, x)
        return torch.cat([values[rank] for rank in self.tp_group])

    def gather_projected(self, x: Tensor) -> Tensor:
        return self.gather_rows(x)

    def project(self, x: Tensor, width: int, product: Callable[[Tensor, Tensor], None]) -> Tensor:
        return whole_product(self.gather_projected(x), width, product)

    def reduce_rows(self, partial: Tensor) -> Tensor:
        values = self.world.meet(self.rank, partial)
        total = sum(values[rank] for rank in self.tp_group)
        first = self.part.group_rows[0]
        return total[self.part.rows[0] - first : self.part.rows[1] - first]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        values = self.world.meet(self.rank, (q, k, v))
        low, high = (head - self.part.tp_heads[0] for head in self.part.heads)
        return tuple(torch.cat([values[rank][i][:, low:high] for rank in self.sp_group]) for i in range(3))

    def to_rows(self, o: Tensor) -> Tensor:
        values = self.world.meet(self.rank, o)
        return torch.cat([values[rank][slice(*self.part.group_rows)] for rank in self.sp_group], dim=1)

    def column_spans(self, width: int) -> tuple[tuple[int, int], ...]:
        return ((0, width),)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attention: Callable[..., Tensor], turn: Turn) -> Tensor:
        turn.where_they_lie((q, k, v))
        return self.to_rows(attention(*self.to_heads(q, k, v)))

    def amax(self, x: Tensor) -> Tensor:
        self.amax_calls += 1
        return torch.stack(self.world.meet(self.rank, x.abs().amax().float())).amax()

    def gather_outputs(self, out: Tensor) -> Tensor:
        return torch.cat(self.world.meet(self.rank, out))
