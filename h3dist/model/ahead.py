"""Dense products whose next weight is made dense meanwhile: on a GPU by a stream of its own, into one of two buffers.

Layers come in one order, step after step, so while one multiplies from its buffer the next fills the other. Elsewhere
the same happens in line, with the same result.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.checkpoint.formats import PlainWeight, Weight
from h3dist.checkpoint.nvfp4 import Nvfp4Weight
from h3dist.errors import MissingDependency
from h3dist.model.dense import Linear, dense_linear, prescaled

Fill = Callable[[Weight, Tensor], None]  # makes a weight dense into a tensor [N, K]


def all_dense(weights: Iterable[Weight], dtype: torch.dtype) -> bool:
    """Whether all are dense in `dtype` as they lie: to make them so would only copy them."""
    return all(isinstance(weight, PlainWeight) and weight.tensor.dtype == dtype for weight in weights)


def plain_fill(weight: Weight, out_NK: Tensor) -> None:
    """By the weight's own method, and a copy."""
    out_NK.copy_(weight.dense(out_NK.dtype))


def triton_fill() -> Fill:
    """By a kernel that writes into place, for NVFP4. Raises MissingDependency."""
    try:
        from h3dist.model.triton_kernels import dequantise
    except ImportError as error:
        raise MissingDependency(f"runtime.fused=on needs triton: {error}") from error

    def fill(weight: Weight, out_NK: Tensor) -> None:
        if isinstance(weight, Nvfp4Weight):
            dequantise(weight.codes, weight.scales, weight.global_scale, out_NK)
        else:
            plain_fill(weight, out_NK)

    return fill


class Slot:
    """A buffer, whose weight it holds, and on a GPU when it was filled and last read."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=dtype, device=device)
        self.weight: Weight | None = None
        cuda = device.type == "cuda"
        self.filled, self.read = (torch.cuda.Event() if cuda else None for _ in range(2))


class AheadLinear:
    """A Linear for the layers of `order`, each the next one's herald and the last one the first's.

    Every second layer has the same buffer, so `order` is of even length and no layer comes twice. A weight that was not
    expected is made dense in line.
    """

    def __init__(self, order: Sequence[Weight], dtype: torch.dtype, device: torch.device, fill: Fill) -> None:
        assert len(order) % 2 == 0 and len({id(weight) for weight in order}) == len(order)
        sizes = [max((prod(weight.shape) for weight in order[turn::2]), default=0) for turn in range(2)]
        self._slots = [Slot(size, dtype, device) for size in sizes]
        self._place = {id(weight): (index % 2, order[(index + 1) % len(order)]) for index, weight in enumerate(order)}
        self._fill = fill
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(device))  # which may still be making the weights
            for slot in self._slots:
                slot.memory.record_stream(self._side)  # not given to others while the last filling runs

    def __call__(self, x_MK: Tensor, weight: Weight) -> Tensor:
        with self.held(weight) as dense_NK:
            return F.linear(prescaled(x_MK, weight), dense_NK)

    @contextmanager
    def held(self, weight: Weight) -> Iterator[Tensor]:
        """The dense weight [N, K], for products that begin while it lasts; the next one is made dense meanwhile."""
        turn, following = self._place[id(weight)]
        slot = self._slots[turn]
        if slot.weight is not weight:
            self._begin(slot, weight)
        self._begin(self._slots[1 - turn], following)
        if self._side is not None:
            torch.cuda.current_stream().wait_event(slot.filled)
        yield self._view(slot, weight)
        if self._side is not None:
            slot.read.record()

    def _begin(self, slot: Slot, weight: Weight) -> None:
        """Fill a slot, once what reads it is done."""
        slot.weight = weight
        if self._side is None:
            self._fill(weight, self._view(slot, weight))
            return
        with torch.cuda.stream(self._side):
            self._side.wait_event(slot.read)
            self._fill(weight, self._view(slot, weight))
            slot.filled.record()

    def _view(self, slot: Slot, weight: Weight) -> Tensor:
        return slot.memory[: prod(weight.shape)].view(weight.shape)


def held(linear: Linear, weight: Weight, dtype: torch.dtype) -> AbstractContextManager[Tensor] | None:
    """The dense weight [N, K] that `linear` multiplies by, while it lasts; None where it multiplies otherwise."""
    if isinstance(linear, AheadLinear):
        return linear.held(weight)
    return nullcontext(weight.dense(dtype)) if linear is dense_linear else None
