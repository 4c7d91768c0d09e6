"""What a denoiser asks of the other ranks, as an interface: the model itself never talks to them.

Shape letters: S all rows; s this rank's rows; g the rows of its tensor-parallel group; p the rows that it projects to
j heads; H heads of its tensor-parallel share; D head size; C hidden; O outputs of both heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from h3dist.attention.backend import Attention
from h3dist.comm.forms import Turn

Product = Callable[[Tensor, Tensor], None]  # rows [r, C], and where their product [r, N] is to be


def whole_product(x_rC: Tensor, width: int, product: Product) -> Tensor:
    """[r, width] of all rows at once."""
    out_rN = x_rC.new_empty(x_rC.shape[0], width)
    product(x_rC, out_rN)
    return out_rN


class Exchange(Protocol):
    """The moves of a step and one agreement. Every rank calls them in the same order."""

    def gather_projected(self, x_sC: Tensor) -> Tensor:
        """x_pC: the rows that this rank projects to q, k and v: those of its tensor-parallel group, or all."""

    def project(self, x_sC: Tensor, width: int, product: Product) -> Tensor:
        """[p, width]: the product of the rows that `gather_projected` brings; it may begin before all are here."""

    def gather_rows(self, x_sC: Tensor) -> Tensor:
        """x_gC: the rows of all ranks of the tensor-parallel group."""

    def reduce_rows(self, partial_gC: Tensor) -> Tensor:
        """x_sC: the sum of the partial results over the tensor-parallel group, this rank's rows of it."""

    def column_spans(self, width: int) -> tuple[tuple[int, int], ...]:
        """The runs of columns in which partial results are summed: one, for reduce_rows, or more."""

    def reduce_columns(self, partials_gc: Iterable[Tensor]) -> Tensor:
        """As reduce_rows, of partial results that come one run of columns after the other."""

    def attend(self, q_pjD: Tensor, k_pjD: Tensor, v_pjD: Tensor, attention: Attention, turn: Turn) -> Tensor:
        """o_gHD: attention over all rows, of the rows of the tensor-parallel group and the heads of its share.

        q, k and v as they were projected; `turn` norms and rotates some of the heads on their way, or where they lie.
        """

    def amax(self, x: Tensor) -> Tensor:
        """Scalar f32: the largest magnitude of x over all ranks that share the sequence or the weights."""

    def gather_outputs(self, out_sO: Tensor) -> Tensor:
        """out_SO: every rank's outputs, on every rank."""


class Alone:
    """The exchange of a single rank: every move is the identity."""

    def gather_projected(self, x_sC: Tensor) -> Tensor:
        return x_sC

    def project(self, x_sC: Tensor, width: int, product: Product) -> Tensor:
        return whole_product(x_sC, width, product)

    def gather_rows(self, x_sC: Tensor) -> Tensor:
        return x_sC

    def reduce_rows(self, partial_gC: Tensor) -> Tensor:
        return partial_gC

    def column_spans(self, width: int) -> tuple[tuple[int, int], ...]:
        return ((0, width),)

    def reduce_columns(self, partials_gc: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(partials_gc), dim=1)

    def attend(self, q_pjD: Tensor, k_pjD: Tensor, v_pjD: Tensor, attention: Attention, turn: Turn) -> Tensor:
        heads = q_pjD, k_pjD, v_pjD
        turn.where_they_lie(heads)
        return attention(*heads)

    def amax(self, x: Tensor) -> Tensor:
        return x.abs().amax().to(torch.float32)

    def gather_outputs(self, out_sO: Tensor) -> Tensor:
        return out_sO
