"""Denoiser steps on random weights: timed on every rank together, hashed, and compared between layouts.

The same code as a run's denoise stage, without checkpoint files: Plan, Comm, Denoiser, sampler.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from h3dist.attending import task_of
from h3dist.attention.registry import find, why_not
from h3dist.comm import Comm
from h3dist.comm.forms import choose_forms
from h3dist.model.denoiser import Denoiser
from h3dist.model.fused import choose_elementwise
from h3dist.model.graphed import GraphedDenoiser
from h3dist.model.linear import linear_of_run
from h3dist.model.offload import OffloadedBlocks
from h3dist.model.packed import packing
from h3dist.model.random_weights import random_denoiser, random_modulation
from h3dist.model.weights import DenoiserWeights, narrow_block
from h3dist.packing import pack_t2va
from h3dist.plan import Plan
from h3dist.sampling.noise import draw
from h3dist.sampling.samplers import sample
from h3dist.sampling.schedules import make_schedule

TEXT_TAG = 1


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
    return run_steps(random_run(plan, comm, device, seed=seed), plan, comm, seed=seed)


def random_run(plan: Plan, comm: Comm, device: torch.device, *, seed: int = 0, fused: bool = False) -> Denoiser:
    """This rank's denoiser on random weights, tied to its peers: what a run has when it begins to denoise."""
    weights = random_weights(plan, comm.rank, device, seed=seed)
    return denoiser_of(weights, plan, comm, seed=seed, fused=fused, reused=fused)


def random_weights(
    plan: Plan, rank: int, device: torch.device, *, seed: int = 0, offload: bool = False
) -> DenoiserWeights:
    """A rank's random NVFP4 weights, rounded where the plan's products take them so, or left in the host's memory."""
    dtype = getattr(torch, plan.dtype)
    weights = random_denoiser(plan.dims, plan.shares[rank], seed=seed, device=device, dtype=dtype)
    blocks = (narrow_block(block, plan.gemm, dtype) for block in weights.blocks)
    return replace(weights, blocks=OffloadedBlocks(blocks, device) if offload else tuple(blocks))


def denoiser_of(
    weights: DenoiserWeights, plan: Plan, comm: Comm, *, seed: int = 0, fused: bool = False, reused: bool = False
) -> Denoiser:
    """The denoiser of a plan on these weights. `fused`, `reused`: the halves of `runtime.fused`.

    Raises what an attention backend, a product or the fused path raises that cannot be here.
    """
    device, share = weights.device, plan.shares[comm.rank]
    backend, task = find(plan.attention), task_of(plan, comm.rank, device)
    error = why_not(backend, task)
    if error is not None:
        raise error
    elementwise = choose_elementwise("on" if fused else "off", device)
    exchange = comm.exchange(plan, choose_forms(fused))
    return Denoiser(
        weights,
        pack_t2va(plan.geometry, (TEXT_TAG,) * plan.text_rows),
        share,
        random_modulation(plan.dims, plan.steps, seed=seed, device=device, dtype=weights.dtype),
        exchange,
        backend.build(task, comm.share(backend.probe(task) if comm.rank == 0 else None)),
        _text_rows(plan, seed),
        packing(linear_of_run(plan, weights, task.capability, exchange, reused=reused), plan),
        elementwise=elementwise,
    )


def velocity(denoiser: Denoiser | GraphedDenoiser, plan: Plan, *, seed: int = 0) -> Tensor:
    """What the denoiser gives at the first evaluation, both streams, flat float32 on the CPU."""
    video, audio = (x.to(denoiser.weights.device) for x in draw("comfy", seed, plan.geometry))
    return torch.cat([part.flatten() for part in denoiser(video, audio, 0)]).float().cpu()


def run_steps(denoiser: Denoiser | GraphedDenoiser, plan: Plan, comm: Comm, *, seed: int = 0) -> Measured:
    """Run the plan's evaluations with a denoiser of `denoiser_of`, on every rank of `comm`."""
    device = denoiser.weights.device
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = dict(comm.counted)
    seconds, latents = _run(denoiser, plan, device, seed)
    peak = torch.cuda.max_memory_allocated(device) + comm.transport.held if cuda else 0
    sent = {label: count - before[label] for label, count in comm.counted.items()}
    return Measured(seconds, latents, kept_bytes(denoiser.weights) if cuda else 0, peak, sent)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| in the 2-norm."""
    return ((found - wanted).double().norm() / wanted.double().norm()).item()


def kept_bytes(weights: DenoiserWeights) -> int:
    """Bytes of the weights as they stay resident on the device."""
    own = [*weights.video_in, *weights.audio_in, *weights.heads, weights.final_norm, weights.inv_freq]
    if isinstance(weights.blocks, OffloadedBlocks):
        return sum(part.nbytes for part in own) + weights.blocks.device_bytes
    return sum(part.nbytes for part in (*own, *(part for block in weights.blocks for part in vars(block).values())))


def _text_rows(plan: Plan, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((plan.text_rows, plan.dims.hidden), generator=generator)


def _run(
    denoiser: Denoiser | GraphedDenoiser, plan: Plan, device: torch.device, seed: int
) -> tuple[tuple[float, ...], Tensor]:
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
