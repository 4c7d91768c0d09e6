# ruff: noqa: ANN001, ANN201, ANN202 (a kernel's arguments are what Triton makes of them)
"""Kernels of the fused path, in Triton. Importing this needs the package triton.

All arithmetic is in float32, rounded to the tensor's dtype where the plain form's result is: once.

Shape letters: s rows of the residual, g rows of the feed-forward half, C hidden, f feed-forward columns, R table rows;
N rows and K columns of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3dist.model.elementwise import NORM_EPS

COLUMNS = 1024  # of one program of the kernels that need no whole row
ROWS, BLOCKS = 2, 128  # of a weight, of one program
TILE_ROWS, TILE_BLOCKS, BLOCK = tl.constexpr(128), tl.constexpr(4), tl.constexpr(16)  # NVFP4: how scales lie


@triton.jit
def _modulate(
    x, y, gates, norm, shifts, pairs, h, C, gates_row, table_row, eps, ADD: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs + row).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < C
    value = tl.load(x + row * C + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        gate = tl.load(gates + pair * gates_row + column, mask=inside, other=0.0).to(tl.float32)
        value += gate * tl.load(y + row * C + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + row * C + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / C + eps)
    weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shifts + pair * table_row + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(shifts + pair * table_row + C + column, mask=inside, other=0.0).to(tl.float32)
    result = value * scale * weight * factor + shift
    tl.store(h + row * C + column, result.to(h.dtype.element_ty), mask=inside)


@triton.jit
def _add(x, y, gates, pairs, C, gates_row, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs + row).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < C
    gate = tl.load(gates + pair * gates_row + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * C + column, mask=inside, other=0.0).to(tl.float32)
    value += gate * tl.load(y + row * C + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * C + column, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _activate(gate_up, out, f, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < f
    gate = tl.load(gate_up + row * 2 * f + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * f + f + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * f + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def powers(largest):
    """The largest power of two that keeps a magnitude within E4M3's 448, and its inverse; as in `h3dist.fp8`."""
    bits = tl.maximum(largest, 7.888609052210118e-31).to(tl.int32, bitcast=True)  # 2^-100
    over = tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)  # beyond 1.75 times its power of two; 448 is 1.75 * 2^8
    exponent = 8 + 127 - (bits >> 23) - over
    factor = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return factor, ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_row(value, codes, scales, row, column, K):
    """A row in float32, zeros from column K on, as E4M3 and the power of two that it was divided by."""
    factor, inverse = powers(tl.max(tl.abs(value), axis=0))
    tl.store(codes + row * K + column, (value * factor).to(tl.float8e4nv), mask=column < K)
    tl.store(scales + row, inverse)


