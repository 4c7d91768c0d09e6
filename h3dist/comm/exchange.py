"""What the model asks of other ranks, for one rank's share of a plan: the moves between rows and heads.

Shape letters: S all rows; s own rows, g rows of the tp group; H heads of the tp share, h heads attended to
here; D head size; C hidden; O outputs of both heads.
"""

from math import prod

import torch
from torch import Tensor

from h3dist.comm.wire import Wire
from h3dist.plan import Plan, Share


class RankExchange:
    """One rank's exchange. A move over a group of one is the identity, and needs no wire.

    Rows are split in chunks of one size, short or empty at the tail alone. Where a wire has to be even-
    sized, in a tp group and for the outputs, a short rank pads its piece, and the padding, at the very end
    of what arrives, is cut off before anyone computes with it.
    """

    def __init__(self, plan: Plan, rank: int, tp: Wire | None, sp: Wire | None, everyone: Wire | None) -> None:
        share = plan.shares[rank]
        self._tp, self._sp, self._everyone = tp, sp, everyone
        self._rows, self._chunk = plan.rows, plan.chunk
        self._own, self._group = _length(share.rows), _length(share.group_rows)
        self._piece = min(plan.chunk, self._group)  # rows of an even piece: those of the tp group's first rank
        self._heads = _length(share.heads)
        peers = [plan.shares[r] for r in sp.group.ranks] if sp else [share]
        self._peer_rows = [_length(peer.group_rows) for peer in peers]
        self._peer_heads = [_inside(peer, share.tp_heads[0]) for peer in peers]

    def gather_rows(self, x_sC: Tensor) -> Tensor:
        """x_gC: the rows of all ranks of my tp group."""
        if self._tp is None:
            return x_sC
        return self._tp.all_gather("rows.gather", _pad_rows(x_sC, self._piece)).narrow(0, 0, self._group)

    def reduce_rows(self, partial_gC: Tensor) -> Tensor:
        """x_sC: the sum of the tp group's partial results, my rows of it."""
        if self._tp is None:
            return partial_gC
        padded = _pad_rows(partial_gC, self._piece * self._tp.group.size)
        return self._tp.reduce_scatter("rows.reduce", padded).narrow(0, 0, self._own)

    def to_heads(self, q_gHD: Tensor, k_gHD: Tensor, v_gHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q_ShD, k_ShD, v_ShD): all rows of my heads, of my sp group's rows of our heads.

        They come as views of one tensor [S, 3, h, D]: contiguous in their last two dimensions alone.
        """
        if self._sp is None:
            return q_gHD, k_gHD, v_gHD
        g, _, D = q_gHD.shape
        out = [3 * g * (stop - start) * D for start, stop in self._peer_heads]
        sent = q_gHD.new_empty(sum(out))
        for piece, (start, stop) in zip(sent.split(out), self._peer_heads, strict=True):
            parts = [x_gHD[:, start:stop] for x_gHD in (q_gHD, k_gHD, v_gHD)]
            torch.stack(parts, dim=1, out=piece.view(g, 3, stop - start, D))
        into = [3 * rows * self._heads * D for rows in self._peer_rows]
        came = self._sp.all_to_all("heads.to", sent, out, into)
        q_ShD, k_ShD, v_ShD = came.view(self._rows, 3, self._heads, D).unbind(1)
        return q_ShD, k_ShD, v_ShD

    def to_rows(self, o_ShD: Tensor) -> Tensor:
        """o_gHD: my group's rows of our heads, the inverse of `to_heads`."""
        if self._sp is None:
            return o_ShD
        D = o_ShD.shape[2]
        out = [rows * self._heads * D for rows in self._peer_rows]
        shapes = [(self._group, stop - start, D) for start, stop in self._peer_heads]
        into = [prod(shape) for shape in shapes]
        came = self._sp.all_to_all("heads.from", o_ShD.contiguous(), out, into)
        parts = [part.view(shape) for part, shape in zip(came.split(into), shapes, strict=True)]
        return torch.cat(parts, dim=1)

    def amax(self, x: Tensor) -> Tensor:
        """Scalar f32: the largest magnitude of `x`, of any shape or empty, over all ranks; NaN if any is."""
        largest = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        return self._everyone.all_gather("amax", largest.view(1)).amax() if self._everyone else largest

    def gather_outputs(self, out_sO: Tensor) -> Tensor:
        """out_SO: every rank's outputs, whole on every rank. The one place of a step where the host waits."""
        if self._everyone is None:
            return out_sO
        whole = self._everyone.all_gather("outputs", _pad_rows(out_sO, self._chunk)).narrow(0, 0, self._rows)
        self._everyone.settle("outputs")
        return whole


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _inside(peer: Share, first: int) -> tuple[int, int]:
    """A peer's heads, counted from the first head of our tp share."""
    return peer.heads[0] - first, peer.heads[1] - first


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    """`x` with zero rows at its tail up to `rows`; `x` itself where it has as many."""
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
