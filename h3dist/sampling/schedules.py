"""Noise levels (sigmas) of a run and the times the model is told, in float32 arithmetic without torch.

Sigma 1 is pure noise, 0 is clean; the model's time is t = 1 - sigma. A grid of n evaluations has n + 1
sigmas and ends at 0. Every value is a float32 number held in a Python float, so that a schedule hashes,
prints and compares exactly.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from h3dist.errors import ConfigError, nearest

VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
BETA_A = BETA_B = 0.6
TABLE_SIZE = 1000
SMALLEST_MODEL_SIGMA = 1e-6
NAMES = ("simple", "beta", "official")
Level = TypeVar("Level", float, np.ndarray)


@dataclass(frozen=True)
class Schedule:
    """Both streams' sigmas [n+1] and model times [n], and `gain` = video shift / audio shift."""

    video_sigmas: tuple[float, ...]
    audio_sigmas: tuple[float, ...]
    times_v: tuple[float, ...]
    times_a: tuple[float, ...]
    gain: float

    @property
    def evaluations(self) -> int:
        """How often the model runs."""
        return len(self.times_v)


def simple(steps: int, shift: float) -> tuple[float, ...]:
    """The n + 1 sigmas of the schedule "simple": table entries at equal index distances, cut down, then 0."""
    j = np.arange(steps)
    return _ending_at_zero(_table(shift)[TABLE_SIZE - 1 - j * TABLE_SIZE // steps])


def beta(steps: int, shift: float, a: float = BETA_A, b: float = BETA_B) -> tuple[float, ...]:
    """The sigmas of the schedule "beta": table entries at quantiles of the beta distribution, then 0.

    Indices are rounded half to even; one that repeats its predecessor is dropped, so that a large `steps`
    (from 139 with a = b = 0.6) gives fewer than steps + 1 sigmas.
    """
    from scipy.special import betaincinv  # the beta quantile; scipy.stats would take a second to import

    quantiles = betaincinv(a, b, 1 - np.arange(steps) / steps)
    index = np.rint(quantiles * (TABLE_SIZE - 1)).astype(int)
    return _ending_at_zero(_table(shift)[_without_repeats(index)])


def official(steps: int, shift: float) -> tuple[float, ...]:
    """The n + 1 sigmas of MiniMax's own grid: n + 1 equal parts of [1, 0], shifted, repeats dropped.

    `steps` counts model evaluations; diffusers' `num_inference_steps` counts the grid points and is one more.
    """
    return tuple(_without_repeats(_shifted(_linspace_down(steps), shift)).tolist())


def sigmas(
    schedule: str, steps: int, shift: float = VIDEO_SHIFT, *, beta_a: float = BETA_A, beta_b: float = BETA_B
) -> tuple[float, ...]:
    """One stream's sigmas on the named schedule. Raises ConfigError for an unknown name or a shift <= 0."""
    if schedule not in NAMES:
        choices = ", ".join(NAMES)
        raise ConfigError(f"unknown schedule {schedule!r}: choose from {choices}{nearest(schedule, NAMES)}")
    if not shift > 0:
        released = f"the released model has {VIDEO_SHIFT} for video, {AUDIO_SHIFT} for audio"
        raise ConfigError(f"a sigma shift must be above 0, got {shift}; {released}")
    if schedule == "beta":
        return beta(steps, shift, beta_a, beta_b)
    return simple(steps, shift) if schedule == "simple" else official(steps, shift)


def evaluations(
    schedule: str,
    steps: int,
    *,
    video_shift: float = VIDEO_SHIFT,
    beta_a: float = BETA_A,
    beta_b: float = BETA_B,
) -> int:
    """How many model evaluations `steps` gives on this schedule ("beta" may drop repeats). Loads no torch."""
    return len(sigmas(schedule, steps, video_shift, beta_a=beta_a, beta_b=beta_b)) - 1


def make_schedule(
    schedule: str,
    steps: int,
    *,
    video_shift: float = VIDEO_SHIFT,
    audio_shift: float = AUDIO_SHIFT,
    beta_a: float = BETA_A,
    beta_b: float = BETA_B,
) -> Schedule:
    """Both streams' sigmas and model times.

    "official" shifts one base grid twice, and t = 1 - sigma on each (diffusers' MiniMaxH3Scheduler).
    "simple" and "beta" give the video's sigmas; the audio's follow from the same base noise level (the Comfy
    convention for H3). Raises ConfigError as `sigmas` does, or where the shifts give grids of unlike length.
    """
    video = sigmas(schedule, steps, video_shift, beta_a=beta_a, beta_b=beta_b)
    if schedule == "official":
        audio = sigmas(schedule, steps, audio_shift)
        if len(audio) != len(video):
            raise ConfigError(
                f"of {steps} steps, shifts {video_shift} and {audio_shift} leave {len(video) - 1} and "
                f"{len(audio) - 1} distinct ones; choose smaller shifts or fewer steps"
            )
        return Schedule(video, audio, _times(video[:-1]), _times(audio[:-1]), video_shift / audio_shift)
    seen = _model_sigmas(video[:-1])
    heard = tuple(audio_sigma(sigma, video_shift, audio_shift) for sigma in seen)
    return Schedule(video, (*heard, 0.0), _times(seen), _times(heard), video_shift / audio_shift)


def audio_sigma(sigma: float, video_shift: float, audio_shift: float) -> float:
    """The audio's noise level where the video's is `sigma`: the video's shift undone, the audio's applied."""
    base = sigma / (video_shift + sigma * (1 - video_shift))
    return float(np.float32(_shifted(base, audio_shift)))


def _shifted(base: Level, shift: float) -> Level:
    """The exponential shift s·b / (1 + (s − 1)·b) of a base noise level b."""
    return shift * base / (1 + (shift - 1) * base)


def _table(shift: float) -> np.ndarray:
    """The 1000 shifted sigmas of base levels 1/1000 .. 1, float32."""
    base = np.arange(1, TABLE_SIZE + 1, dtype=np.float32) / np.float32(TABLE_SIZE)
    return _shifted(base, shift)


def _linspace_down(steps: int) -> np.ndarray:
    """What `torch.linspace(1, 0, steps + 1)` gives in float32: a rounded step counted from the nearer end."""
    i = np.arange(steps + 1)
    step = float(np.float32(1) / np.float32(steps))
    return np.where(i < (steps + 1) // 2, 1 - step * i, step * (steps - i)).astype(np.float32)


def _without_repeats(values: np.ndarray) -> np.ndarray:
    """`values` without those that equal their predecessor."""
    return values[np.concatenate([[True], values[1:] != values[:-1]])]


def _ending_at_zero(values: np.ndarray) -> tuple[float, ...]:
    return (*values.tolist(), 0.0)


def _model_sigmas(values: tuple[float, ...]) -> tuple[float, ...]:
    """The sigmas the model sees: they travel as float32(1000·sigma), are divided by 1000 and kept off 0."""
    travelled = np.array(values, dtype=np.float32) * np.float32(1000) / np.float32(1000)
    return tuple(np.maximum(travelled, np.float32(SMALLEST_MODEL_SIGMA)).tolist())


def _times(values: tuple[float, ...]) -> tuple[float, ...]:
    """t = 1 − sigma, in float32."""
    return tuple((np.float32(1) - np.array(values, dtype=np.float32)).tolist())
