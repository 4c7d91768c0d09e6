"""Denoiser steps on random weights: timed on every rank together, hashed, and compared between layouts.

The same code as a run's denoise stage, without checkpoint files: Plan, Comm, Denoiser, sampler.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from h3dist.attention.registry import get as attention_backend
from h3dist.comm import Comm
from h3dist.geometry import Geometry
from h3dist.model.denoiser import Denoiser
from h3dist.model.random_weights import random_denoiser, random_modulation
from h3dist.packing import pack_t2va
from h3dist.plan import Plan
from h3dist.sampling.noise import draw
from h3dist.sampling.samplers import sample
from h3dist.sampling.schedules import make_schedule

TEXT_TAG = 1


@dataclass(frozen=True)
class Clip:
    """What a plan asks of a request where there is none: its geometry, and nothing said about it."""

    geometry: Geometry
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """One rank's run of a schedule: seconds of each evaluation, the latents it ended in, memory and bytes.

    `resident` is what the weights take, `peak` the most that was held, both in bytes and 0 on a CPU.
    """

    seconds: tuple[float, ...]
    latents: Tensor
    resident: int
    peak: int
    sent: dict[str, int]

    @property
    def warm(self) -> float:
        """Median seconds of an evaluation, the first left out."""
        return median(self.seconds[1:] or self.seconds)

    @property
    def sha256(self) -> str:
        """Of the latents as float32."""
        return hashlib.sha256(self.latents.numpy().tobytes()).hexdigest()


def measure_steps(plan: Plan, comm: Comm, device: torch.device, *, seed: int = 0) -> Measured:
    """Run the plan's evaluations on random weights, on every rank of `comm`. The first one warms up."""
    dtype, share = getattr(torch, plan.dtype), plan.shares[comm.rank]
    weights = random_denoiser(plan.dims, share, seed=seed, device=device, dtype=dtype)
    resident = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    denoiser = Denoiser(
        weights,
        pack_t2va(plan.geometry, (TEXT_TAG,) * plan.text_rows),
        share,
        random_modulation(plan.dims, plan.steps, seed=seed, device=device, dtype=dtype),
        comm.exchange(plan),
        attention_backend(plan.attention, device, dtype),
        _text_rows(plan, seed),
    )
    seconds, latents = _run(denoiser, plan, device, seed)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Measured(seconds, latents, resident, peak, dict(comm.counted))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| in the 2-norm."""
    return ((found - wanted).double().norm() / wanted.double().norm()).item()


def _text_rows(plan: Plan, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((plan.text_rows, plan.dims.hidden), generator=generator)


def _run(denoiser: Denoiser, plan: Plan, device: torch.device, seed: int) -> tuple[tuple[float, ...], Tensor]:
    """Seconds of each evaluation and the final latents, flat float32 on the CPU."""
    stamps = [_now(device)]
    video, audio = (x.to(device) for x in draw("comfy", seed, plan.geometry))
    video, audio = sample(
        denoiser,
        video,
        audio,
        make_schedule("simple", plan.steps),
        sampler="euler",
        contract="comfy",
        on_step=lambda *_: stamps.append(_now(device)),
    )
    return _gaps(stamps), torch.cat([video.flatten(), audio.flatten()]).float().cpu()


def _gaps(stamps: Sequence[float]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise(stamps))


def _now(device: torch.device) -> float:
    """Seconds, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
