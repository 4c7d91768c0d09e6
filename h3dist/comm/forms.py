"""How a packet's pieces are taken off the wire, and how they are coded: the plain forms, in torch alone.

`triton_pieces` has the same with one kernel for all pieces, which gives the same bits.

A coded piece is its scales in float32, at any byte, and then its codes: round(x * (1 / scale)), halves to even, where
scale = max |x| * (1 / 127) of CODED_ROWS rows of a kind and head, all in float32.

Shape letters: r rows of a piece, k kinds, n heads, D head size, b blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.comm.pieces import Place, Places, everything
from h3dist.errors import MissingDependency
from h3dist.plan.exchange import CODED_ROWS, SCALE_BYTES

RECIPROCAL = 1 / 127  # of the largest code
TINY = torch.finfo(torch.float32).tiny
Kinds = Sequence[Tensor]  # q, k and v, or the output alone: [rows, heads, D] each


class Forms(NamedTuple):
    """One way to do it.

    take(packet, places, kinds): elements as they are, into the kinds' rows and heads. encode(packet, places, kinds,
    count): the kinds as codes and scales, onto the wire; with `count` the sums of squares [k, 2] of errors and of
    values, float64, else None. decode(packet, places, kinds): off the wire again.
    """

    take: Callable[[Tensor, Places, Kinds], None]
    encode: Callable[[Tensor, Places, Kinds, bool], Tensor | None]
    decode: Callable[[Tensor, Places, Kinds], None]


class Turn(NamedTuple):
    """What is done to q, k and v on their way: `as_they_are` nothing, or norm and rotation of q and k.

    lay(kinds, places, packet): pieces turned and laid in a packet as `take` takes them, or with no packet turned where
    they lie. encode(packet, places, kinds, count): as that of `Forms`, of pieces not turned yet, which may be left so;
    None where what lies there is turned first.
    """

    lay: Callable[[Kinds, Places, Tensor | None], None]
    encode: Callable[[Tensor, Places, Kinds, bool], Tensor | None] | None = None

    def where_they_lie(self, kinds: Kinds) -> None:
        """All rows and heads."""
        self.lay(kinds, everything(*kinds[0].shape[:2]), None)


def choose_forms(fused: bool) -> Forms:
    """The plain forms, or for the fused path its kernels. Raises MissingDependency without triton."""
    return triton_forms() if fused else PLAIN


def triton_forms() -> Forms:
    """By kernels, on CUDA. Raises MissingDependency."""
    try:
        from h3dist.comm import triton_pieces as kernels
    except ImportError as error:
        raise MissingDependency(f"runtime.fused=on needs triton: {error}") from error
    return Forms(kernels.take, kernels.encode, kernels.decode)


def some(kinds: Kinds, place: Place) -> tuple[Tensor, ...]:
    """Of each kind what a piece is of."""
    return tuple(x[slice(*place.rows), slice(*place.heads)] for x in kinds)


def piece_shape(place: Place, kinds: Kinds) -> tuple[int, int, int, int]:
    """[r, k, n, D]."""
    (first, last), (start, stop) = place.rows, place.heads
    return last - first, len(kinds), stop - start, kinds[0].shape[2]


def coded_count(shape: Sequence[int]) -> int:
    """Bytes of a coded piece."""
    return SCALE_BYTES * prod(_blocks(shape)) + prod(shape)


def laid(packet: Tensor, place: Place, kinds: Kinds) -> tuple[Tensor, ...]:
    """Of each kind where a piece is that lies as it is."""
    shape = piece_shape(place, kinds)
    return packet[place.at : place.at + prod(shape)].view(shape).unbind(1)


def each(kinds: Kinds, places: Places, packet: Tensor | None) -> Iterator[tuple[Place, Kinds, Kinds]]:
    """Every piece, what it is of, and where it is to be laid: in a packet, or with none where it is."""
    for place in places:
        heads = some(kinds, place)
        yield place, heads, heads if packet is None else laid(packet, place, kinds)


def take(packet: Tensor, places: Places, kinds: Kinds) -> None:
    """Elements as they are."""
    for _, heads, came in each(kinds, places, packet):
        for target, x in zip(heads, came, strict=True):
            target.copy_(x)


def encode(packet: Tensor, places: Places, kinds: Kinds, count: bool) -> Tensor | None:
    """Codes and scales. A value that is not finite makes its block so."""
    sums = [_encode(packet, place, kinds, count) for place in places]
    return torch.stack(sums).sum(0) if count else None


def _encode(packet: Tensor, place: Place, kinds: Kinds, count: bool) -> Tensor | None:
    x_rknD = torch.stack(some(kinds, place), dim=1).float()
    scales_bkn = _scales(x_rknD)
    scale_rkn1 = _by_rows(scales_bkn, x_rknD.shape[0])
    on_wire, codes_rknD = _parts(packet, place, x_rknD.shape)
    on_wire.copy_(scales_bkn.flatten().view(torch.int8))
    codes_rknD.copy_((x_rknD * scale_rkn1.reciprocal()).round_())
    if not count:
        return None
    errors_rknD = codes_rknD * scale_rkn1 - x_rknD
    return torch.stack([x.double().square().sum((0, 2, 3)) for x in (errors_rknD, x_rknD)], dim=1)


def decode(packet: Tensor, places: Places, kinds: Kinds) -> None:
    """Codes times scales, rounded once to what the kinds are."""
    for place in places:
        shape = piece_shape(place, kinds)
        on_wire, codes_rknD = _parts(packet, place, shape)
        scales_bkn = on_wire.clone().view(torch.float32).view(_blocks(shape))  # on the wire they may lie at any byte
        values_rknD = codes_rknD * _by_rows(scales_bkn, shape[0])
        for target, came in zip(some(kinds, place), values_rknD.unbind(1), strict=True):
            target.copy_(came)


def _parts(packet: Tensor, place: Place, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where a piece has the bytes of its scales, and its codes."""
    scales = SCALE_BYTES * prod(_blocks(shape))
    on_wire, codes = packet[place.at : place.at + coded_count(shape)].split([scales, prod(shape)])
    return on_wire, codes.view(tuple(shape))


def _blocks(shape: Sequence[int]) -> tuple[int, int, int]:
    """The shape of a piece's scales."""
    rows, kinds, heads, _ = shape
    return -(-rows // CODED_ROWS), kinds, heads


def _scales(x_rknD: Tensor) -> Tensor:
    """scales_bkn, never 0: a block of zeros has codes of 0 all the same. NaN and infinity stay what they are."""
    largest_rkn = x_rknD.abs().amax(-1)
    missing = -x_rknD.shape[0] % CODED_ROWS
    blocks, kinds, heads = _blocks(x_rknD.shape)
    whole = F.pad(largest_rkn, (0, 0, 0, 0, 0, missing)).view(blocks, CODED_ROWS, kinds, heads)
    return (whole.amax(1) * RECIPROCAL).clamp_min(TINY)


def _by_rows(scales_bkn: Tensor, rows: int) -> Tensor:
    """scale_rkn1: that of every row's block."""
    return scales_bkn.repeat_interleave(CODED_ROWS, dim=0)[:rows, ..., None]


def _lay(kinds: Kinds, places: Places, packet: Tensor | None) -> None:
    """Of what is turned already: copies."""
    for _, heads, out in each(kinds, places, packet) if packet is not None else ():
        for x, target in zip(heads, out, strict=True):
            target.copy_(x)


PLAIN = Forms(take, encode, decode)
as_they_are = Turn(_lay)
