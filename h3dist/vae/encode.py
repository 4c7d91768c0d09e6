"""Frames to video latents: clips in time, tiles in space, and a choice of the posterior.

Letters: F frames, H W pixels of a picture; t h w latents; f y x a tile's. The cuts are those of decoding.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from h3dist.errors import NumericsError
from h3dist.geometry import CHUNK_FRAMES, CHUNK_LATENTS, TAIL_LATENTS
from h3dist.tiles import cut_axis
from h3dist.vae.blend import stitch
from h3dist.vae.frames import PIXEL_MEAN, PIXEL_STD
from h3dist.vae.video import VideoVae
from h3dist.vae.weights import Statistics

SAMPLE_SEED = 42  # of the official posterior sample, whatever the request's own seed
LOG_VARIANCE = (-30.0, 20.0)  # what the posterior's log variance is clamped to


@torch.no_grad()
def encode_frames(vae: VideoVae, frames: np.ndarray, contract: str) -> Tensor:
    """The denoiser's latents f32 [1, 24, t, h, w], on the CPU, of frames u8 [F, H, W, 3].

    One frame is one latent; 17k + 5 are 5k + 2. "comfy" takes the posterior's mean, "official" a sample of it
    under seed 42 that is rounded to float16. Raises NumericsError for NaN or infinity.
    """
    return choose_latents([encode_clip(vae, clip) for clip in clips_of(frames)], contract, vae.statistics)


def choose_latents(clips: Sequence[Tensor], contract: str, statistics: Statistics) -> Tensor:
    """The same from the moments f32 [48, t, h, w] of all clips."""
    moments = torch.cat(list(clips), dim=1)[None]  # [1, 48, t, h, w]
    if moments.shape[2] > 1:  # no still
        moments = moments[:, :, : TAIL_LATENTS - CHUNK_LATENTS]
    if not torch.isfinite(moments).all():
        raise NumericsError("the video VAE gave NaN or infinity for a keyframe or a reference")
    mean, log_variance = moments.chunk(2, dim=1)
    latents = mean if contract == "comfy" else sample_posterior(mean, log_variance)
    return statistics.normalise(latents.cpu())


def sample_posterior(mean: Tensor, log_variance: Tensor) -> Tensor:
    """mean + std * noise in float32, the noise from a CPU generator of seed 42, rounded to float16."""
    generator = torch.Generator("cpu").manual_seed(SAMPLE_SEED)
    noise = torch.randn(mean.shape, generator=generator).to(mean.device)
    std = torch.exp(0.5 * log_variance.clamp(*LOG_VARIANCE))
    return (mean + std * noise).to(torch.float16).float()


def clips_of(frames: np.ndarray) -> list[np.ndarray]:
    """Clips of 17 frames, the last filled up with its last frame; a single frame is a clip by itself."""
    if len(frames) == 1:
        return [frames]
    indices = np.minimum(np.arange(-(-len(frames) // CHUNK_FRAMES) * CHUNK_FRAMES), len(frames) - 1)
    return [frames[part] for part in np.split(indices, len(indices) // CHUNK_FRAMES)]


def encode_clip(vae: VideoVae, frames: np.ndarray) -> Tensor:
    """Moments f32 [48, t, h, w] of one clip u8 [f, H, W, 3], its tiles faded into each other."""
    rows, cols = cut_axis(frames.shape[1]), cut_axis(frames.shape[2])
    corners = ((top, left) for top in rows.starts for left in cols.starts)
    tiles = (encode_tile(vae, cut_tile(frames, corner, (rows.size, cols.size))) for corner in corners)
    return stitch(tiles, rows.in_latents(), cols.in_latents())


def cut_tile(frames: np.ndarray, corner: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Levels u8 [f, y, x, 3] of one tile of a clip [f, H, W, 3], by its upper left corner, in memory of its own."""
    (top, left), (height, width) = corner, size
    return torch.from_numpy(np.ascontiguousarray(frames[:, top : top + height, left : left + width]))


def encode_tile(vae: VideoVae, levels: Tensor) -> Tensor:
    """Moments f32 [48, t, y/16, x/16] of one tile's levels u8 [f, y, x, 3]."""
    return vae.encode_job(to_pixels(levels, vae.device))[0]


def to_pixels(levels: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """ImageNet-normalised float32 [1, 3, f, H, W] from levels u8 [f, H, W, 3]."""
    pixels = torch.as_tensor(levels).to(device).permute(3, 0, 1, 2)[None]
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    return (pixels.to(torch.float32).div(255) - mean) / std
