# ruff: noqa: ANN001, ANN202 (a kernel's arguments are what Triton makes of them)
"""How q and k are normed and rotated, as kernels in Triton: where they lie, or with v on their way, all pieces of a
packet at once, as they are or as codes. Importing this needs the package triton.

All arithmetic is in float32, rounded to the tensors' dtype once; codes are of what was rounded.

Shape letters: p rows projected to j heads of D channels, of which 2A turn by A angles.
"""

from __future__ import annotations

from math import gcd, prod
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from h3dist.comm.forms import Kinds
from h3dist.comm.pieces import Places
from h3dist.comm.triton_pieces import (
    FIELDS,
    by_kind,
    coded,
    counted,
    errors,
    lay_codes,
    lay_scales,
    magnitude,
    most,
    of_kind,
    row_of,
    table,
)
from h3dist.model.elementwise import NORM_EPS

HEADS = 32  # of one program, of some rows


class Turning(NamedTuple):
    """What q and k are turned by: norms of the head, and every row's angles."""

    q_norm_D: Tensor
    k_norm_D: Tensor
    cos_pA: Tensor
    sin_pA: Tensor


@triton.jit
def _turned(
    first, second, third, norm, cos, sin, turns, half, rest, eps, D: tl.constexpr, A: tl.constexpr
):  # fmt: skip
    """Heads [n, D] in three parts: channels that turn, those that they turn with, and the rest; rounded once."""
    a, b, c = first.to(tl.float32), second.to(tl.float32), third.to(tl.float32)
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
    scale = (1.0 / tl.sqrt(squares / D + eps))[:, None]
    a *= scale * tl.load(norm + half, mask=half < A, other=0.0).to(tl.float32)
    b *= scale * tl.load(norm + A + half, mask=half < A, other=0.0).to(tl.float32)
    c *= scale * tl.load(norm + rest, mask=rest < D, other=0.0).to(tl.float32)
    cosine = tl.load(cos + half, mask=turns, other=0.0).to(tl.float32)
    sine = tl.load(sin + half, mask=turns, other=0.0).to(tl.float32)
    return (a * cosine - b * sine).to(first.dtype), (b * cosine + a * sine).to(first.dtype), c.to(first.dtype)


