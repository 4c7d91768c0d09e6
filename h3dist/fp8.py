"""E4M3 with scales that are powers of two: multiplying by one is exact in bfloat16, so that a value is rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0  # of E4M3
SMALLEST = 2.0**-100  # what a largest magnitude counts as at least, so that zeros have a scale


def power_of_two(largest: Tensor) -> Tensor:
    """f32: the largest power of two p with p * `largest` <= 448, where `largest` is a magnitude."""
    _, exponent = torch.frexp(LARGEST / largest.float().clamp_min(SMALLEST))  # the quotient is m 2^e, 1/2 <= m < 1
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - 1)


def to_rows_of_fp8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [M, K], and f32 [M, 1], the power of two that each row was divided by."""
    if x_MK.numel() == 0:
        return x_MK.new_empty(x_MK.shape, dtype=torch.float8_e4m3fn), x_MK.new_ones((x_MK.shape[0], 1)).float()
    factor = power_of_two(torch.linalg.vector_norm(x_MK, ord=torch.inf, dim=1, keepdim=True))
    return (x_MK * factor.to(x_MK.dtype)).to(torch.float8_e4m3fn), 1 / factor
