"""Memory that ranks on a CPU reach in each other: files that all map, copied to by a thread that has a will of its own.

It stands in for GPUs' memory and a stream of theirs: copies are made in order, beside what the rank computes and at odd
times, and all ranks meet after those of each exchange. What nobody wrote is NaN.
"""

import queue
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread

import torch
from torch import Tensor

from h3dist.comm import Comm
from h3dist.comm.copies import Copying, Pair
from h3dist.comm.peers import Reach
from h3dist.comm.transport import Transport
from h3dist.comm.wire import GlooWire, Group

PATIENCE = 20.0  # seconds


class MappedMemory:
    """A buffer of every rank, mapped by all; `place` begins the files' names."""

    def __init__(self, place: Path, size: int, device: torch.device) -> None:
        self.size, self.buffers, self._place, self._exchanges = size, [], place, 0
        self._orders: queue.Queue[tuple[Sequence[Pair], int, Event]] = queue.Queue()
        Thread(target=self._work, daemon=True).start()

    def meet(self, group: Group) -> None:
        self._index, mine = group.index, f"{group.ranks[group.index]}"
        for kind, data in (("data", b"\xff" * self.size), ("met", bytes(8))):
            part = Path(f"{self._place}-{kind}-{mine}.part")
            part.write_bytes(data)
            part.rename(part.with_suffix(""))
        self.buffers = [self._map("data", rank, self.size, torch.uint8) for rank in group.ranks]
        self._met = [self._map("met", rank, 1, torch.int64) for rank in group.ranks]
        self.rest()

    def rest(self) -> None:
        self._orders.join()

    def copy(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        self._exchanges += 1
        done = Event()
        self._orders.put((pairs, self._exchanges, done))

        def wait() -> None:
            assert done.wait(PATIENCE), "nobody came"

        return wait

    def _map(self, kind: str, rank: int, size: int, dtype: torch.dtype) -> Tensor:
        path = Path(f"{self._place}-{kind}-{rank}")
        until(path.exists)
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype)

    def _work(self) -> None:
        while True:
            pairs, turn, done = self._orders.get()
            for target, source in pairs:
                time.sleep(random.random() / 2000)
                target.copy_(source)
            self._met[self._index].fill_(turn)
            until(lambda turn=turn: all(int(met) >= turn for met in self._met))
            done.set()
            self._orders.task_done()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "nobody came"
        time.sleep(0.0002)


class GlooCopies(Copying, GlooWire):
    """Heads by copies, everything else over gloo."""


class MappedTransport(Transport):
    """That of ranks with mapped memory. `lacks`: what this rank says it lacks; `broken`: the step that fails here."""

    wire, over = GlooCopies, GlooWire

    def __init__(self, comm: Comm, folder: str, lacks: str | None = None, broken: str = "") -> None:
        super().__init__(comm.collect, comm.layout, comm.device)
        self._folder, self._broken, self.made = Path(folder), broken, 0
        everyone = tuple(f"gpu {rank}" for rank in range(comm.layout.world))
        self.reach = lambda _: Reach("here", everyone[comm.rank], everyone, lacks)

    def memory(self, size: int, device: torch.device) -> MappedMemory:
        self.made += 1
        if self._broken == "take":
            raise RuntimeError("out of memory")
        made = MappedMemory(self._folder / f"memory-{self.made}", size, device)
        if self._broken == "meet":
            made.rest = refuse
        return made


def refuse() -> None:
    raise RuntimeError("mapping failed")
