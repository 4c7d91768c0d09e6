"""The denoising loop: a velocity function, a schedule, and one linear update a step.

Every update is x <- keep·x + new·D_i + old·D_(i-1), where D is the clean latent that the velocity points at.
A sampler is a function that gives the three weights of a step; Euler's `old` is 0.
The model's velocity v is data-ward: D = x + sigma·v.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from h3dist.errors import ConfigError, NumericsError, nearest
from h3dist.sampling.noise import check_contract
from h3dist.sampling.schedules import Schedule

Velocity = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
OnStep = Callable[[int, torch.Tensor, torch.Tensor], None]
Weights = Callable[[tuple[float, ...], int], tuple[float, float, float]]


def sample(
    velocity: Velocity,
    video: torch.Tensor,
    audio: torch.Tensor,
    schedule: Schedule,
    *,
    sampler: str,
    contract: str,
    on_step: OnStep | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Denoised (video [1,24,T,h,w], audio [1,32,2,A]) float32 from noise of those shapes.

    velocity(video, audio, step) gives both data-ward velocities; on_step(step, video, audio) sees the latents
    after each step. Contract "official" steps each stream on its own sigmas as diffusers' MiniMaxH3Scheduler
    does; "comfy" carries the audio on the video's sigmas. Raises ConfigError for an unknown or illegal choice
    and NumericsError, with stream and step, for a velocity that is not finite.
    """
    check_contract(contract)
    weights = _weights(sampler)
    report = on_step or (lambda step, video, audio: None)
    checked = _finite(velocity, schedule.evaluations)
    if contract == "comfy":
        return _carried(checked, video.float(), audio.float(), schedule, weights, report)
    if sampler != "euler":
        raise ConfigError(
            f"sampler {sampler!r} is defined on the carried audio of noise contract 'comfy'; "
            "with contract 'official' choose sampler 'euler'"
        )
    return _separate(checked, video.float(), audio.float(), schedule, report)


def euler(sigmas: tuple[float, ...], step: int) -> tuple[float, float, float]:
    """Euler as a blend of x and D: r = sigma_(i+1) / sigma_i and 1 - r, both rounded to float32."""
    ratio = np.float32(sigmas[step + 1]) / np.float32(sigmas[step])
    return float(ratio), float(np.float32(1) - ratio), 0.0


def res_multistep(sigmas: tuple[float, ...], step: int) -> tuple[float, float, float]:
    """Second-order exponential multistep in lambda = -ln sigma; the first and the last step are Euler's.

    h = lambda_(i+1) - lambda_i, c2 = (lambda_(i-1) - lambda_i) / h, phi1(z) = (e^z - 1) / z and
    phi2(z) = (phi1(z) - 1) / z at z = -h: x <- e^-h·x + h·((phi1 - phi2/c2)·D_i + (phi2/c2)·D_(i-1)).
    """
    if step == 0 or sigmas[step + 1] == 0:
        return euler(sigmas, step)
    before, now, after = (-math.log(sigma) for sigma in sigmas[step - 1 : step + 2])
    h = after - now
    phi1 = math.expm1(-h) / -h
    phi2 = (phi1 - 1) / -h
    old = phi2 * h / (before - now)
    return math.exp(-h), h * (phi1 - old), h * old


SAMPLERS: dict[str, Weights] = {"euler": euler, "res_multistep": res_multistep}


def _weights(sampler: str) -> Weights:
    if sampler not in SAMPLERS:
        choices = ", ".join(SAMPLERS)
        raise ConfigError(f"unknown sampler {sampler!r}: choose from {choices}{nearest(sampler, SAMPLERS)}")
    return SAMPLERS[sampler]


def _separate(
    velocity: Velocity, video: torch.Tensor, audio: torch.Tensor, schedule: Schedule, report: OnStep
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each stream on its own grid by Euler; D uses the sigma that the model's time stands for, 1 - t."""
    for step in range(schedule.evaluations):
        v_video, v_audio = velocity(video, audio, step)
        clean_video = video + _one_minus(schedule.times_v[step]) * v_video
        clean_audio = audio + _one_minus(schedule.times_a[step]) * v_audio
        video = _blend(euler(schedule.video_sigmas, step), video, clean_video, None)
        audio = _blend(euler(schedule.audio_sigmas, step), audio, clean_audio, None)
        report(step, video, audio)
    return video, audio


def _carried(
    velocity: Velocity,
    video: torch.Tensor,
    audio: torch.Tensor,
    schedule: Schedule,
    weights: Weights,
    report: OnStep,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both streams on the video's sigmas; the audio x_a travels as y = (sigma_v / sigma_a)·x_a.

    y starts at the noise itself (sigma 1) and ends at k times the audio, k = `schedule.gain`.
    """
    sigmas, gain = schedule.video_sigmas, schedule.gain
    carried, old_video, old_carried = audio, None, None
    for step, sigma in enumerate(sigmas[:-1]):
        v_video, v_audio = velocity(video, audio, step)
        clean_video = video + sigma * v_video
        clean_carried = carried - sigma * _carried_velocity(audio, v_audio, schedule.audio_sigmas[step], gain)
        w = weights(sigmas, step)
        video, old_video = _blend(w, video, clean_video, old_video), clean_video
        carried, old_carried = _blend(w, carried, clean_carried, old_carried), clean_carried
        audio = carried / _carry(sigmas[step + 1], gain)
        report(step, video, audio)
    return video, audio


def _carry(sigma: float, gain: float) -> float:
    """sigma_v / sigma_a at the video's `sigma`: s_v·b / (1 + (s_v-1)·b) over the same with s_a, base b gone.

    It is 1 at sigma 1 and `gain` at sigma 0.
    """
    return gain + sigma * (1 - gain)


def _carried_velocity(audio: torch.Tensor, v_audio: torch.Tensor, sigma_a: float, gain: float) -> torch.Tensor:
    """u = (1 - k)·x_a + (1 + (k - 1)·sigma_a)·v with v noise-ward: noise minus k times the clean audio."""
    return (1 - gain) * audio - (1 + (gain - 1) * sigma_a) * v_audio


def _blend(
    weights: tuple[float, float, float], x: torch.Tensor, clean: torch.Tensor, previous: torch.Tensor | None
) -> torch.Tensor:
    keep, new, old = weights
    blended = keep * x + new * clean
    return blended if previous is None or old == 0 else blended + old * previous


def _one_minus(time: float) -> float:
    return float(np.float32(1) - np.float32(time))


def _finite(velocity: Velocity, evaluations: int) -> Velocity:
    """`velocity` in float32, refused where a stream holds NaN or infinity."""

    def checked(video: torch.Tensor, audio: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        v_video, v_audio = (v.float() for v in velocity(video, audio, step))
        for stream, v in (("video", v_video), ("audio", v_audio)):
            if not bool(torch.isfinite(v).all()):
                count = int((~torch.isfinite(v)).sum())
                raise NumericsError(
                    f"step {step + 1} of {evaluations}: {count} of {v.numel()} values of the model's "
                    f"{stream} velocity are NaN or infinite"
                )
        return v_video, v_audio

    return checked
