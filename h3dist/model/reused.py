"""Dense products whose weights are made dense one after the other in one memory.

A GPU that multiplies is held back by its power: what it does between two products costs a step little, and to make a
weight dense beside the product before it won nothing on an H200.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.checkpoint.formats import PlainWeight, Weight
from h3dist.checkpoint.nvfp4 import Nvfp4Weight
from h3dist.errors import MissingDependency
from h3dist.model.dense import Linear, dense_linear, prescaled

Fill = Callable[[Weight, Tensor], None]  # makes a weight dense into a tensor [N, K]


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


class ReusedLinear:
    """A Linear that keeps as much memory as the largest weight that it has met takes; plain weights need none."""

    def __init__(self, fill: Fill, dtype: torch.dtype, device: torch.device) -> None:
        self._fill, self._memory = fill, torch.empty(0, dtype=dtype, device=device)

    def __call__(self, x_MK: Tensor, weight: Weight) -> Tensor:
        return F.linear(prescaled(x_MK, weight), self.dense(weight))

    def dense(self, weight: Weight) -> Tensor:
        """The dense weight [N, K], until the next one is asked for."""
        if isinstance(weight, PlainWeight) and weight.tensor.dtype == self._memory.dtype:
            return weight.tensor
        size = prod(weight.shape)
        if self._memory.numel() < size:
            self._memory = self._memory.new_empty(size)
        dense_NK = self._memory[:size].view(weight.shape)
        self._fill(weight, dense_NK)
        return dense_NK


def made_dense(linear: Linear, weight: Weight, dtype: torch.dtype) -> Tensor | None:
    """The dense weight [N, K] that `linear` multiplies by, until it is asked for another; None where it multiplies
    otherwise."""
    if isinstance(linear, ReusedLinear):
        return linear.dense(weight)
    return weight.dense(dtype) if linear is dense_linear else None
