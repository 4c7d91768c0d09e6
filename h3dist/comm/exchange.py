"""What the model asks of other ranks, for one rank's share of a plan.

Shape letters: S all rows; s own rows, g rows of the tp group, p rows projected here to j heads; H heads of the tp
share, h heads attended to here; D head size; C hidden; O outputs of both heads.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from h3dist.comm.codec import Int8, Plain
from h3dist.comm.forms import PLAIN, Forms, Turn, as_they_are
from h3dist.comm.heads import Attention, HeadMoves
from h3dist.comm.rounding import Rounding
from h3dist.comm.wire import Wire
from h3dist.plan import Plan, Span, column_spans, length


class RankExchange:
    """One rank's exchange. A move over a group of one is the identity, and needs no wire.

    Rows are split in chunks of one size, short or empty at the tail alone. Where a wire has to be even-
    sized, in a tp group and for the outputs, a short rank pads its piece, and the padding, at the very end
    of what arrives, is cut off before anyone computes with it.
    """

    def __init__(
        self, plan: Plan, rank: int, tp: Wire | None, sp: Wire | None, everyone: Wire | None, forms: Forms = PLAIN
    ) -> None:
        share = plan.shares[rank]
        self._tp, self._everyone = tp, everyone
        self._hidden_wire = sp if plan.layout.tp == 1 else everyone  # the same ranks: heads may go by copies
        self._rows, self._chunk = plan.rows, plan.chunk
        self._mine, self._own, self._group = share.rows, length(share.rows), length(share.group_rows)
        self._piece = min(plan.chunk, self._group)  # rows of an even piece: those of the tp group's first rank
        self._chunks = plan.exchange.chunks
        self._hidden = plan.exchange.hidden_on(plan.layout)
        self.rounding = Rounding()
        codec = Plain(forms) if plan.exchange.codec == "none" else Int8(self.rounding, forms)
        self._moves = HeadMoves(plan, share, sp, codec, forms) if sp else None

    def gather_projected(self, x_sC: Tensor) -> Tensor:
        """x_pC: the rows of my tp group, or of all ranks where q, k and v are made of hidden rows."""
        if not self._hidden:
            return self.gather_rows(x_sC)
        assert self._everyone is not None
        return self._everyone.all_gather("hidden.gather", _pad_rows(x_sC, self._chunk)).narrow(0, 0, self._rows)

    def project(self, x_sC: Tensor, width: int, product: Callable[[Tensor, Tensor], None]) -> Tensor:
        """[p, width]: product(rows, out) of the rows of `gather_projected`; of my own while the others' are coming."""
        if not self._hidden:
            x_pC = self.gather_rows(x_sC)
            out_pN = x_pC.new_empty(x_pC.shape[0], width)
            product(x_pC, out_pN)
            return out_pN
        assert self._hidden_wire is not None
        came = self._hidden_wire.gather_others_later("hidden.gather", _pad_rows(x_sC, self._chunk))
        start, stop = self._mine
        out_SN = x_sC.new_empty(self._rows, width)
        product(x_sC, out_SN[start:stop])
        x_SC = came().narrow(0, 0, self._rows)
        for others in (slice(0, start), slice(stop, self._rows)):
            if x_SC[others].numel():
                product(x_SC[others], out_SN[others])
        return out_SN

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

    def column_spans(self, width: int) -> tuple[Span, ...]:
        """In which runs of columns partial results [g, width] are to be summed, the ways of one beside the next."""
        return column_spans(width, self._chunks) if self._tp else ((0, width),)

    def reduce_columns(self, partials_gc: Iterable[Tensor]) -> Tensor:
        """As `reduce_rows`, of partial results that come one run of columns after the other."""
        assert self._tp is not None
        padded = (_pad_rows(partial_gc, self._piece * self._tp.group.size) for partial_gc in partials_gc)
        sums = [self._tp.reduce_scatter_later("rows.reduce", partial) for partial in padded]
        return torch.cat([finish().narrow(0, 0, self._own) for finish in sums], dim=1)

    def attend(
        self, q_pjD: Tensor, k_pjD: Tensor, v_pjD: Tensor, attention: Attention, turn: Turn = as_they_are
    ) -> Tensor:
        """o_gHD: my group's rows of our heads, of attention over all rows, once q and k are turned."""
        if self._moves is None:
            heads = q_pjD, k_pjD, v_pjD
            turn.where_they_lie(heads)
            return attention(*heads)
        o_gHD = self._moves.attend((q_pjD, k_pjD, v_pjD), attention, turn)
        self.rounding.finish()
        return o_gHD

    def to_heads(self, q_gHD: Tensor, k_gHD: Tensor, v_gHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q_ShD, k_ShD, v_ShD): the way there alone, of all heads at once."""
        heads = q_gHD, k_gHD, v_gHD
        return self._moves.to_heads(heads) if self._moves else heads

    def to_rows(self, o_ShD: Tensor) -> Tensor:
        """o_gHD: the way back alone, the inverse of `to_heads`."""
        return self._moves.to_rows(o_ShD) if self._moves else o_ShD

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


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    """`x` with zero rows at its tail up to `rows`; `x` itself where it has as many."""
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
