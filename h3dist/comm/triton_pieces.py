# ruff: noqa: ANN001, ANN202 (a kernel's arguments are what Triton makes of them)
"""The forms of `forms` as kernels, in Triton: all pieces of a packet at once, one kind of it. Needs the package triton.

Shape letters: n heads of a piece, D head size, p places of a packet's pieces, k kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from h3dist.comm import forms
from h3dist.comm.forms import Kinds
from h3dist.comm.pieces import Place, Places
from h3dist.plan.exchange import CODED_ROWS, SCALE_BYTES

COPIED, COLUMNS = 4096, 512  # elements of one program that copies, and the most of a row
BLOCKS = 2  # of coded rows, of one program
VECTOR = 16  # bytes: the most that a thread moves at a time
FIELDS = tl.constexpr(6)  # of a place: below
RECIPROCAL, TINY = tl.constexpr(forms.RECIPROCAL), tl.constexpr(forms.TINY)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added to a small number it leaves the nearest integer in the low bits


@triton.jit(do_not_specialize=["kind"])
def _take(
    packet, x, places, x_row, kind,
    KINDS: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some rows of a piece, and some elements of its heads there, which lie side by side in both places."""
    places += tl.program_id(2) * FIELDS
    first, rows, head, heads = tl.load(places + 2), tl.load(places + 3), tl.load(places + 4), tl.load(places + 5)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < heads * D)
    value = tl.load(packet + tl.load(places) * UNIT + (row * KINDS + kind) * heads * D + column, mask=inside)
    tl.store(x + (first + row) * x_row + head * D + column, value, mask=inside)


