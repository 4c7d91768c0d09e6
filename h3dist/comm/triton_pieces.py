# ruff: noqa: ANN001, ANN201, ANN202 (a kernel's arguments are what Triton makes of them)
"""The forms of `forms` as kernels, in Triton: all pieces of a packet at once. Needs the package triton.

A kernel reads from a table on the device where each piece lies; it is made once for each way to cut a packet.

Shape letters: n heads of a piece, D head size, p places of a packet's pieces, k kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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


@triton.jit
def of_kind(kind, first, second, third):
    """A pointer's: q, k or v, or the one kind that there is."""
    return tl.where(kind == 0, first, tl.where(kind == 1, second, third))


@triton.jit
def _take(
    packet, first_kind, second_kind, third_kind, places, x_row,
    KINDS: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some rows of a piece, and some elements of its heads there, which lie side by side in both places."""
    kind = tl.program_id(2) % KINDS
    places += tl.program_id(2) // KINDS * FIELDS
    first, rows, head, heads = tl.load(places + 2), tl.load(places + 3), tl.load(places + 4), tl.load(places + 5)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < heads * D)
    value = tl.load(packet + tl.load(places) * UNIT + (row * KINDS + kind) * heads * D + column, mask=inside)
    x = of_kind(kind, first_kind, second_kind, third_kind)
    tl.store(x + (first + row) * x_row + head * D + column, value, mask=inside)


@triton.jit
def magnitude(value):
    """Of each row the largest, as an integer: so compared, NaN is larger than all."""
    return tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def lay_scales(packet, at, largest, block, rows, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Lays the scales of some blocks of a head, of their rows' magnitudes, and gives each row's, and its inverse.

    `at`: byte of each block's scale; a scale lies at any byte.
    """
    scale = tl.max(tl.reshape(largest, (BLOCKS, ROWS)), axis=1).to(tl.float32, bitcast=True) * RECIPROCAL
    scale = tl.where(scale < TINY, TINY, scale)
    byte = tl.arange(0, 4)[None, :]
    bits = (scale[:, None].to(tl.int32, bitcast=True) >> (8 * byte)).to(tl.int8)
    tl.store(packet + at[:, None] + byte, bits, mask=(block[:, None] * ROWS < rows) & (byte < 4))
    inverse = tl.div_rn(1.0, scale)
    by_row = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCKS, ROWS)), (BLOCKS * ROWS, 1))
    return by_row, tl.reshape(tl.broadcast_to(inverse[:, None], (BLOCKS, ROWS)), (BLOCKS * ROWS, 1))


@triton.jit
def lay_codes(to, value, inverse, inside):
    """Lays codes; gives them as floats."""
    shifted = value * inverse + ROUNDER
    tl.store(to, shifted.to(tl.int32, bitcast=True).to(tl.int8), mask=inside)
    return shifted - ROUNDER


@triton.jit
def errors(code, value, by_row):
    """The sums of squares of a program's errors and values, float64."""
    wrong = (code * by_row - value).to(tl.float64)
    whole = value.to(tl.float64)
    return tl.sum(tl.sum(wrong * wrong, axis=1), axis=0), tl.sum(tl.sum(whole * whole, axis=1), axis=0)


