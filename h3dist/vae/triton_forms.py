# ruff: noqa: ANN001, ANN202 (a kernel's arguments are what Triton makes of them)
"""The forms of `forms` and of `narrow` in Triton. Importing this needs the package triton.

All arithmetic is in float32, rounded to the tensor's dtype once. Narrow ones have a whole row in a program, whose
largest magnitude gives its scale.

Shape letters as in `forms`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3dist.model.triton_kernels import powers, rows_to_fp8
from h3dist.vae.forms import Rows, Turns

ROWS, NORM_WARPS = 2, 8  # of one program of the norms: weights are read once for its rows
COLUMNS, ROW_WARPS = 1024, 8  # of one program of the gate, and of one that has a whole row of 8192


@triton.jit
def _add_normed(
    x, y, scales, weights, h, h_scales, N, C, eps,
    ADD: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    here, where = (row < N) & (column < C), row * C + column
    value = tl.load(x + where, mask=here, other=0.0)
    if ADD:
        scale = tl.load(scales + column, mask=column < C, other=0.0).to(tl.float32)
        value += tl.load(y + where, mask=here, other=0.0).to(tl.float32) * scale
        tl.store(x + where, value, mask=here)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / C + eps)[:, None]
    result = value * factor * tl.load(weights + column, mask=column < C, other=0.0).to(tl.float32)
    if NARROW:
        power, inverse = powers(tl.max(tl.abs(result), axis=1)[:, None])
        result *= power
        tl.store(h_scales + row, inverse, mask=row < N)
    tl.store(h + where, result.to(h.dtype.element_ty), mask=here)


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
def _gate(up_gate, out, scales, f, NARROW: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < f
    up = tl.load(up_gate + row * 2 * f + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(up_gate + row * 2 * f + f + column, mask=inside, other=0.0).to(tl.float32)
    result = up * gate / (1.0 + tl.exp(-gate))
    if NARROW:
        power, inverse = powers(tl.max(tl.abs(result), axis=0))
        result *= power
        tl.store(scales + row, inverse)
    tl.store(out + row * f + column, result.to(out.dtype.element_ty), mask=inside)


def normed(x_NC: Tensor, weight_C: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The RMS norm of float32 rows."""
    h_NC = torch.empty_like(x_NC, dtype=dtype)
    _launch_norm(x_NC, None, weight_C, weight_C, h_NC, eps)
    return h_NC


def add_normed(x_NC: Tensor, y_NC: Tensor, scale_C: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x_NC += y * scale in place, and the RMS norm of the sum in y's dtype."""
    h_NC = torch.empty_like(y_NC)
    _launch_norm(x_NC, y_NC, scale_C, weight_C, h_NC, eps)
    return h_NC


def narrow_normed(x_NC: Tensor, weight_C: Tensor, eps: float, dtype: torch.dtype) -> Rows:
    """The RMS norm of float32 rows, in E4M3."""
    rows = _empty_rows(x_NC, x_NC.shape[1])
    _launch_norm(x_NC, None, weight_C, weight_C, rows, eps)
    return rows


def narrow_add_normed(x_NC: Tensor, y_NC: Tensor, scale_C: Tensor, weight_C: Tensor, eps: float) -> Rows:
    """x_NC += y * scale in place, and the RMS norm of the sum in E4M3."""
    rows = _empty_rows(x_NC, x_NC.shape[1])
    _launch_norm(x_NC, y_NC, scale_C, weight_C, rows, eps)
    return rows


def _empty_rows(like: Tensor, columns: int) -> Rows:
    codes = like.new_empty(len(like), columns, dtype=torch.float8_e4m3fn)
    return Rows(codes, like.new_empty(len(like), 1, dtype=torch.float32))


def _launch_norm(
    x_NC: Tensor, y_NC: Tensor | None, scale_C: Tensor, weight_C: Tensor, out: Tensor | Rows, eps: float
) -> None:
    """Without y_NC nothing is added."""
    add, narrow = y_NC is not None, isinstance(out, Rows)
    y_NC = x_NC if y_NC is None else y_NC
    assert x_NC.is_contiguous() and y_NC.is_contiguous() and x_NC.dtype == torch.float32
    N, C = x_NC.shape
    h_NC, h_scales = out if narrow else (out, x_NC)
    options = {"ADD": add, "NARROW": narrow, "ROWS": ROWS, "WIDTH": triton.next_power_of_2(C), "num_warps": NORM_WARPS}
    _add_normed[(triton.cdiv(N, ROWS),)](x_NC, y_NC, scale_C, weight_C, h_NC, h_scales, N, C, eps, **options)


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
    _gate[(N, triton.cdiv(f, COLUMNS))](up_gate_N2f, out_Nf, out_Nf, f, NARROW=False, WIDTH=COLUMNS)
    return out_Nf


def narrow_gate(up_gate_N2f: Tensor) -> Rows:
    """up * silu(gate) [N, f] in E4M3, a program a row."""
    assert up_gate_N2f.is_contiguous()
    N, f = up_gate_N2f.shape[0], up_gate_N2f.shape[1] // 2
    rows = _empty_rows(up_gate_N2f, f)
    _gate[(N, 1)](up_gate_N2f, *rows, f, NARROW=True, WIDTH=triton.next_power_of_2(f), num_warps=ROW_WARPS)
    return rows


def operand(y_NC: Tensor) -> Rows:
    """Attention's output in E4M3."""
    return Rows(*rows_to_fp8(y_NC))