@triton.jit
def _turn(
    q, k, v, packet, places, q_norm, k_norm, cos, sin, x_row, eps,
    D: tl.constexpr, A: tl.constexpr, UNIT: tl.constexpr, KINDS: tl.constexpr, PACK: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Some heads of some rows. Who writes an element has read it, and the one that it turns with."""
    kind = tl.program_id(2) % KINDS
    places += tl.program_id(2) // KINDS * FIELDS
    start, rows, head, heads = tl.load(places + 2), tl.load(places + 3), tl.load(places + 4), tl.load(places + 5)
    index = tl.arange(0, ROWS * HEADS)[:, None]
    row = tl.program_id(0).to(tl.int64) * ROWS + index // HEADS
    column = tl.program_id(1) * HEADS + index % HEADS
    half, rest = tl.arange(0, HALF)[None, :], 2 * A + tl.arange(0, REST)[None, :]
    here = (row < rows) & (column < heads)
    turns, stays = here & (half < A), here & (rest < D)
    x = of_kind(kind, q, k, v) + (start + row) * x_row + (head + column) * D
    first = tl.load(x + half, mask=turns, other=0.0)
    second = tl.load(x + A + half, mask=turns, other=0.0)
    third = tl.load(x + rest, mask=stays, other=0.0)
    if kind < 2:
        norm, angles = of_kind(kind, q_norm, k_norm, k_norm), (start + row) * A
        first, second, third = _turned(
            first, second, third, norm, cos + angles, sin + angles, turns, half, rest, eps, D, A
        )  # fmt: skip
    if PACK:
        x = packet + tl.load(places) * UNIT + ((row * KINDS + kind) * heads + column) * D
    tl.store(x + half, first, mask=turns)
    tl.store(x + A + half, second, mask=turns)
    tl.store(x + rest, third, mask=stays)


@triton.jit
def _encode_turned(
    q, k, v, packet, places, sums, q_norm, k_norm, cos, sin, x_row, eps,
    D: tl.constexpr, A: tl.constexpr, UNIT: tl.constexpr, COUNT: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Some blocks of rows of one head."""
    kind = tl.program_id(2) % 3
    places += tl.program_id(2) // 3 * FIELDS
    start, rows, head, heads = tl.load(places + 2), tl.load(places + 3), tl.load(places + 4), tl.load(places + 5)
    column = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = tl.program_id(1).to(tl.int64) * BLOCKS * ROWS + tl.arange(0, BLOCKS * ROWS)[:, None]
    half, rest = tl.arange(0, HALF)[None, :], 2 * A + tl.arange(0, REST)[None, :]
    here = tl.where(column < heads, rows, 0)  # rows, or none
    turns, stays = (row < here) & (half < A), (row < here) & (rest < D)
    x = of_kind(kind, q, k, v) + (start + row) * x_row + (head + column) * D
    first = tl.load(x + half, mask=turns, other=0.0)
    second = tl.load(x + A + half, mask=turns, other=0.0)
    third = tl.load(x + rest, mask=stays, other=0.0)
    if kind < 2:
        norm, angles = of_kind(kind, q_norm, k_norm, k_norm), (start + row) * A
        first, second, third = _turned(
            first, second, third, norm, cos + angles, sin + angles, turns, half, rest, eps, D, A
        )  # fmt: skip
    a, b, c = first.to(tl.float32), second.to(tl.float32), third.to(tl.float32)
    largest = tl.maximum(tl.maximum(magnitude(a), magnitude(b)), magnitude(c))
    at = tl.load(places + 1) + ((block * 3 + kind) * heads + column) * 4
    by_row, inverse = lay_scales(packet, at, largest, block, here, BLOCKS, ROWS)
    to = packet + tl.load(places) * UNIT + ((row * 3 + kind) * heads + column) * D
    code_a = lay_codes(to + half, a, inverse, turns)
    code_b = lay_codes(to + A + half, b, inverse, turns)
    code_c = lay_codes(to + rest, c, inverse, stays)
    if COUNT:
        wrong_a, whole_a = errors(code_a, a, by_row)
        wrong_b, whole_b = errors(code_b, b, by_row)
        wrong_c, whole_c = errors(code_c, c, by_row)
        program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + column
        tl.store(sums + 2 * program, wrong_a + wrong_b + wrong_c)
        tl.store(sums + 2 * program + 1, whole_a + whole_b + whole_c)


def turn(turning: Turning, heads: Kinds, places: Places, packet: Tensor | None) -> None:
    """q and k of some places normed and rotated where they lie, or with v laid in a packet."""
    rows, number, D = most(places, heads)
    kinds = 2 if packet is None else 3
    out = heads[0] if packet is None else packet
    count = gcd(HEADS, *(stop - start for start, stop in (place.heads for place in places)))  # of no place too many
    fields, unit = table(places, kinds, D, out.element_size(), out.device, coded=False)
    grid = triton.cdiv(rows, HEADS // count), triton.cdiv(number, count), len(places) * kinds
    if prod(grid):
        sizes = _channels(turning, D) | {"UNIT": unit, "KINDS": kinds, "PACK": packet is not None}
        sizes |= {"ROWS": HEADS // count, "HEADS": count}
        _turn[grid](*heads, out, fields, *turning, row_of(heads), NORM_EPS, **sizes)


def encode(turning: Turning, packet: Tensor, places: Places, heads: Kinds, count: bool) -> Tensor | None:
    """Codes of q and k normed and rotated, and of v; see `h3dist.comm.forms.encode`."""
    grid, fields, sizes = coded(packet, places, heads)
    sums = counted(grid, packet) if count else None
    if prod(grid):
        # As codes are made elsewhere: a product and a sum are rounded each.
        sizes |= _channels(turning, sizes["D"]) | {"COUNT": count, "enable_fp_fusion": False}
        told = fields if sums is None else sums
        _encode_turned[grid](*heads, packet, fields, told, *turning, row_of(heads), NORM_EPS, **sizes)
    return None if sums is None else by_kind(sums, 3)


def _channels(turning: Turning, D: int) -> dict[str, int]:
    A = turning.cos_pA.shape[1]
    return {"D": D, "A": A, "HALF": triton.next_power_of_2(A), "REST": triton.next_power_of_2(max(1, D - 2 * A))}
