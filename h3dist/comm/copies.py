"""Moves by copies from memory to memory: each rank writes its pieces to where its peers want them.

It takes the place of the collectives that move heads, and of the gather of hidden rows. No copy is made on either side
beside those between ranks: what is sent is read where it lies, and what came is used where it arrived, in a slot of the
receiver's memory. How a slot comes to be free is told in `plan/slots.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from h3dist.comm.pieces import Pieces
from h3dist.comm.wire import Group, NcclWire, Wire
from h3dist.plan.slots import Ring

Pair = tuple[Tensor, Tensor]  # a target and its source


class Memory(Protocol):
    """A buffer of every rank of a group, as this rank reaches it, and copies beside what the device computes."""

    buffers: Sequence[Tensor]  # of bytes, flat, all of one size

    def copy(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        """Begins to copy sources to targets, after what the device was given before, and then to meet all ranks.

        What it gives makes what the device is given next come after that. Sources are kept until then.
        """


class Slots:
    """The slots of a run in the memory of a group's ranks, and whose turn it is: the same on all of them."""

    def __init__(self, memory: Memory, index: int, rings: Mapping[str, Ring]) -> None:
        self._memory, self._index, self._rings = memory, index, rings
        self._turns: Counter[str] = Counter()

    def send(self, label: str, x: Tensor, pieces: Pieces) -> tuple[Tensor, Callable[[], None]]:
        """Begins to send flat `x`; gives what is coming to this rank, and what waits for it."""
        ring, size = self._rings[label], x.element_size()
        start = ring.start + self._turns[label] % ring.slots * ring.size
        self._turns[label] += 1
        count = sum(pieces.into) * size
        assert count <= ring.size, (label, count, ring)
        wait = self._memory.copy(list(self._pairs(start, x.view(torch.uint8), size, pieces)))
        return self._memory.buffers[self._index][start : start + count].view(x.dtype), wait

    def holds(self, label: str) -> bool:
        """Whether there are slots for it."""
        return label in self._rings and self._rings[label].size > 0

    def spread(self, label: str, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begins to send flat `x` to every other rank; gives where theirs are coming, end to end, and what waits."""
        ring, data = self._rings[label], x.view(torch.uint8)
        buffers, count = self._memory.buffers, data.numel()
        assert ring.slots == 1 and count * len(buffers) <= ring.size, (label, count, ring)
        at = ring.start + self._index * count
        others = ((self._index + 1 + turn) % len(buffers) for turn in range(len(buffers) - 1))
        wait = self._memory.copy([(buffers[peer][at : at + count], data) for peer in others])
        return buffers[self._index][ring.start : ring.start + count * len(buffers)].view(x.dtype), wait

    def _pairs(self, start: int, data: Tensor, size: int, pieces: Pieces) -> Iterator[Pair]:
        """Every piece and its place; each rank begins with the next one, so that no two write to the same at first."""
        begins = [0, *accumulate(pieces.out)]
        ranks = len(pieces.out)
        for peer in ((self._index + 1 + turn) % ranks for turn in range(ranks)):
            count = pieces.out[peer] * size
            at, begin = start + pieces.at[peer] * size, begins[peer] * size
            if count:
                yield self._memory.buffers[peer][at : at + count], data[begin : begin + count]


class Copying(Wire):
    """A wire whose placed pieces go by copies; everything else goes as on the wire that it is mixed with.

    What an exchange gives lies in a slot. It has to be used up, on the device's own stream, as `plan/slots.py` says.
    """

    def __init__(self, group: Group, counted: dict[str, int], slots: Slots) -> None:
        super().__init__(group, counted)
        self._slots = slots

    def _exchange(self, label: str, x: Tensor, pieces: Pieces) -> Tensor:
        return self._start(label, x, pieces, False)() if pieces.at else super()._exchange(label, x, pieces)

    def _start(self, label: str, x: Tensor, pieces: Pieces, hold: bool) -> Callable[[], Tensor]:
        if not pieces.at:
            return super()._start(label, x, pieces, hold)
        came, wait = self._slots.send(label, x, pieces)

        def finish() -> Tensor:
            wait()
            return came

        return finish

    def gather_others_later(self, label: str, x: Tensor) -> Callable[[], Tensor]:
        """See `Wire`."""
        if not self._slots.holds(label):
            return super().gather_others_later(label, x)
        self._begin(label, x.nbytes * (self.group.size - 1))
        came, wait = self._slots.spread(label, x.contiguous().flatten())

        def finish() -> Tensor:
            wait()
            return came.view(self.group.size * x.shape[0], *x.shape[1:])

        return finish


class CopyWire(Copying, NcclWire):
    """Between GPUs of one machine that reach each other's memory, by their copy engines."""
