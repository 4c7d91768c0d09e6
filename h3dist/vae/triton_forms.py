# ruff: noqa: ANN001, ANN202 (a kernel's arguments are what Triton makes of them)
"""The forms of `forms` in Triton. Importing this needs the package triton.

All arithmetic is in float32, rounded to the tensor's dtype once.

Shape letters as in `forms`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3dist.vae.forms import Turns

ROWS, NORM_WARPS = 2, 8  # of one program of the norms: weights are read once for its rows
COLUMNS = 1024  # of one program of the gate


@triton.jit
def _add_normed(x, y, scales, weights, h, N, C, eps, ADD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    here, where = (row < N) & (column < C), row * C + column
    value = tl.load(x + where, mask=here, other=0.0)
    if ADD:
        scale = tl.load(scales + column, mask=column < C, other=0.0).to(tl.float32)
        value += tl.load(y + where, mask=here, other=0.0).to(tl.float32) * scale
        tl.store(x + where, value, mask=here)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / C + eps)[:, None]
    weight = tl.load(weights + column, mask=column < C, other=0.0).to(tl.float32)
    tl.store(h + where, (value * factor * weight).to(h.dtype.element_ty), mask=here)


@triton.jit
def _turn(
    qkv, cosines, sines, heads, eps, D: tl.constexpr, R: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = qkv + (row * 3 + tl.program_id(1)) * heads * D
    head, pair, rest = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :], tl.arange(0, REST)[None, :]
    paired, left = (head < heads) & (pair < R), (head < heads) & (rest < D - 2 * R)
    where, where_left = begin + head * D + pair, begin + head * D + 2 * R + rest
    first = tl.load(where, mask=paired, other=0.0).to(tl.float32)
    second = tl.load(where + R, mask=paired, other=0.0).to(tl.float32)
    third = tl.load(where_left, mask=left, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(third * third, axis=1)
    factor = (1.0 / tl.sqrt(squares / D + eps))[:, None]
    cosine = tl.load(cosines + row * R + pair, mask=pair < R, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * R + pair, mask=pair < R, other=0.0).to(tl.float32)
    first, second, third = first * factor, second * factor, third * factor
    tl.store(where, (first * cosine - second * sine).to(qkv.dtype.element_ty), mask=paired)
    tl.store(where + R, (second * cosine + first * sine).to(qkv.dtype.element_ty), mask=paired)
    tl.store(where_left, third.to(qkv.dtype.element_ty), mask=left)


@triton.jit
def _gate(up_gate, out, f, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < f
    up = tl.load(up_gate + row * 2 * f + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(up_gate + row * 2 * f + f + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * f + column, (up * gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty), mask=inside)


def normed(x_NC: Tensor, weight_C: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The RMS norm of float32 rows."""
    h_NC = torch.empty_like(x_NC, dtype=dtype)
    _launch_norm(x_NC, x_NC, weight_C, weight_C, h_NC, eps, add=False)
    return h_NC


def add_normed(x_NC: Tensor, y_NC: Tensor, scale_C: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x_NC += y * scale in place, and the RMS norm of the sum in y's dtype."""
    h_NC = torch.empty_like(y_NC)
    _launch_norm(x_NC, y_NC, scale_C, weight_C, h_NC, eps, add=True)
    return h_NC


def _launch_norm(
    x_NC: Tensor, y_NC: Tensor, scale_C: Tensor, weight_C: Tensor, h_NC: Tensor, eps: float, *, add: bool
) -> None:
    assert x_NC.is_contiguous() and y_NC.is_contiguous() and x_NC.dtype == torch.float32
    N, C = x_NC.shape
    options = {"ADD": add, "ROWS": ROWS, "WIDTH": triton.next_power_of_2(C), "num_warps": NORM_WARPS}
    _add_normed[(triton.cdiv(N, ROWS),)](x_NC, y_NC, scale_C, weight_C, h_NC, N, C, eps, **options)


def turn(qkv_N3hD: Tensor, turns: Turns, eps: float) -> None:
    """Queries and keys normed and rotated in place: a program has all heads of one row's queries, or keys."""
    assert qkv_N3hD.is_contiguous()
    N, _, heads, D = qkv_N3hD.shape
    R = turns.cos_NR.shape[1]
    options = {"D": D, "R": R, "HEADS": triton.next_power_of_2(heads), "PAIRS": triton.next_power_of_2(R)}
    rest = triton.next_power_of_2(max(D - 2 * R, 1))
    _turn[(N, 2)](qkv_N3hD, turns.cos_NR, turns.sin_NR, heads, eps, REST=rest, **options)


def gate(up_gate_N2f: Tensor) -> Tensor:
    """up * silu(gate), [N, f]."""
    assert up_gate_N2f.is_contiguous()
    N, f = up_gate_N2f.shape[0], up_gate_N2f.shape[1] // 2
    out_Nf = up_gate_N2f.new_empty(N, f)
    _gate[(N, triton.cdiv(f, COLUMNS))](up_gate_N2f, out_Nf, f, WIDTH=COLUMNS)
    return out_Nf
