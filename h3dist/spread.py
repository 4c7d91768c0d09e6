"""Which rank does which job of a VAE: a static schedule from costs alone, the same on every rank.

Jobs come in chunks. A chunk's results go to rank 0 together, so that it fades, converts and encodes one chunk while
all ranks work on the next. Costs are in units of one job of a whole tile. Standard library only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

Costs = Sequence[Sequence[float]]  # of each job, chunk by chunk, in serial order


@dataclass(frozen=True)
class Extra:
    """What two ranks do beside the jobs."""

    chunk: float = 0.0  # rank 0, once a chunk is whole: fades, colours, and handing the frames on
    sound: float = 0.0  # the last rank, before its first job


@dataclass(frozen=True)
class Schedule:
    """The rank of every job, chunk by chunk, in serial order; the last rank decodes the sound."""

    ranks: int
    chunks: tuple[tuple[int, ...], ...]

    @property
    def sound(self) -> int:
        """The rank that decodes the sound."""
        return self.ranks - 1

    def mine(self, rank: int, chunk: int) -> list[int]:
        """The places, within a chunk, of a rank's jobs."""
        return [place for place, owner in enumerate(self.chunks[chunk]) if owner == rank]

    def calls(self, rank: int, chunk: int, batch: int) -> list[list[int]]:
        """The same places, those of a call of `batch` jobs together: the chunk's first ones, the next, and so on."""
        return [list(places) for _, places in groupby(self.mine(rank, chunk), lambda place: place // batch)]

    def counts(self, chunk: int) -> list[int]:
        """How many jobs of a chunk each rank has."""
        return [self.chunks[chunk].count(rank) for rank in range(self.ranks)]

    def total(self, rank: int) -> int:
        """How many jobs a rank has in all."""
        return sum(owners.count(rank) for owners in self.chunks)


def spread(costs: Costs, ranks: int, extra: Extra, batch: int = 1) -> Schedule:
    """Every call of `batch` jobs of a chunk, in serial order, to the rank that is free first, the lowest of several.

    Serial order keeps the ranks within a job of each other at the end of every chunk, so that nobody waits long for
    the chunk to be whole.
    """
    busy = [0.0] * ranks
    busy[-1] += extra.sound
    chunks = []
    for jobs in costs:
        owners = []
        for begin in range(0, len(jobs), batch):
            call = jobs[begin : begin + batch]
            rank = min(range(ranks), key=busy.__getitem__)
            busy[rank] += sum(call)
            owners += [rank] * len(call)
        busy[0] += extra.chunk
        chunks.append(tuple(owners))
    return Schedule(ranks, tuple(chunks))


def makespan(schedule: Schedule, costs: Costs, extra: Extra) -> float:
    """When rank 0 is done with the last chunk.

    A rank's results of a chunk leave when its jobs of it are done. It then does its jobs of the next chunk, and
    before those of the one after it waits until the first chunk is whole; rank 0 then finishes that chunk.
    """
    clock = [0.0] * schedule.ranks
    clock[schedule.sound] += extra.sound
    whole = 0.0  # when the chunk before was
    for index, jobs in enumerate(costs):
        for rank, cost in zip(schedule.chunks[index], jobs, strict=True):
            clock[rank] += cost
        before, whole = whole, max(clock)
        if index:
            clock = [max(time, before) for time in clock]
            clock[0] += extra.chunk
    return max(clock[0], whole) + extra.chunk
