"""What a denoiser asks of the other ranks, as an interface: the model itself never talks to them.

Shape letters: S all rows; s this rank's rows; g the rows of its tensor-parallel group; H heads of its
tensor-parallel share, h heads it attends to; D head size; C hidden; O outputs of both heads.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Exchange(Protocol):
    """The five moves of a step and one agreement. Every rank calls them in the same order."""

    def gather_rows(self, x_sC: Tensor) -> Tensor:
        """x_gC: the rows of all ranks of the tensor-parallel group."""

    def reduce_rows(self, partial_gC: Tensor) -> Tensor:
        """x_sC: the sum of the partial results over the tensor-parallel group, this rank's rows of it."""

    def to_heads(self, q_gHD: Tensor, k_gHD: Tensor, v_gHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q_ShD, k_ShD, v_ShD): all rows of this rank's heads."""

    def to_rows(self, o_ShD: Tensor) -> Tensor:
        """o_gHD: the inverse of to_heads."""

    def amax(self, x: Tensor) -> Tensor:
        """Scalar f32: the largest magnitude of x over all ranks that share the sequence or the weights."""

    def gather_outputs(self, out_sO: Tensor) -> Tensor:
        """out_SO: every rank's outputs, on every rank."""


class Alone:
    """The exchange of a single rank: every move is the identity."""

    def gather_rows(self, x_sC: Tensor) -> Tensor:
        return x_sC

    def reduce_rows(self, partial_gC: Tensor) -> Tensor:
        return partial_gC

    def to_heads(self, q_gHD: Tensor, k_gHD: Tensor, v_gHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q_gHD, k_gHD, v_gHD

    def to_rows(self, o_ShD: Tensor) -> Tensor:
        return o_ShD

    def amax(self, x: Tensor) -> Tensor:
        return x.abs().amax().to(torch.float32)

    def gather_outputs(self, out_sO: Tensor) -> Tensor:
        return out_sO