@triton.jit
def _rows_to_fp8(x, codes, scales, K, x_row, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    value = tl.load(x + row * x_row + column, mask=column < K, other=0.0).to(tl.float32)
    round_row(value, codes, scales, row, column, K)


@triton.jit
def _float(bits):
    """Bits of a float16 as float32. A shorter float's, moved to its top, are that float times a power of two."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dequantise(codes, scales, global_scale, out, N, K, packed, tiles, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Some blocks of some rows. A byte is two columns: the even one is the high nibble."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    place = row % TILE_ROWS
    tile = row // TILE_ROWS * tiles + block // TILE_BLOCKS
    where = (tile * 32 + place % 32) * 16 + place // 32 * 4 + block % TILE_BLOCKS
    e4m3 = tl.load(scales + where, mask=(row < N) & (block * BLOCK < K), other=0).to(tl.int32)
    # E4M3 comes out 2^8 too small, an E2M1 code 2^14: 2^22 is 4194304.
    scale = _float(((e4m3 & 0x7F) << 7) | ((e4m3 & 0x80) << 8)) * (tl.load(global_scale) * 4194304.0)
    row, block, scale = row[:, :, None].to(tl.int64), block[:, :, None], scale[:, :, None]
    byte = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, None, :]
    pair = tl.load(codes + row * packed + byte, mask=(row < N) & (byte < packed), other=0).to(tl.int32)
    high = _float(((pair & 0x70) << 5) | ((pair & 0x80) << 8)) * scale
    low = _float(((pair & 7) << 9) | ((pair & 8) << 12)) * scale
    column = block * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    values = tl.interleave(high, low).to(out.dtype.element_ty)
    tl.store(out + row * K + column, values, mask=(row < N) & (column < K))


def modulate(x_sC: Tensor, norm_C: Tensor, table_RnC: Tensor, pairs_s: Tensor) -> Tensor:
    """h_sC; table_RnC begins with the shift, then the factor; pairs_s int32 is each row's row of the table."""
    h_sC = torch.empty_like(x_sC)
    rows, C = x_sC.shape
    options = {"ADD": False, "WIDTH": triton.next_power_of_2(C), "num_warps": 8}
    if rows:
        _modulate[(rows,)](
            x_sC, x_sC, table_RnC, norm_C, table_RnC, pairs_s, h_sC, C, 0, table_RnC.stride(0), NORM_EPS, **options
        )
    return h_sC


def add_modulate(
    x_sC: Tensor, y_sC: Tensor, gates_RC: Tensor, norm_C: Tensor, table_RnC: Tensor, pairs_s: Tensor
) -> Tensor:
    """x_sC += gate * y_sC in place, and then h_sC of the sum."""
    h_sC = torch.empty_like(x_sC)
    rows, C = x_sC.shape
    strides = gates_RC.stride(0), table_RnC.stride(0)
    options = {"ADD": True, "WIDTH": triton.next_power_of_2(C), "num_warps": 8}
    if rows:
        _modulate[(rows,)](x_sC, y_sC, gates_RC, norm_C, table_RnC, pairs_s, h_sC, C, *strides, NORM_EPS, **options)
    return h_sC


def add(x_sC: Tensor, y_sC: Tensor, gates_RC: Tensor, pairs_s: Tensor) -> None:
    """x_sC += gate * y_sC in place."""
    rows, C = x_sC.shape
    if rows:
        _add[(rows, triton.cdiv(C, COLUMNS))](x_sC, y_sC, gates_RC, pairs_s, C, gates_RC.stride(0), WIDTH=COLUMNS)


def activate(gate_up_g2f: Tensor) -> Tensor:
    """silu(gate) * up, [g, f]."""
    rows, f = gate_up_g2f.shape[0], gate_up_g2f.shape[1] // 2
    out_gf = gate_up_g2f.new_empty(rows, f)
    if rows and f:
        _activate[(rows, triton.cdiv(f, COLUMNS))](gate_up_g2f, out_gf, f, WIDTH=COLUMNS)
    return out_gf


def rows_to_fp8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """As `h3dist.fp8.to_rows_of_fp8` for finite rows, in one pass: E4M3 [M, K] and f32 [M, 1]."""
    M, K = x_MK.shape
    codes = torch.empty((M, K), dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales = torch.ones((M, 1), dtype=torch.float32, device=x_MK.device)
    assert x_MK.stride(1) == 1, x_MK.stride()
    if M and K:
        width = triton.next_power_of_2(K)
        _rows_to_fp8[(M,)](x_MK, codes, scales, K, x_MK.stride(0), WIDTH=width, num_warps=warps(width))
    return codes, scales


def warps(width: int) -> int:
    """Of a program that holds a whole row."""
    return 16 if width > 8192 else 8


def dequantise(codes: Tensor, scales: Tensor, global_scale: Tensor, out_NK: Tensor) -> None:
    """Fill out_NK from NVFP4 codes and swizzled scales, as `Nvfp4Weight.dense` computes them."""
    N, K = out_NK.shape
    tiles = scales.numel() // (-(-codes.shape[0] // 128) * 512)
    if N and K:
        grid = triton.cdiv(N, ROWS), triton.cdiv(K, BLOCKS * BLOCK.value)
        _dequantise[grid](codes, scales, global_scale, out_NK, N, K, codes.shape[1], tiles, ROWS=ROWS, BLOCKS=BLOCKS)
