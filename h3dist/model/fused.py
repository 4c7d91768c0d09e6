"""The work between products in as few passes over memory as it takes, for CUDA: `runtime.fused=on`.

Norm and modulation, and the gated addition before them, are one kernel; so are norms and rotation of queries and keys,
in place, into the packet in which heads travel, or as its codes; silu(gate) * up; and a gated addition. Each has its
plain form in `elementwise`, which it equals but for fewer roundings.

Shape letters as in `elementwise`.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from h3dist.comm.forms import Turn
from h3dist.errors import ConfigError, MissingDependency
from h3dist.model.elementwise import PLAIN, Elementwise, Runs
from h3dist.model.rotary import Rotation


def pairs_of(runs: Runs, rows: int, device: torch.device) -> Tensor:
    """int32 [s]: each own row's row of the modulation table."""
    pairs_s = torch.zeros(rows, dtype=torch.int32)
    for start, stop, row in runs:
        pairs_s[start:stop] = row
    return pairs_s.to(device)


def angles(rotation: Rotation) -> Rotation:
    """cos and sin as the kernel takes them: [p, R], contiguous."""
    return Rotation(rotation.cos[:, 0].contiguous(), rotation.sin[:, 0].contiguous())


def lacks(device: torch.device) -> str | None:
    """Why the fused path cannot be on a device; None where it can."""
    if device.type != "cuda":
        return f"it is for CUDA devices, and this is {device.type}"
    try:
        load()
    except MissingDependency as error:
        return str(error)
    return None


def choose_elementwise(asked: str, device: torch.device) -> Elementwise:
    """The plain forms for `runtime.fused=off`, the fused path for on. Raises ConfigError, MissingDependency."""
    if asked == "off":
        return PLAIN
    if device.type != "cuda":
        raise ConfigError(f"runtime.fused=on is for CUDA devices, and this is {device.type}; use runtime.fused=auto")
    return load()


def load() -> Elementwise:
    """The fused path. Raises MissingDependency without triton."""
    try:
        from h3dist.model import triton_kernels as kernels
        from h3dist.model import triton_turn as turns
    except ImportError as error:
        raise MissingDependency(f"runtime.fused=on needs triton: {error}") from error

    # Kept as long as what uses them: a recorded step reads them where they lie.
    pairs = lru_cache(maxsize=8)(pairs_of)

    def modulate(x_sC: Tensor, norm_C: Tensor, table_RnC: Tensor, runs: Runs) -> Tensor:
        return kernels.modulate(x_sC, norm_C, table_RnC, pairs(runs, x_sC.shape[0], x_sC.device))

    def add_modulate(
        x_sC: Tensor, y_sC: Tensor, gates_RC: Tensor, norm_C: Tensor, table_RnC: Tensor, runs: Runs
    ) -> Tensor:
        pairs_s = pairs(runs, x_sC.shape[0], x_sC.device)
        return kernels.add_modulate(x_sC, y_sC, gates_RC, norm_C, table_RnC, pairs_s)

    def add(x_sC: Tensor, y_sC: Tensor, gates_RC: Tensor, runs: Runs) -> None:
        kernels.add(x_sC, y_sC, gates_RC, pairs(runs, x_sC.shape[0], x_sC.device))

    def turn(q_norm_D: Tensor, k_norm_D: Tensor, rotation: Rotation) -> Turn:
        turning = turns.Turning(q_norm_D, k_norm_D, *rotation)
        return Turn(partial(turns.turn, turning), partial(turns.encode, turning))

    return Elementwise(angles, modulate, add_modulate, add, turn, kernels.activate)
