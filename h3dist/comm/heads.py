"""The moves between rows and heads in one sequence group, in groups of heads, with attention between them.

A rank's heads are cut in as many groups as the plan says; a rank with fewer heads has empty ones. While attention
works on a group, q, k and v of the next one come and the output of the one before goes. Each move packs once and
unpacks at most once: q, k and v are normed and rotated into the packet that they travel in, and attended to as they
arrive; the output is sent as attention left it. Codes are made of q, k and v normed and rotated, where they are or on
their way, for other ranks alone: what stays here goes to its place as it is.

Shape letters: S all rows; g rows of this rank's tp group; H heads of its tp share, j heads that it projects to, n of
its heads in a group of heads; D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from h3dist.comm.codec import Codec, Plain
from h3dist.comm.forms import Forms, Turn, as_they_are
from h3dist.comm.pieces import Pieces, Place, Places, places
from h3dist.comm.wire import Wire
from h3dist.plan import Plan, Share, Span, length, split_ragged

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Heads = tuple[Tensor, Tensor, Tensor]  # q, k and v


@dataclass(frozen=True)
class Part:
    """One group of heads: those of every rank of the sequence group, counted from the first head of our tp share.

    `there` are the pieces of q, k and v, `back` those of the output, and after them where each of these lies. Of codes
    none is our own.
    """

    spans: tuple[Span, ...]
    there: Pieces
    back: Pieces
    going: Places  # q, k and v of our rows and each rank's heads
    coming: Places  # of each rank's rows and my heads
    leaving: Places  # the output, likewise
    returning: Places  # of our rows and each rank's heads

    @property
    def counts(self) -> list[int]:
        return _counts(self.spans)


class HeadMoves:
    """What one rank of a sequence group sends and gets, part by part."""

    def __init__(self, plan: Plan, share: Share, wire: Wire, codec: Codec, forms: Forms) -> None:
        peers = [plan.shares[rank] for rank in wire.group.ranks]
        self._wire, self._codec, self._plain, self._forms = wire, codec, isinstance(codec, Plain), forms
        self._held, self._first = length(share.tp_heads), share.projected_heads[0] - share.tp_heads[0]
        self._rows = [length(peer.group_rows) for peer in peers]
        self._own = peers[wire.group.index].group_rows
        self._local = plan.exchange.hidden_on(plan.layout)  # q, k and v are of all rows already
        whole, D = tuple(_inside(peer, share.tp_heads[0]) for peer in peers), plan.dims.head_dim
        self._parts = tuple(self._part(spans, D) for spans in _cut(whole, plan.exchange.groups))
        # Room was made for a part: a whole that is more goes where room is made for anything.
        self._whole = self._parts[0] if len(self._parts) == 1 else _unplaced(self._part(whole, D))

    def _part(self, spans: tuple[Span, ...], D: int) -> Part:
        rows, heads, size, me = self._rows, _counts(spans), self._wire.group.size, self._wire.group.index

        def count(sender: int, receiver: int, shape: Sequence[int]) -> int:
            return self._codec.count(shape) if self._plain or sender != receiver else 0

        def among(counts: Sequence[int], rows: Sequence[Span], heads: Sequence[Span]) -> Places:
            every = places(counts, rows, heads)
            return every if self._plain else every[:me] + every[me + 1 :]

        there = Pieces.among(lambda s, r: count(s, r, (rows[s], 3, heads[r], D)), size, me)
        back = Pieces.among(lambda s, r: count(s, r, (rows[r], 1, heads[s], D)), size, me)
        rows_of = list(pairwise(accumulate(rows, initial=0)))
        ours, mine = [(0, rows[me])] * size, [(0, heads[me])] * size
        return Part(
            spans, there, back,
            going=among(there.out, ours, spans), coming=among(there.into, rows_of, mine),
            leaving=among(back.out, rows_of, mine), returning=among(back.into, ours, spans),
        )  # fmt: skip

    def attend(self, heads: Heads, attention: Attention, turn: Turn) -> Tensor:
        """o_gHD: attention over all rows of heads [p, j, D], turned, part by part, with the moves beside it."""
        o_gHD = heads[0].new_empty(self._rows[self._wire.group.index], self._held, heads[0].shape[2])
        if self._local:
            turn.where_they_lie(heads)
        came = self._bring(self._parts[0], heads, turn)
        leave: Callable[[], None] = _nothing
        for part, after in zip(self._parts, (*self._parts[1:], None), strict=True):
            coming = self._bring(after, heads, turn) if after else None
            leaving = self._send_back(part, _attended(attention, *came()), o_gHD)
            leave()  # of the part before: it went while attention worked
            came, leave = coming, leaving
        leave()
        return o_gHD

    def to_heads(self, heads: Heads) -> Heads:
        """(q_ShD, k_ShD, v_ShD): all rows of my heads, of my sequence group's rows of our heads [g, H, D].

        They come as views of one tensor [S, 3, h, D]: contiguous in their last two dimensions alone.
        """
        return self._send(self._whole, heads, as_they_are)()

    def to_rows(self, o_ShD: Tensor) -> Tensor:
        """o_gHD: my group's rows of our heads, the inverse of `to_heads`."""
        o_gHD = o_ShD.new_empty(self._rows[self._wire.group.index], self._held, o_ShD.shape[2])
        self._send_back(self._whole, o_ShD, o_gHD)()
        return o_gHD

    def _bring(self, part: Part, heads: Heads, turn: Turn) -> Callable[[], Heads]:
        """Starts to fetch all rows of my heads of a part; gives what waits for them."""
        if not self._local:
            return self._send(part, heads, turn)
        start, stop = part.spans[self._wire.group.index]
        mine = _some(heads, (start - self._first, stop - self._first))
        return lambda: mine

    def _send(self, part: Part, heads: Heads, turn: Turn) -> Callable[[], Heads]:
        sent = self._codec.room(heads[0], sum(part.there.out))
        self._codec.write(sent, part.going, heads, turn)
        came = self._move("heads.to", sent, part.there)
        return lambda: self._joined(came(), part, heads, turn).unbind(1)

    def _joined(self, came: Tensor, part: Part, heads: Heads, turn: Turn) -> Tensor:
        """qkv_S3nD from every rank's piece; where nothing is coded, what came is it."""
        me = self._wire.group.index
        whole = sum(self._rows), 3, part.counts[me], heads[0].shape[2]
        if self._plain:
            return came.view(whole)
        qkv_S3nD = heads[0].new_empty(whole)
        first, last = self._own
        own = Place(first * prod(whole[1:]), (0, last - first), part.spans[me])
        turn.lay(heads, (own,), qkv_S3nD.flatten())
        self._codec.read(came, part.coming, qkv_S3nD.unbind(1))
        return qkv_S3nD

    def _send_back(self, part: Part, o_SnD: Tensor, o_gHD: Tensor) -> Callable[[], None]:
        """Starts the return of a part's output to its rows; gives what waits for ours and puts it into o_gHD."""
        o_SnD = o_SnD.contiguous()
        came = self._move("heads.from", self._laid(o_SnD, part), part.back)
        if not self._plain:
            own = Place(self._own[0] * o_SnD[0].numel(), (0, len(o_gHD)), part.spans[self._wire.group.index])
            self._forms.take(o_SnD.flatten(), (own,), (o_gHD,))
        return lambda: self._codec.read(came(), part.returning, (o_gHD,))

    def _laid(self, o_SnD: Tensor, part: Part) -> Tensor:
        """The output by the rows' owners: as attention left it, where nothing is coded."""
        if self._plain:
            return o_SnD.flatten()
        sent = self._codec.room(o_SnD, sum(part.back.out))
        self._codec.write(sent, part.leaving, (o_SnD,), as_they_are)
        return sent

    def _move(self, label: str, sent: Tensor, pieces: Pieces) -> Callable[[], Tensor]:
        """A move that runs beside what follows; where heads are in one part nothing does, and it is a plain one."""
        if len(self._parts) > 1:
            return self._wire.all_to_all_later(label, sent, pieces, hold=False)
        came = self._wire.all_to_all(label, sent, pieces)
        return lambda: came


