# ruff: noqa: ANN001, ANN202 (a kernel's arguments are what Triton makes of them)
"""Kernels of `runtime.gemm=fp8` beside the fused path, in Triton: what rounds its result for the product that follows.

Shape letters: g rows of the feed-forward half, f its columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3dist.model.triton_kernels import round_row, warps


@triton.jit
def _activate_to_fp8(gate_up, codes, scales, f, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < f
    gate = tl.load(gate_up + row * 2 * f + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * f + f + column, mask=inside, other=0.0).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty)  # rounded as `activate` stores it
    round_row(result.to(tl.float32), codes, scales, row, column, f)


def activate_to_fp8(gate_up_g2f: Tensor) -> tuple[Tensor, Tensor]:
    """`rows_to_fp8` of `activate`, to the bit, in one pass: E4M3 [g, f] and f32 [g, 1]."""
    rows, f = gate_up_g2f.shape[0], gate_up_g2f.shape[1] // 2
    codes_gf = torch.empty((rows, f), dtype=torch.float8_e4m3fn, device=gate_up_g2f.device)
    scales_g1 = torch.ones((rows, 1), dtype=torch.float32, device=gate_up_g2f.device)
    assert gate_up_g2f.is_contiguous()
    if rows and f:
        width = triton.next_power_of_2(f)
        _activate_to_fp8[(rows,)](gate_up_g2f, codes_gf, scales_g1, f, WIDTH=width, num_warps=warps(width))
    return codes_gf, scales_g1
