"""Whole steps done otherwise, each beside the plain one: how fast, how much memory, and how far off.

The error is that of the velocity at the first evaluation, relative in the 2-norm, on random weights: real ones may be
kinder or harsher, and a whole run's error is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from h3dist.bench.steps import denoiser_of, relative_error, run_steps, velocity
from h3dist.bench.timing import Clock, Timing
from h3dist.comm import Comm
from h3dist.errors import ConfigError, nearest
from h3dist.model.graphed import GraphedDenoiser
from h3dist.model.offload import OffloadedBlocks
from h3dist.model.weights import DenoiserWeights
from h3dist.plan import Plan


@dataclass(frozen=True)
class Variant:
    """What is other than in the plain step; None, "auto" and False: nothing."""

    name: str
    attention: str | None = None
    gemm: str = "auto"
    fused: bool = False
    reused: bool = False
    offload: bool = False
    graph: bool = False

    @property
    def kept(self) -> tuple[str, bool]:
        """How its weights are: those that are alike share them."""
        return self.gemm, self.offload


ALL = (
    Variant("fused, flash4", attention="flash4", fused=True, reused=True),
    Variant("fused", fused=True, reused=True),  # what runtime.fused=on does
    Variant("fused, graph", fused=True, reused=True, graph=True),  # with runtime.graph=on
    Variant("reused", reused=True),  # of it, weights made dense in one memory
    Variant("gemm.fp8", gemm="fp8"),
    Variant("gemm.fp8, fused, cudnn_fp8", attention="cudnn_fp8", gemm="fp8", fused=True),
    Variant("gemm.fp8, fused, sage2", attention="sage2", gemm="fp8", fused=True),
    Variant("gemm.int8", gemm="int8"),
    Variant("gemm.int8, fused, int8", attention="int8", gemm="int8", fused=True),
    Variant("fused, offload", fused=True, reused=True, offload=True),  # with runtime.offload=blocks
)

SETS = {
    "all": ALL,
    "exact": tuple(variant for variant in ALL if variant.kept == ("auto", False)),
    "fp8": tuple(variant for variant in ALL if variant.gemm == "fp8"),
    "int8": tuple(variant for variant in ALL if variant.gemm == "int8"),
    "offload": tuple(v for v in ALL if v.name in ("fused", "fused, offload")),  # without and with
    "graph": tuple(v for v in ALL if v.name in ("fused", "fused, graph")),
}


def choose(names: Sequence[str]) -> tuple[Variant, ...]:
    """Those of some sets, or called by their own names, in the order of `ALL`. Raises ConfigError."""
    by_name = {variant.name: (variant,) for variant in ALL} | SETS
    for name in names:
        if name not in by_name:
            allowed = ", ".join(map(repr, by_name))
            raise ConfigError(f"--variants {name!r}: must be one of {allowed}{nearest(name, tuple(by_name))}")
    asked = {variant for name in names for variant in by_name[name]}
    return tuple(variant for variant in ALL if variant in asked)


def measure(
    variant: Variant, weights: DenoiserWeights, plan: Plan, comm: Comm, seed: int, plain: Tensor | None
) -> dict[str, Any]:
    """Seconds of the plan's evaluations, bytes at most and at rest, and the error against the `plain` velocity.

    weights: as the variant keeps them. `offload`: what came over the bus in a step. Every rank must call it.
    """
    plan = replace(plan, attention=variant.attention or plan.attention)
    denoiser = denoiser_of(weights, plan, comm, seed=seed, fused=variant.fused, reused=variant.reused)
    if variant.graph and plan.layout.world > 1:
        raise ConfigError(f"steps are replayed on one rank, and these are {plan.layout.world}")
    if variant.graph:
        denoiser = GraphedDenoiser(denoiser)
    found = velocity(denoiser, plan, seed=seed)
    measured = run_steps(denoiser, plan, comm, seed=seed)
    made = Timing(measured.seconds[1:]).as_dict(resident_bytes=measured.resident, peak_bytes=measured.peak)
    if isinstance(weights.blocks, OffloadedBlocks):
        made["offload"] = carried(weights.blocks, Clock(weights.device, plan.steps - 1), made["seconds"])
    return made | {"error": None if plain is None else relative_error(found, plain)}


def carried(blocks: OffloadedBlocks, clock: Clock, step: float) -> dict[str, float]:
    """Bytes of all blocks, which come in every step, of `step` seconds; how many a second, then and `alone`.

    pinned_bytes: what torch holds in all, rounded up.
    """

    def work() -> None:
        for index in range(len(blocks)):
            blocks[index]

    count, alone = blocks.host_bytes, clock.time(work).median
    rates = {"bytes_per_second": count / step, "alone_bytes_per_second": count / alone}
    stats = torch.cuda.host_memory_stats() if clock.device.type == "cuda" else {}
    return {"bytes": count, **rates, "pinned_bytes": stats.get("allocated_bytes.current", 0)}
