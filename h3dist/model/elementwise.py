"""What a block does between its products, attention and exchange: norms, modulation, rotation, activation, gates.

These are the plain forms, in torch alone. `fused` has the same in fewer passes over memory.

Shape letters: s this rank's rows; p the rows that it projects to j heads; g the rows of its tensor-parallel group;
D head size; C hidden; f its feed-forward columns; R table rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.comm.forms import Kinds, Turn, each
from h3dist.comm.pieces import Places
from h3dist.model.rotary import Rotation, rotate

NORM_EPS = 1e-5  # of every norm: block, query and key, final, refiner

# Chunks of a block's modulation: a shift, the factor (1 + scale) and a gate, for each of the two halves.
ATTENTION, MLP = 0, 3
SHIFT, FACTOR, GATE = 0, 1, 2


class Run(NamedTuple):
    """Own rows [start, stop) that share row `row` of a modulation table."""

    start: int
    stop: int
    row: int


Runs = tuple[Run, ...]
Heads = tuple[Tensor, Tensor, Tensor]  # q, k and v, each [p, j, D]


class Elementwise(NamedTuple):
    """One way to do all of it.

    prepare(rotation): what `turn` takes, made once a request. modulate(x_sC, norm_C, table_RnC, runs): h_sC.
    add_modulate(x_sC, y_sC, gates_RC, norm_C, table_RnC, runs): x += gate * y, in place; then h_sC of the sum.
    add(x_sC, y_sC, gates_RC, runs): x += gate * y, in place. turn(q_norm_D, k_norm_D, prepared): how q and k are normed
    over the head and rotated where they lie, or on their way with v, which stays as it is.
    activate([g, 2f]): silu(gate) * up, [g, f], or what the product that takes it wants in its place.
    """

    prepare: Callable[[Rotation], Any]
    modulate: Callable[[Tensor, Tensor, Tensor, Runs], Tensor]
    add_modulate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Runs], Tensor]
    add: Callable[[Tensor, Tensor, Tensor, Runs], None]
    turn: Callable[[Tensor, Tensor, Any], Turn]
    activate: Callable[[Tensor], Any]


def modulated(x_sC: Tensor, norm_C: Tensor, table_RnC: Tensor, runs: Runs) -> Tensor:
    """rms_norm(x) * (1 + scale) + shift, with each run's own shift and scale: [s, C]."""
    h_sC = F.rms_norm(x_sC, norm_C.shape, norm_C, NORM_EPS)
    for start, stop, row in runs:
        part = h_sC[start:stop]
        torch.addcmul(table_RnC[row, SHIFT], part, table_RnC[row, FACTOR], out=part)
    return h_sC


def add_gated(x_sC: Tensor, y_sC: Tensor, gates_RC: Tensor, runs: Runs) -> None:
    """x += gate * y in place, with each run's own gate, used raw."""
    for start, stop, row in runs:
        x_sC[start:stop].addcmul_(y_sC[start:stop], gates_RC[row])


def add_modulated(
    x_sC: Tensor, y_sC: Tensor, gates_RC: Tensor, norm_C: Tensor, table_RnC: Tensor, runs: Runs
) -> Tensor:
    """From the end of one half of a block to the beginning of the next."""
    add_gated(x_sC, y_sC, gates_RC, runs)
    return modulated(x_sC, norm_C, table_RnC, runs)


def turn(q_norm_D: Tensor, k_norm_D: Tensor, rotation: Rotation) -> Turn:
    """Piece by piece; `rotation` is of all rows."""

    def lay(heads: Kinds, places: Places, packet: Tensor | None) -> None:
        for place, some, out in each(heads, places, packet):
            angles = Rotation(*(x[slice(*place.rows)] for x in rotation))
            for x_rnD, out_rnD, norm_D in zip(some, out, (q_norm_D, k_norm_D), strict=False):
                rotate(F.rms_norm(x_rnD, norm_D.shape, norm_D, NORM_EPS), angles, out=out_rnD)
            if packet is not None:
                out[2].copy_(some[2])

    return Turn(lay)


def activated(gate_up_g2f: Tensor) -> Tensor:
    """silu(gate) * up, [g, f]."""
    gate_gf, up_gf = gate_up_g2f.chunk(2, dim=1)
    return F.silu(gate_gf).mul_(up_gf)


PLAIN = Elementwise(lambda rotation: rotation, modulated, add_modulated, add_gated, turn, activated)