@triton.jit(do_not_specialize=["kind"])
def _encode(
    packet, x, places, sums, x_row, kind,
    KINDS: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, COUNT: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some blocks of rows of one head. Numbers of floats are compared as integers: so NaN is the largest."""
    places += tl.program_id(2) * FIELDS
    first, rows, start, heads = tl.load(places + 2), tl.load(places + 3), tl.load(places + 4), tl.load(places + 5)
    head = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = block[:, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    inside = (row < rows) & (head < heads) & (column < D)
    value = tl.load(x + (first + row) * x_row + (start + head) * D + column, mask=inside, other=0.0).to(tl.float32)
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = tl.max(tl.max(magnitude, axis=2), axis=1).to(tl.float32, bitcast=True) * RECIPROCAL
    scale = tl.where(scale < TINY, TINY, scale)
    by_row = scale[:, None, None]
    shifted = value * tl.div_rn(1.0, by_row) + ROUNDER
    code = shifted.to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(packet + tl.load(places) * UNIT + ((row * KINDS + kind) * heads + head) * D + column, code, mask=inside)

    byte = tl.arange(0, 4)[None, :]
    at = tl.load(places + 1) + ((block[:, None] * KINDS + kind) * heads + head) * 4 + byte
    scaled = (block[:, None] * ROWS < rows) & (head < heads) & (byte < 4)
    tl.store(packet + at, (scale[:, None].to(tl.int32, bitcast=True) >> (8 * byte)).to(tl.int8), mask=scaled)

    if COUNT:
        wrong = ((shifted - ROUNDER) * by_row - value).to(tl.float64)
        whole = value.to(tl.float64)
        program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + head
        tl.store(sums + 2 * program, tl.sum(tl.sum(tl.sum(wrong * wrong, axis=2), axis=1), axis=0))
        tl.store(sums + 2 * program + 1, tl.sum(tl.sum(tl.sum(whole * whole, axis=2), axis=1), axis=0))


@triton.jit(do_not_specialize=["kind"])
def _decode(
    packet, x, places, x_row, kind,
    KINDS: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some blocks of rows of one head."""
    places += tl.program_id(2) * FIELDS
    first, rows, start, heads = tl.load(places + 2), tl.load(places + 3), tl.load(places + 4), tl.load(places + 5)
    head = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = block[:, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    inside = (row < rows) & (head < heads) & (column < D)
    code = tl.load(packet + tl.load(places) * UNIT + ((row * KINDS + kind) * heads + head) * D + column, mask=inside)

    byte = tl.arange(0, 4)[None, :]
    at = tl.load(places + 1) + ((block[:, None] * KINDS + kind) * heads + head) * 4 + byte
    scaled = (block[:, None] * ROWS < rows) & (head < heads) & (byte < 4)
    part = (tl.load(packet + at, mask=scaled, other=0).to(tl.int32) & 0xFF) << (8 * byte)
    scale = tl.sum(part, axis=1).to(tl.float32, bitcast=True)

    value = code.to(tl.float32) * scale[:, None, None]
    tl.store(x + (first + row) * x_row + (start + head) * D + column, value.to(x.dtype.element_ty), mask=inside)


def take(packet: Tensor, places: Places, kinds: Kinds) -> None:
    """See `forms.take`."""
    rows, heads, D = _most(places, kinds)
    width = min(COLUMNS, triton.next_power_of_2(max(1, heads * D)))
    grid = triton.cdiv(heads * D, width), triton.cdiv(rows, COPIED // width), len(places)
    table, unit = _table(places, len(kinds), D, packet.element_size(), packet.device, coded=False)
    for kind, x in enumerate(kinds if prod(grid) else ()):
        sizes = {"KINDS": len(kinds), "D": D, "UNIT": unit, "ROWS": COPIED // width, "WIDTH": width}
        _take[grid](packet, x, table, x.stride(0), kind, **sizes)


def encode(packet: Tensor, places: Places, kinds: Kinds, count: bool) -> Tensor | None:
    """See `forms.encode`."""
    grid, table, sizes = _coded(packet, places, kinds)
    sums = torch.zeros((len(kinds), *grid, 2), dtype=torch.float64, device=packet.device) if count else None
    for kind, x in enumerate(kinds if prod(grid) else ()):
        counted = table if sums is None else sums[kind]
        # A product and a sum made one would round once, where the plain form rounds twice.
        _encode[grid](
            packet, x, table, counted, x.stride(0), kind, COUNT=count, enable_fp_fusion=False, **sizes
        )  # fmt: skip
    return None if sums is None else sums.sum((1, 2, 3))


def decode(packet: Tensor, places: Places, kinds: Kinds) -> None:
    """See `forms.decode`."""
    grid, table, sizes = _coded(packet, places, kinds)
    for kind, x in enumerate(kinds if prod(grid) else ()):
        _decode[grid](packet, x, table, x.stride(0), kind, **sizes)


def _coded(packet: Tensor, places: Places, kinds: Kinds) -> tuple[tuple[int, int, int], Tensor, dict[str, int]]:
    """Of a kernel of codes: its programs, its table, and its sizes."""
    rows, heads, D = _most(places, kinds)
    table, unit = _table(places, len(kinds), D, packet.element_size(), packet.device, coded=True)
    sizes = {"KINDS": len(kinds), "D": D, "UNIT": unit, "WIDTH": triton.next_power_of_2(D)}
    grid = heads, triton.cdiv(rows, BLOCKS * CODED_ROWS), len(places)
    return grid, table, sizes | {"BLOCKS": BLOCKS, "ROWS": CODED_ROWS}


def _most(places: Places, kinds: Kinds) -> tuple[int, int, int]:
    """The most rows and heads of a piece, and the head size."""
    D = kinds[0].shape[2]
    assert all(x.stride()[1:] == (D, 1) or not x.numel() for x in kinds), [x.stride() for x in kinds]
    rows, heads = ([stop - start for start, stop in spans] for spans in _spans(places))
    return max(rows), max(heads), D


def _spans(places: Places) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return [place.rows for place in places], [place.heads for place in places]


@lru_cache(maxsize=256)
def _table(
    places: Places, kinds: int, D: int, element: int, device: torch.device, *, coded: bool
) -> tuple[Tensor, int]:
    """int64 [p, FIELDS]: where the elements begin, in units, and the scales; first row, rows, first head, heads.

    The unit, the second value, is known when a kernel is compiled, and so is by how many bytes at a time it may move.
    """
    begins = [place.at + (_scale_bytes(place, kinds) if coded else 0) for place in places]
    unit = gcd(VECTOR // element, *begins, *([] if coded else [D]))
    fields = [
        (begin // unit, place.at, place.rows[0], place.rows[1] - place.rows[0], *_heads(place))
        for begin, place in zip(begins, places, strict=True)
    ]
    return torch.tensor(fields, dtype=torch.int64).to(device), unit


def _scale_bytes(place: Place, kinds: int) -> int:
    (first, last), (start, stop) = place.rows, place.heads
    return SCALE_BYTES * -(-(last - first) // CODED_ROWS) * kinds * (stop - start)


def _heads(place: Place) -> Sequence[int]:
    return place.heads[0], place.heads[1] - place.heads[0]
