"""Whether a run's steps are replayed as a CUDA graph: `runtime.graph` as asked for, or with auto where that wins."""

from __future__ import annotations

from collections.abc import Callable

import torch

from h3dist.config import Config
from h3dist.model.denoiser import Denoiser
from h3dist.model.elementwise import PLAIN
from h3dist.model.graphed import GraphedDenoiser
from h3dist.plan import Plan

# One H200, 2026-11-30, 1258 rows: the host takes 1.54 ms to start a block, the GPU 1.75 ms for it as a graph and 1.94
# otherwise. What the GPU takes grows with the rows: at twice as many the host is well ahead, and nothing is left.
ROWS = 2400
STEPS = 24  # predicted: to record a step takes what the host needs for one and somewhat more, or the gain of 8 to 16
RECORDABLE = ("sdpa", "flash")  # how names of attention begin that nothing but the GPU takes part in
TORCH = "sdpa"  # and of those that are part of torch


def graphed(
    denoiser: Denoiser, config: Config, plan: Plan, device: torch.device
) -> tuple[Denoiser | GraphedDenoiser, Callable[[], str]]:
    """What computes the steps of a run, and what tells in the end how. It raises ConfigError as GraphedDenoiser."""
    asked = config.runtime.graph
    reason = against(denoiser, config, plan, device) if asked == "auto" else None if asked == "on" else "as asked"
    if reason is not None:
        return denoiser, lambda: f"no: {reason}"
    made = GraphedDenoiser(denoiser, strict=asked == "on", checked=not plan.attention.startswith(TORCH))
    return made, lambda: made.told


def against(denoiser: Denoiser, config: Config, plan: Plan, device: torch.device) -> str | None:
    """Why `runtime.graph=auto` computes each step as ever; None where it does not."""
    reasons = {
        f"it is for CUDA devices, and this is {device.type}": device.type != "cuda",
        f"it is for one rank, and these are {plan.layout.world}": plan.layout.world > 1,
        "runtime.offload=blocks": plan.stored.resident_blocks is not None,
        "attention.capture": config.attention.capture is not None,
        "the path is not the fused one": denoiser.view.elementwise is PLAIN,
        f"products are {plan.gemm}": plan.gemm != "dense",
        f"attention={plan.attention}": not plan.attention.startswith(RECORDABLE),
        f"{plan.rows} rows are enough for the GPU, over {ROWS}": plan.rows > ROWS,
        f"{plan.steps} steps are too few, under {STEPS}": plan.steps < STEPS,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
