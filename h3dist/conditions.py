"""What a clip is conditioned on, by sizes alone: keyframes and references as the model will hold them.

Enough to lay out the sequence, count its rows and bytes and draw its noise; the pixels and the sound themselves
stay on the rank that reads them. Standard library only.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from h3dist.geometry import (
    CHUNK_FRAMES,
    CHUNK_LATENTS,
    LATENT_PIXELS,
    PATCH,
    SAMPLES_PER_AUDIO_LATENT,
    SOUND_CHANNELS,
    TAIL_LATENTS,
)

KINDS = ("keyframe", "image", "video", "audio")  # the last three are references
VISUAL_TIME = 0.999  # the model's time of a visual condition, or the clip's own where that is later
AUDIO_TIME = 1.0  # and of a sound: clean
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Condition:
    """One keyframe or reference, fitted: `width` x `height` pixels and `frames` as the video VAE encodes them.

    frame: where in the clip a keyframe stands. samples: of one channel of its sound at 32 kHz, 0 without sound.
    shown: how many frames the text encoder chooses from, 0 for what it is not shown.
    """

    kind: str
    width: int = 0
    height: int = 0
    frames: int = 0
    samples: int = 0
    frame: int = 0
    shown: int = 0

    @property
    def latent_t(self) -> int:
        """Video latents along time: 1 for a still, 5k + 2 for 17k + 5 frames, 0 for sound alone."""
        if self.frames <= 1:
            return self.frames
        chunks = -(-self.frames // CHUNK_FRAMES)
        return CHUNK_LATENTS * chunks - (CHUNK_LATENTS - TAIL_LATENTS)

    @property
    def latent_h(self) -> int:
        """Video latents down the picture."""
        return self.height // LATENT_PIXELS

    @property
    def latent_w(self) -> int:
        """Video latents across the picture."""
        return self.width // LATENT_PIXELS

    @property
    def audio_latents(self) -> int:
        """Audio latents of one channel; the last may be partly silence."""
        return -(-self.samples // SAMPLES_PER_AUDIO_LATENT)

    @property
    def video_rows(self) -> int:
        """Transformer rows of its picture."""
        return self.latent_t * (self.latent_h // PATCH) * (self.latent_w // PATCH)

    @property
    def audio_rows(self) -> int:
        """Transformer rows of its sound: all latents of channel 0, then of channel 1."""
        return SOUND_CHANNELS * self.audio_latents


def as_told(condition: Condition, channels: int, audio_channels: int) -> dict[str, Any]:
    """A condition as JSON values, with the rows it gives and their bytes in float32."""
    shapes = kept_shapes([condition], channels, audio_channels)
    rows = {"video_rows": condition.video_rows, "audio_rows": condition.audio_rows}
    return {**asdict(condition), **rows, "bytes": FLOAT_BYTES * sum(prod(shape) for shape in shapes.values())}


def kept_shapes(conditions: Sequence[Condition], channels: int, audio_channels: int) -> dict[str, tuple[int, int]]:
    """Rows and their width, by kind, that conditions give together; a kind without rows is left out.

    `channels` are those of the video's latents: a row is a patch of 2 x 2 of them.
    """
    shapes = {
        "kept video": (sum(condition.video_rows for condition in conditions), channels * PATCH**2),
        "kept audio": (sum(condition.audio_rows for condition in conditions), audio_channels),
    }
    return {kind: shape for kind, shape in shapes.items() if shape[0]}
