"""One transformer block on one rank: the same code for every layout.

AdaLN on own rows, gather and project, heads, attention over all rows, partial result, reduce back to own rows, gate
and add; then the same around the feed-forward layers, gathering over the tensor-parallel group.

Shape letters: s this rank's rows; g the rows of its tensor-parallel group; p the rows that it projects to j heads;
H heads of its tensor-parallel share; D head size; C hidden; f its feed-forward columns; R table rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h3dist.attention.backend import Attention
from h3dist.checkpoint.formats import Weight
from h3dist.model.columns import reduced
from h3dist.model.dense import Linear, prescaled
from h3dist.model.elementwise import ATTENTION, GATE, MLP, PLAIN, Elementwise, Heads, Runs
from h3dist.model.exchange import Exchange
from h3dist.model.packed import gathered
from h3dist.model.residual import Residual
from h3dist.model.reused import made_dense
from h3dist.model.weights import BlockWeights


@dataclass(frozen=True)
class View:
    """What is the same for every block of a rank: its runs of rows, its rotation, and the ways to compute.

    rotation: as `elementwise` prepared it.
    """

    runs: Runs
    rotation: Any
    exchange: Exchange
    attention: Attention
    linear: Linear
    elementwise: Elementwise = PLAIN


def run_block(stream: Residual, weights: BlockWeights, table_R6C: Tensor, view: View) -> None:
    """Apply one block to this rank's rows of the residual stream."""
    exchange = view.exchange
    h_sC = stream.modulated(weights.norm1, table_R6C[:, ATTENTION:])
    stream.add(reduced(attend(h_sC, weights, view), weights.out, view.linear, exchange), table_R6C[:, ATTENTION + GATE])
    del h_sC

    h_sC = stream.modulated(weights.norm2, table_R6C[:, MLP:])
    h_gC = gathered(h_sC, weights.fc1, view.linear, exchange.gather_rows)
    f_gf = view.elementwise.activate(view.linear(h_gC, weights.fc1))
    stream.add(reduced(f_gf, weights.fc2, view.linear, exchange), table_R6C[:, MLP + GATE])


def attend(h_sC: Tensor, weights: BlockWeights, view: View) -> Tensor:
    """The attention output of this share's heads, [g, HD]: what the output projection takes."""
    heads = as_heads(projected(h_sC, weights.qkv, view), weights)
    turn = view.elementwise.turn(weights.q_norm, weights.k_norm, view.rotation)
    return view.exchange.attend(*heads, view.attention, turn).flatten(1)


def projected(h_sC: Tensor, weight: Weight, view: View) -> Tensor:
    """[p, 3jD] of the rows that are projected here. Where the weight is dense, own rows are while others come."""
    dense_NK = made_dense(view.linear, weight, h_sC.dtype)
    if dense_NK is None:
        return view.linear(gathered(h_sC, weight, view.linear, view.exchange.gather_projected), weight)

    def product(h_rC: Tensor, out_rN: Tensor) -> None:
        torch.mm(h_rC, dense_NK.T, out=out_rN)

    return view.exchange.project(prescaled(h_sC, weight), dense_NK.shape[0], product)


def as_heads(qkv_pX: Tensor, weights: BlockWeights) -> Heads:
    """q, k and v of the heads projected here, each [p, j, D], neither normed nor rotated.

    They lie side by side: contiguous in their last two dimensions alone, as what comes from an exchange.
    """
    return qkv_pX.unflatten(1, (3, -1, weights.q_norm.shape[0])).unbind(1)
