"""One transformer block on one rank: the same code for every layout.

AdaLN on own rows, gather over the tensor-parallel group, heads, attention over all rows, partial result,
reduce back to own rows, gate and add; then the same around the feed-forward layers.

Shape letters: S all rows; s this rank's rows; g the rows of its tensor-parallel group; H heads of its
tensor-parallel share, h heads it attends to; D head size; C hidden; f its feed-forward columns; R table rows.
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
    h_gC = view.exchange.gather_rows(modulated(x_sC, weights.norm1, table_R6C[:, ATTENTION:], view.runs))
    y_sC = view.exchange.reduce_rows(attend(h_gC, weights, view))
    add_gated(x_sC, y_sC, table_R6C[:, ATTENTION:], view.runs)

    h_gC = view.exchange.gather_rows(modulated(x_sC, weights.norm2, table_R6C[:, MLP:], view.runs))
    y_sC = view.exchange.reduce_rows(swiglu(h_gC, weights, view.linear))
    add_gated(x_sC, y_sC, table_R6C[:, MLP:], view.runs)


def attend(h_gC: Tensor, weights: BlockWeights, view: View) -> Tensor:
    """This share's part of the attention output, [g, C]: the sum over the shares is the whole."""
    q_gHD, k_gHD, v_gHD = project_heads(h_gC, weights, view.linear)
    q_gHD, k_gHD = rotate(q_gHD, view.rotation), rotate(k_gHD, view.rotation)
    q_ShD, k_ShD, v_ShD = view.exchange.to_heads(q_gHD, k_gHD, v_gHD)
    del q_gHD, k_gHD, v_gHD  # the largest activations: free them before attention needs room
    o_gHD = view.exchange.to_rows(view.attention(q_ShD, k_ShD, v_ShD))
    return view.linear(o_gHD.flatten(1), weights.out)


def project_heads(h_gC: Tensor, weights: BlockWeights, linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the heads held here, each [g, H, D] and contiguous; q and k normed over the head."""
    size = weights.q_norm.shape[0]
    q_gHD, k_gHD, v_gHD = linear(h_gC, weights.qkv).unflatten(1, (3, -1, size)).unbind(1)
    q_gHD = F.rms_norm(q_gHD, (size,), weights.q_norm, NORM_EPS)
    k_gHD = F.rms_norm(k_gHD, (size,), weights.k_norm, NORM_EPS)
    return q_gHD, k_gHD, v_gHD.contiguous()


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
