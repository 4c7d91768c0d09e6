"""The work between products in as few passes over memory as it takes, for CUDA: `runtime.fused=on`.

Norm and modulation, and the gated addition before them, are one kernel; query and key norm with rotation are one of
comfy-kitchen's, in place, so that q, k and v go to attention as they lie; silu(gate) * up is one. Each has its plain
form in `elementwise`, which it equals but for fewer roundings.

Shape letters as in `elementwise`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from h3dist.errors import ConfigError, MissingDependency
from h3dist.model.elementwise import ATTENTION, GATE, MLP, NORM_EPS, PLAIN, Elementwise, Runs, add_gated
from h3dist.model.rotary import Rotation


@lru_cache(maxsize=8)
def pairs_of(runs: Runs, rows: int, device: torch.device) -> Tensor:
    """int32 [s]: each own row's row of the modulation table."""
    pairs_s = torch.zeros(rows, dtype=torch.int32)
    for start, stop, row in runs:
        pairs_s[start:stop] = row
    return pairs_s.to(device)


def matrices(rotation: Rotation) -> Tensor:
    """f32 [1, p, 1, R, 2, 2]: (cos, -sin), (sin, cos) of every row's R angles, as comfy-kitchen takes them."""
    cos, sin = rotation.cos[:, 0].float(), rotation.sin[:, 0].float()
    return torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))[None, :, None].contiguous()


def turned(
    q_pjD: Tensor, k_pjD: Tensor, q_norm_D: Tensor, k_norm_D: Tensor, matrices_: Tensor
) -> tuple[Tensor, Tensor]:
    """q and k normed over the head and rotated in place, in one kernel, rounded once."""
    from comfy_kitchen import rms_rope_split_half_

    if q_pjD.numel():
        rotated = 2 * matrices_.shape[3]
        rms_rope_split_half_(q_pjD[None], k_pjD[None], matrices_, q_norm_D, k_norm_D, NORM_EPS, rotated)
    return q_pjD, k_pjD


def choose_elementwise(asked: str, device: torch.device) -> Elementwise:
    """The plain forms for `runtime.fused=off`, the fused path for on. Raises ConfigError, MissingDependency."""
    if asked == "off":
        return PLAIN
    if device.type != "cuda":
        raise ConfigError(f"runtime.fused=on is for CUDA devices, and this is {device.type}; use runtime.fused=off")
    return load()


def load() -> Elementwise:
    """The fused path. Raises MissingDependency without triton or comfy-kitchen."""
    try:
        import comfy_kitchen  # noqa: F401 (so that its absence is told at the start)

        from h3dist.model import triton_kernels as kernels
    except ImportError as error:
        raise MissingDependency(f"runtime.fused=on needs triton and comfy-kitchen: {error}") from error

    def modulate(x_sC: Tensor, norm_C: Tensor, table_RnC: Tensor, runs: Runs) -> Tensor:
        return kernels.modulate(x_sC, norm_C, table_RnC, pairs_of(runs, x_sC.shape[0], x_sC.device))

    def add_modulate(x_sC: Tensor, y_sC: Tensor, table_R6C: Tensor, norm_C: Tensor, runs: Runs) -> Tensor:
        gates_RC, table_RnC = table_R6C[:, ATTENTION + GATE], table_R6C[:, MLP:]
        pairs_s = pairs_of(runs, x_sC.shape[0], x_sC.device)
        return kernels.add_modulate(x_sC, y_sC, gates_RC, norm_C, table_RnC, pairs_s)

    return Elementwise(matrices, modulate, add_modulate, add_gated, turned, kernels.activate)
