"""How rows of heads lie on the wire: as they are, or as int8 codes with a scale for each few rows of a head.

A piece is what one rank sends to another: [r, k, n, D], its kinds being q, k and v, or the output alone.

Shape letters: r rows of a piece, k kinds, n heads, D head size, b blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.comm.rounding import Rounding
from h3dist.plan.exchange import CODED_ROWS, SCALE_BYTES

LARGEST = 127  # of a code
TINY = torch.finfo(torch.float32).tiny


Fill = Callable[[Tensor], None]  # writes a piece's values [r, k, n, D] where it is told to


class Codec(Protocol):
    """Lays pieces on the wire and takes them off it."""

    def room(self, like: Tensor, count: int) -> Tensor:
        """Flat, `count` elements of the wire's dtype, on the device of `like`; nothing is in it yet."""

    def count(self, shape: Sequence[int]) -> int:
        """Elements of a piece of this shape on the wire."""

    def write(self, piece: Tensor, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> None:
        """Lays a piece of this shape [r, k, n, D] and dtype on `piece`, a part of the wire; `fill` gives its values."""

    def read(self, piece: Tensor, target_rknD: Tensor) -> None:
        """Takes a piece off the wire."""


class Plain:
    """Every element as it is. Consecutive pieces of the same heads are one tensor as they lie."""

    def room(self, like: Tensor, count: int) -> Tensor:
        return like.new_empty(count)

    def count(self, shape: Sequence[int]) -> int:
        return prod(shape)

    def write(self, piece: Tensor, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> None:
        fill(piece.view(tuple(shape)))

    def read(self, piece: Tensor, target_rknD: Tensor) -> None:
        target_rknD.copy_(piece.view(target_rknD.shape))


class Int8:
    """Codes round(x / scale), where scale = max |x| / 127, in float32, of CODED_ROWS rows of a kind and head.

    It is approximate, and `rounding` hears by how much. A value that is not finite makes its block so: none is hidden.
    """

    def __init__(self, rounding: Rounding) -> None:
        self._rounding = rounding

    def room(self, like: Tensor, count: int) -> Tensor:
        return like.new_empty(count, dtype=torch.int8)

    def count(self, shape: Sequence[int]) -> int:
        return SCALE_BYTES * prod(_blocks(shape)) + prod(shape)

    def write(self, piece: Tensor, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> None:
        values_rknD = torch.empty(tuple(shape), dtype=dtype, device=piece.device)
        fill(values_rknD)
        x_rknD = values_rknD.float()
        scales_bkn = _scales(x_rknD)
        scale_rkn1 = _by_rows(scales_bkn, x_rknD.shape[0])
        on_wire, codes_rknD = self._parts(piece, x_rknD.shape)
        on_wire.copy_(scales_bkn.flatten().view(torch.int8))
        codes_rknD.copy_((x_rknD / scale_rkn1).round_())
        self._rounding.add(x_rknD, codes_rknD, scale_rkn1)

    def read(self, piece: Tensor, target_rknD: Tensor) -> None:
        on_wire, codes_rknD = self._parts(piece, target_rknD.shape)
        scales = on_wire.clone().view(torch.float32)  # on the wire they may lie at any byte
        scales_bkn = scales.view(_blocks(target_rknD.shape))
        target_rknD.copy_(codes_rknD * _by_rows(scales_bkn, target_rknD.shape[0]))

    def _parts(self, piece: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Where a piece has the bytes of its scales, and its codes."""
        scales, codes = piece.split([SCALE_BYTES * prod(_blocks(shape)), prod(shape)])
        return scales, codes.view(tuple(shape))


def _blocks(shape: Sequence[int]) -> tuple[int, int, int]:
    """The shape of a piece's scales."""
    rows, kinds, heads, _ = shape
    return -(-rows // CODED_ROWS), kinds, heads


def _scales(x_rknD: Tensor) -> Tensor:
    """scales_bkn, never 0: a block of zeros has codes of 0 all the same. NaN and infinity stay what they are."""
    largest_rkn = x_rknD.abs().amax(-1)
    missing = -x_rknD.shape[0] % CODED_ROWS
    blocks, kinds, heads = _blocks(x_rknD.shape)
    whole = F.pad(largest_rkn, (0, 0, 0, 0, 0, missing)).view(blocks, CODED_ROWS, kinds, heads)
    return (whole.amax(1) / LARGEST).clamp_min(TINY)


def _by_rows(scales_bkn: Tensor, rows: int) -> Tensor:
    """scale_rkn1: that of every row's block."""
    return scales_bkn.repeat_interleave(CODED_ROWS, dim=0)[:rows, ..., None]
