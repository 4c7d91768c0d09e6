"""One transformer block on one rank: the same code for every layout.

AdaLN on own rows, gather what is projected, heads, attention over all rows, partial result, reduce back to own
rows, gate and add; then the same around the feed-forward layers, gathering over the tensor-parallel group.

Shape letters: s this rank's rows; g the rows of its tensor-parallel group; p the rows that it projects to j heads;
H heads of its tensor-parallel share; D head size; C hidden; f its feed-forward columns; R table rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.attention.backend import Attention
from h3dist.model.exchange import Exchange
from h3dist.model.linear import Linear
from h3dist.model.rotary import Rotation, rotate
from h3dist.model.weights import BlockWeights

NORM_EPS = 1e-5  # of every norm: block, query and key, final, refiner

# Chunks of a block's modulation: a shift, the factor (1 + scale) and a gate, for each of the two halves.
ATTENTION, MLP = 0, 3
SHIFT, FACTOR, GATE = 0, 1, 2


class Run(NamedTuple):
    """Own rows [start, stop) that share row `row` of a modulation table."""

    start: int
    stop: int
    row: int


@dataclass(frozen=True)
class View:
    """What is the same for every block of a rank: its runs of rows, its rotation, and the ways to compute."""

    runs: tuple[Run, ...]
    rotation: Rotation
    exchange: Exchange
    attention: Attention
    linear: Linear


def run_block(x_sC: Tensor, weights: BlockWeights, table_R6C: Tensor, view: View) -> None:
    """Apply one block to this rank's rows of the residual stream, in place."""
    h_pC = view.exchange.gather_projected(modulated(x_sC, weights.norm1, table_R6C[:, ATTENTION:], view.runs))
    y_sC = view.exchange.reduce_rows(attend(h_pC, weights, view))
    add_gated(x_sC, y_sC, table_R6C[:, ATTENTION:], view.runs)

    h_gC = view.exchange.gather_rows(modulated(x_sC, weights.norm2, table_R6C[:, MLP:], view.runs))
    y_sC = view.exchange.reduce_rows(swiglu(h_gC, weights, view.linear))
    add_gated(x_sC, y_sC, table_R6C[:, MLP:], view.runs)


def attend(h_pC: Tensor, weights: BlockWeights, view: View) -> Tensor:
    """This share's part of the attention output, [g, C]: the sum over the shares is the whole."""
    q_pjD, k_pjD, v_pjD = project_heads(h_pC, weights, view.linear, view.rotation)
    o_gHD = view.exchange.attend(q_pjD, k_pjD, v_pjD, view.attention)
    return view.linear(o_gHD.flatten(1), weights.out)


def project_heads(
    h_pC: Tensor, weights: BlockWeights, linear: Linear, rotation: Rotation | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the heads projected here, each [p, j, D]; q and k normed over the head, and rotated if asked.

    They lie side by side: contiguous in their last two dimensions alone, as what comes from an exchange.
    """
    size = weights.q_norm.shape[0]
    q_pjD, k_pjD, v_pjD = linear(h_pC, weights.qkv).unflatten(1, (3, -1, size)).unbind(1)
    return _normed(q_pjD, weights.q_norm, rotation), _normed(k_pjD, weights.k_norm, rotation), v_pjD


def _normed(x_pjD: Tensor, norm_D: Tensor, rotation: Rotation | None) -> Tensor:
    """The norm over each head; where it is rotated too, the result takes the place of x."""
    y_pjD = F.rms_norm(x_pjD, norm_D.shape, norm_D, NORM_EPS)
    return y_pjD if rotation is None else rotate(y_pjD, rotation, out=x_pjD)


def swiglu(h_gC: Tensor, weights: BlockWeights, linear: Linear) -> Tensor:
    """This share's part of fc2(silu(gate) * up), [g, C]."""
    gate_gf, up_gf = linear(h_gC, weights.fc1).chunk(2, dim=1)
    return linear(F.silu(gate_gf).mul_(up_gf), weights.fc2)


def modulated(x_sC: Tensor, norm_C: Tensor, table_RnC: Tensor, runs: tuple[Run, ...]) -> Tensor:
    """rms_norm(x) * (1 + scale) + shift, with each run's own shift and scale: [s, C]."""
    h_sC = F.rms_norm(x_sC, norm_C.shape, norm_C, NORM_EPS)
    for start, stop, row in runs:
        part = h_sC[start:stop]
        torch.addcmul(table_RnC[row, SHIFT], part, table_RnC[row, FACTOR], out=part)
    return h_sC


def add_gated(x_sC: Tensor, y_sC: Tensor, table_RnC: Tensor, runs: tuple[Run, ...]) -> None:
    """x += gate * y in place, with each run's own gate, used raw."""
    for start, stop, row in runs:
        x_sC[start:stop].addcmul_(y_sC[start:stop], table_RnC[row, GATE])
