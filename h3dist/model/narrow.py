"""Products of 8-bit operands, opt-in approximations: weights rounded once at load, activations row by row as they come.

A row's scale is of that row's own inputs, so ranks that split rows compute what one would without a word; where a rank
holds a slice of the inputs (the second layer of each half, over tp) its scales are of the slice: never coarser.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h3dist.checkpoint.formats import DENSE_ELEMENTS, Int8Weight, PlainWeight, RowScaledWeight, Weight
from h3dist.errors import MissingDependency
from h3dist.fp8 import to_rows_of_fp8
from h3dist.model.dense import Linear, dense_linear, prescaled
from h3dist.model.elementwise import PLAIN, Elementwise

INT8_LARGEST = 127.0
SMALLEST = 1e-30


class Fp8Weight(RowScaledWeight):
    """The codes are E4M3 and the scales powers of two."""


def narrowed(weight: Weight, gemm: str, dtype: torch.dtype) -> Weight:
    """The weight for `gemm`, fp8 or int8, from what the dense product of `dtype` would take; any other as it is.

    A layer that its marker keeps in full precision stays as it is too, and is multiplied dense.
    """
    kept = weight.full_precision and not isinstance(weight, PlainWeight)
    if gemm not in ROUNDED or kept or (gemm == "int8" and isinstance(weight, Int8Weight)):
        return weight
    dense = weight.dense(dtype)
    step = max(1, DENSE_ELEMENTS // max(1, dense.shape[1]))
    parts = [ROUNDED[gemm](rows.float()) for rows in dense.split(step)]
    codes, scales = zip(*parts, strict=True)
    made = Fp8Weight if gemm == "fp8" else Int8Weight
    joined = torch.cat([part.view(torch.uint8) for part in codes]).view(codes[0].dtype)
    return made(joined, torch.cat(scales), pre_quant_scale=weight.pre_quant_scale)


def to_rows_of_int8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [M, K] and its scale f32 [M, 1], the row's largest magnitude / 127; halves to even."""
    if x_MK.numel() == 0:
        return x_MK.new_empty(x_MK.shape, dtype=torch.int8), x_MK.new_ones((x_MK.shape[0], 1)).float()
    largest = torch.linalg.vector_norm(x_MK, ord=torch.inf, dim=1, keepdim=True)
    scale = (largest.float() / INT8_LARGEST).clamp_min(SMALLEST)
    return (x_MK.float() / scale).round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8), scale


Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]  # x [M, K] -> codes [M, K], scales f32 [M, 1]
ROUNDED: dict[str, Rounding] = {"fp8": to_rows_of_fp8, "int8": to_rows_of_int8}


class Fp8Rows(NamedTuple):
    """An activation whose rows are rounded already: E4M3 [M, K], f32 [M, 1], and the dtype of its product."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


def fp8_rows(x_MK: Tensor | Fp8Rows, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Codes and scales of an activation."""
    return x_MK[:2] if isinstance(x_MK, Fp8Rows) else rounding(x_MK)


def plain_fp8(x_MK: Tensor | Fp8Rows, weight: Fp8Weight) -> Tensor:
    """The product that defines `gemm=fp8`: operands as rounded, sums in float32, scaled, and rounded once."""
    codes_MK, scale_M1 = fp8_rows(x_MK, to_rows_of_fp8)
    y_MN = codes_MK.float() @ weight.codes.float().T
    return (y_MN * (scale_M1 * weight.scale.T)).to(x_MK.dtype)


def fp8_rounding() -> Rounding:
    """For CUDA: one kernel where triton is installed, which reads a row once; else the plain form."""
    try:
        from h3dist.model.triton_kernels import rows_to_fp8
    except ImportError:
        return to_rows_of_fp8
    return rows_to_fp8


def activation_of_run(between: Elementwise, layers: Iterable[Weight]) -> Elementwise:
    """The fused path with an activation that gives `Fp8Rows`, where each of the `layers` that take it multiplies such.

    The same to the bit as an activation that is rounded afterwards, in a pass over memory less.
    """
    takes = (isinstance(w, Fp8Weight) and not w.full_precision and w.pre_quant_scale is None for w in layers)
    if between is PLAIN or not all(takes):
        return between
    from h3dist.model.triton_narrow import activate_to_fp8

    return between._replace(activate=lambda gate_up_g2f: Fp8Rows(*activate_to_fp8(gate_up_g2f), gate_up_g2f.dtype))


def scaled_fp8(x_MK: Tensor | Fp8Rows, weight: Fp8Weight, rounding: Rounding = to_rows_of_fp8) -> Tensor:
    """The same on GPUs of compute capability 8.9 and up, by torch's GEMM with a scale a row and a column."""
    codes_MK, scale_M1 = fp8_rows(x_MK, rounding)
    return torch._scaled_mm(
        codes_MK,
        weight.codes.T,
        scale_a=scale_M1,
        scale_b=weight.scale.T.contiguous(),
        out_dtype=x_MK.dtype,
        use_fast_accum=True,
    )


def plain_int8(x_MK: Tensor, weight: Int8Weight) -> Tensor:
    """The product that defines `gemm=int8`: exact sums of the rounded operands, scaled, and rounded once."""
    codes_MK, scale_M1 = to_rows_of_int8(x_MK)
    sums_MN = codes_MK.double() @ weight.codes.double().T
    return (sums_MN.float() * (scale_M1 * weight.scale.T)).to(x_MK.dtype)


def kitchen_int8() -> Callable[..., Tensor]:
    """The same by comfy-kitchen: `int8_linear(x, codes, scale, out_dtype=)`. Raises MissingDependency."""
    try:
        from comfy_kitchen import int8_linear
    except ImportError as error:
        raise MissingDependency(f"runtime.gemm=int8 needs comfy-kitchen: {error}") from error

    def product(x_MK: Tensor, weight: Int8Weight) -> Tensor:
        return int8_linear(x_MK, weight.codes, weight.scale, out_dtype=x_MK.dtype)

    return product


def narrow_linear(gemm: str, *, cuda: bool) -> Linear:
    """The linear of a run with `gemm` fp8 or int8; a weight of any other type is multiplied dense."""
    kind: type[Weight] = Fp8Weight if gemm == "fp8" else Int8Weight
    product: Callable[[Tensor, Any], Tensor] = plain_fp8 if gemm == "fp8" else plain_int8
    if cuda:
        product = partial(scaled_fp8, rounding=fp8_rounding()) if gemm == "fp8" else kitchen_int8()

    def linear(x_MK: Tensor | Fp8Rows, weight: Weight) -> Tensor:
        if not isinstance(weight, kind) or weight.full_precision:
            return dense_linear(x_MK, weight)
        if x_MK.shape[0] == 0:
            return weight.codes.new_empty((0, weight.shape[0]), dtype=x_MK.dtype)
        return product(x_MK if isinstance(x_MK, Fp8Rows) else prescaled(x_MK, weight).contiguous(), weight)

    return linear