@triton.jit
def _encode(
    packet, first_kind, second_kind, third_kind, places, sums, x_row,
    KINDS: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, COUNT: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some blocks of rows of one head."""
    kind = tl.program_id(2) % KINDS
    places += tl.program_id(2) // KINDS * FIELDS
    first, rows, start, heads = tl.load(places + 2), tl.load(places + 3), tl.load(places + 4), tl.load(places + 5)
    head = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = tl.program_id(1).to(tl.int64) * BLOCKS * ROWS + tl.arange(0, BLOCKS * ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    here = tl.where(head < heads, rows, 0)  # rows, or none
    inside = (row < here) & (column < D)
    x = of_kind(kind, first_kind, second_kind, third_kind)
    value = tl.load(x + (first + row) * x_row + (start + head) * D + column, mask=inside, other=0.0).to(tl.float32)
    at = tl.load(places + 1) + ((block * KINDS + kind) * heads + head) * 4
    by_row, inverse = lay_scales(packet, at, magnitude(value), block, here, BLOCKS, ROWS)
    to = packet + tl.load(places) * UNIT + ((row * KINDS + kind) * heads + head) * D + column
    code = lay_codes(to, value, inverse, inside)
    if COUNT:
        wrong, whole = errors(code, value, by_row)
        program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + head
        tl.store(sums + 2 * program, wrong)
        tl.store(sums + 2 * program + 1, whole)


@triton.jit
def _decode(
    packet, first_kind, second_kind, third_kind, places, x_row,
    KINDS: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some blocks of rows of one head."""
    kind = tl.program_id(2) % KINDS
    places += tl.program_id(2) // KINDS * FIELDS
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
    x = of_kind(kind, first_kind, second_kind, third_kind)
    tl.store(x + (first + row) * x_row + (start + head) * D + column, value.to(x.dtype.element_ty), mask=inside)


def take(packet: Tensor, places: Places, kinds: Kinds) -> None:
    """See `forms.take`."""
    rows, heads, D = most(places, kinds)
    width = min(COLUMNS, triton.next_power_of_2(max(1, heads * D)))
    grid = triton.cdiv(heads * D, width), triton.cdiv(rows, COPIED // width), len(places) * len(kinds)
    fields, unit = table(places, len(kinds), D, packet.element_size(), packet.device, coded=False)
    if prod(grid):
        sizes = {"KINDS": len(kinds), "D": D, "UNIT": unit, "ROWS": COPIED // width, "WIDTH": width}
        _take[grid](packet, *three(kinds), fields, row_of(kinds), **sizes)


def encode(packet: Tensor, places: Places, kinds: Kinds, count: bool) -> Tensor | None:
    """See `forms.encode`."""
    grid, fields, sizes = coded(packet, places, kinds)
    sums = counted(grid, packet) if count else None
    if prod(grid):
        # A product and a sum made one would round once, where the plain form rounds twice.
        options = sizes | {"KINDS": len(kinds), "WIDTH": triton.next_power_of_2(sizes["D"]), "enable_fp_fusion": False}
        told = fields if sums is None else sums
        _encode[grid](packet, *three(kinds), fields, told, row_of(kinds), COUNT=count, **options)
    return None if sums is None else by_kind(sums, len(kinds))


def decode(packet: Tensor, places: Places, kinds: Kinds) -> None:
    """See `forms.decode`."""
    grid, fields, sizes = coded(packet, places, kinds)
    if prod(grid):
        sizes |= {"KINDS": len(kinds), "WIDTH": triton.next_power_of_2(sizes["D"])}
        _decode[grid](packet, *three(kinds), fields, row_of(kinds), **sizes)


def coded(packet: Tensor, places: Places, kinds: Kinds) -> tuple[tuple[int, int, int], Tensor, dict[str, int]]:
    """Of a kernel of codes: its programs, its table, and its sizes."""
    rows, heads, D = most(places, kinds)
    fields, unit = table(places, len(kinds), D, packet.element_size(), packet.device, coded=True)
    grid = heads, triton.cdiv(rows, BLOCKS * CODED_ROWS), len(places) * len(kinds)
    return grid, fields, {"D": D, "UNIT": unit, "BLOCKS": BLOCKS, "ROWS": CODED_ROWS}


def counted(grid: tuple[int, int, int], packet: Tensor) -> Tensor:
    """Room for the sums of each program, which `by_kind` adds."""
    return torch.zeros((grid[2], grid[1] * grid[0], 2), dtype=torch.float64, device=packet.device)


def by_kind(sums: Tensor, kinds: int) -> Tensor:
    """[k, 2] of what programs counted."""
    return sums.sum(1).view(-1, kinds, 2).sum(0)


def three(kinds: Kinds) -> tuple[Tensor, Tensor, Tensor]:
    """What a kernel takes: where there is one kind, that."""
    return kinds[0], kinds[len(kinds) // 2], kinds[-1]


def row_of(kinds: Kinds) -> int:
    """Elements from a row to the next, in all kinds."""
    (row,) = {x.stride(0) for x in kinds}
    return row


def most(places: Places, kinds: Kinds) -> tuple[int, int, int]:
    """The most rows and heads of a piece, and the head size."""
    D = kinds[0].shape[2]
    assert all(x.stride()[1:] == (D, 1) or not x.numel() for x in kinds), [x.stride() for x in kinds]
    rows, heads = ([stop - start for start, stop in spans] for spans in _spans(places))
    return max(rows), max(heads), D


def _spans(places: Places) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return [place.rows for place in places], [place.heads for place in places]


@cache  # some hundred bytes each; what was recorded reads them where they lie
def table(places: Places, kinds: int, D: int, element: int, device: torch.device, *, coded: bool) -> tuple[Tensor, int]:
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
