"""What the stages of a run hand to each other, each frozen: Started, Prepared, Packed, Denoised.

Shape letters: L text rows, t text encoder width, C hidden, T h w latent frames, height and width, A audio latents
a channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from h3dist.attention.backend import Backend
from h3dist.checkpoint.comfy import DenoiserFile, Slots, StateFile
from h3dist.decoding import Vaes
from h3dist.model.elementwise import Elementwise
from h3dist.model.modulation import Modulation
from h3dist.model.weights import DenoiserWeights
from h3dist.packing import Packing
from h3dist.plan import Plan
from h3dist.request import Resolved
from h3dist.sampling.schedules import Schedule
from h3dist.text.presentation import Presentation


@dataclass(frozen=True)
class Started:
    """What all ranks agreed on before any work. `slots`, the opened files, are rank 0's alone; `text`, the text
    encoder's file, and `vaes` are rank 0's, or everybody's where all encode or decode."""

    dfile: DenoiserFile
    slots: Slots | None
    text: StateFile | None
    vaes: Vaes | None
    resolved: Resolved
    presentation: Presentation
    plan: Plan  # its conditions are the request's keyframes and references, by size
    schedule: Schedule


@dataclass(frozen=True)
class Prepared:
    """states_Lt f32 [L, t] on rank 0 alone; on all rows_LC, the refined text rows, `kept`, the rows of the
    conditions f32 by kind, this rank's weights, and the ways to compute that were agreed on."""

    started: Started
    states_Lt: Tensor | None
    rows_LC: Tensor
    kept: Mapping[str, Tensor]
    weights: DenoiserWeights
    modulation: Modulation
    attention: Backend
    elementwise: Elementwise


@dataclass(frozen=True)
class Packed:
    """The packed sequence and the noise of video [1, 24, T, h, w] and audio [1, 32, 2, A], f32."""

    prepared: Prepared
    packing: Packing
    video: Tensor
    audio: Tensor


@dataclass(frozen=True)
class Denoised:
    """The clean latents, equal on every rank; `trace` has both after every step, on rank 0, if asked for.

    `attention`: what was found out about the backend.
    """

    packed: Packed
    video: Tensor
    audio: Tensor
    trace: Mapping[str, Tensor]
    step_seconds: tuple[float, ...]
    attention: Mapping[str, Any]
