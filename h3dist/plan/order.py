"""Which GPU each rank takes: tensor-parallel ranks, which talk most, on the closest links."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import comb

from h3dist.plan.layout import Layout

Costs = Mapping[tuple[int, int], float]  # seconds a byte between two GPUs, by place, a < b
SEARCHED = 5000  # arrangements; a machine with more keeps its own order


def arrange(layout: Layout, count: int, costs: Costs) -> tuple[int, ...]:
    """The place of each rank's GPU among `count` of them; ranks of a tp group are neighbours.

    The best is what has the fastest worst link within tp groups, then the fastest such links in all, then the
    fastest links among the GPUs taken; of equals the first, so that on a machine of equal links every rank keeps
    its own.
    """
    whole = tuple(range(layout.world))
    if layout.world > count or _arrangements(layout, count) > SEARCHED:
        return tuple(rank % count for rank in whole)
    candidates = (
        tuple(place for group in groups for place in group)
        for taken in combinations(range(count), layout.world)
        for groups in _groups(taken, layout.tp)
    )
    return min(candidates, key=lambda places: (*_score(places, layout.tp, costs), places))


def _score(places: Sequence[int], tp: int, costs: Costs) -> tuple[float, float, float]:
    groups = [sorted(places[start : start + tp]) for start in range(0, len(places), tp)]
    close = [costs[pair] for group in groups for pair in combinations(group, 2)]
    every = sum(costs[pair] for pair in combinations(sorted(places), 2))
    return max(close, default=0.0), sum(close), every


def _groups(places: tuple[int, ...], size: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to part `places` in groups of `size`, each way once, members and groups in rising order."""
    if not places:
        yield ()
        return
    first, rest = places[0], places[1:]
    for others in combinations(rest, size - 1):
        left = tuple(place for place in rest if place not in others)
        for groups in _groups(left, size):
            yield ((first, *others), *groups)


def _arrangements(layout: Layout, count: int) -> int:
    ways, left = comb(count, layout.world), layout.world
    while left:
        ways *= comb(left - 1, layout.tp - 1)
        left -= layout.tp
    return ways
