"""Rows that are gathered as an NVFP4 product takes them: FP4 codes and block scales, 3.56 times fewer bytes.

The ranks agree on the per-tensor scale first, and a block of 16 columns lies in one row, so that gathering codes gives
to the last bit what quantising the gathered rows does.

Shape letters: s own rows, p gathered rows, K columns, b blocks of 16 of them, N outputs, w bytes of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from h3dist.checkpoint.formats import Weight
from h3dist.checkpoint.nvfp4 import Nvfp4Weight, pad_codes, swizzle, unswizzle
from h3dist.checkpoint.tiles import BLOCK, PAIR
from h3dist.model.dense import Linear, prescaled
from h3dist.model.linear import GEMM_COLUMNS, Fp4Linear, fp4_codes, fp4_product
from h3dist.plan import Plan

Gather = Callable[[Tensor], Tensor]  # rows of this rank -> rows of more ranks, of any dtype


@dataclass(frozen=True)
class Packed:
    """Rows quantised for one layer: uint8 [p, w], codes and then block scales, with the per-tensor scale."""

    bytes_pw: Tensor
    scale: Tensor
    dtype: torch.dtype  # of the rows that they stand for


Rows = Tensor | Packed


@dataclass(frozen=True)
class PackedLinear:
    """FP4 products that also take packed rows."""

    fp4: Fp4Linear

    def __call__(self, x: Rows, weight: Weight) -> Tensor:
        return self._product(x, weight) if isinstance(x, Packed) else self.fp4(x, weight)

    def gather(self, x_sK: Tensor, weight: Weight, gather: Gather) -> Rows:
        """The rows of more ranks for a layer: packed where its product takes them so. Every rank calls it."""
        if not isinstance(weight, Nvfp4Weight) or weight.full_precision:
            return gather(x_sK)
        x_sK = prescaled(x_sK, weight)
        scale = self.fp4.activation_scale(x_sK, weight)
        return Packed(gather(self._packed(x_sK, scale)), scale, x_sK.dtype)

    def _packed(self, x_sK: Tensor, scale: Tensor) -> Tensor:
        rows, columns = x_sK.shape[0], x_sK.shape[1] + -x_sK.shape[1] % GEMM_COLUMNS
        if rows == 0:  # the kernels take no empty tensors
            return x_sK.new_empty(0, columns // PAIR + columns // BLOCK, dtype=torch.uint8)
        codes, scales = fp4_codes(x_sK, scale, self.fp4.kernels)
        scales_sb = unswizzle(scales.view(torch.uint8), (rows, columns))
        return torch.cat((codes[:rows].view(torch.uint8), scales_sb), dim=1)

    def _product(self, x: Packed, weight: Weight) -> Tensor:
        assert isinstance(weight, Nvfp4Weight)
        rows, width = x.bytes_pw.shape
        if rows == 0:
            return torch.empty(0, weight.shape[0], dtype=x.dtype, device=x.bytes_pw.device)
        columns = width * BLOCK * PAIR // (BLOCK + PAIR)
        codes, scales_pb = x.bytes_pw.split((columns // PAIR, columns // BLOCK), dim=1)
        scales = swizzle(scales_pb).view(torch.float8_e4m3fn)
        return fp4_product(pad_codes(codes.contiguous()), scales, x.scale, weight, self.fp4.kernels, x.dtype)[:rows]


def packing(linear: Linear, plan: Plan) -> Linear:
    """The linear of a run, which takes packed rows where they are planned to move so."""
    return PackedLinear(linear) if plan.packs_rows and isinstance(linear, Fp4Linear) else linear


def gathered(x_sK: Tensor, weight: Weight, linear: Linear, gather: Gather) -> Rows:
    """What `linear` takes for `weight` of the rows that `gather` brings together."""
    return linear.gather(x_sK, weight, gather) if isinstance(linear, PackedLinear) else gather(x_sK)