def _some(heads: Heads, span: Span) -> Heads:
    q, k, v = (x_pjD[:, slice(*span)] for x_pjD in heads)
    return q, k, v


def _cut(whole: tuple[Span, ...], groups: int) -> Iterator[tuple[Span, ...]]:
    """Every rank's heads in ragged parts, `groups` of them, or as many as the most heads that a rank has."""
    parts = min(groups, max(_counts(whole)))
    yield from zip(*(_ragged(span, parts) for span in whole), strict=True)


def _counts(spans: Sequence[Span]) -> list[int]:
    return [stop - start for start, stop in spans]


def _unplaced(part: Part) -> Part:
    return replace(part, there=part.there.unplaced, back=part.back.unplaced)


def _ragged(span: Span, groups: int) -> list[Span]:
    start, stop = span
    return [(start + a, start + b) for a, b in split_ragged(stop - start, groups)]


def _attended(attention: Attention, q_SnD: Tensor, k_SnD: Tensor, v_SnD: Tensor) -> Tensor:
    """o_SnD; without heads there is nothing to attend to."""
    return attention(q_SnD, k_SnD, v_SnD) if q_SnD.numel() else torch.empty_like(q_SnD)


def _nothing() -> None:
    """Before the first part none has left."""


def _inside(peer: Share, first: int) -> Span:
    """A peer's heads, counted from the first head of our tp share."""
    return peer.heads[0] - first, peer.heads[1] - first
