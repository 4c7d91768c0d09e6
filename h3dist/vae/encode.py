"""Frames to video latents: clips in time, tiles in space, and a choice of the posterior.

Letters: F frames, H W pixels of a picture; t h w latents; f y x a tile's. The cuts are those of decoding.
"""

import numpy as np
import torch
from torch import Tensor

from h3dist.errors import NumericsError
from h3dist.geometry import CHUNK_FRAMES, CHUNK_LATENTS, TAIL_LATENTS
from h3dist.tiles import Axis, cut_axis
from h3dist.vae.blend import stitch
from h3dist.vae.video import PIXEL_MEAN, PIXEL_STD, VideoVae

SAMPLE_SEED = 42  # of the official posterior sample, whatever the request's own seed
LOG_VARIANCE = (-30.0, 20.0)  # what the posterior's log variance is clamped to


@torch.no_grad()
def encode_frames(vae: VideoVae, frames: np.ndarray, contract: str) -> Tensor:
    """The denoiser's latents f32 [1, 24, t, h, w], on the CPU, of frames u8 [F, H, W, 3].

    One frame is one latent; 17k + 5 are 5k + 2. "comfy" takes the posterior's mean, "official" a sample of it
    under seed 42 that is rounded to float16. Raises NumericsError for NaN or infinity.
    """
    moments = torch.cat([encode_clip(vae, clip) for clip in _clips(frames)], dim=1)[None]  # [1, 48, t, h, w]
    if len(frames) > 1:
        moments = moments[:, :, : TAIL_LATENTS - CHUNK_LATENTS]
    if not torch.isfinite(moments).all():
        raise NumericsError("the video VAE gave NaN or infinity for a keyframe or a reference")
    mean, log_variance = moments.chunk(2, dim=1)
    latents = mean if contract == "comfy" else sample_posterior(mean, log_variance)
    return vae.statistics.normalise(latents.cpu())


def sample_posterior(mean: Tensor, log_variance: Tensor) -> Tensor:
    """mean + std * noise in float32, the noise from a CPU generator of seed 42, rounded to float16."""
    generator = torch.Generator("cpu").manual_seed(SAMPLE_SEED)
    noise = torch.randn(mean.shape, generator=generator).to(mean.device)
    std = torch.exp(0.5 * log_variance.clamp(*LOG_VARIANCE))
    return (mean + std * noise).to(torch.float16).float()


def _clips(frames: np.ndarray) -> list[np.ndarray]:
    """Clips of 17 frames, the last filled up with its last frame; a single frame is a clip by itself."""
    if len(frames) == 1:
        return [frames]
    indices = np.minimum(np.arange(-(-len(frames) // CHUNK_FRAMES) * CHUNK_FRAMES), len(frames) - 1)
    return [frames[part] for part in np.split(indices, len(indices) // CHUNK_FRAMES)]


def encode_clip(vae: VideoVae, frames: np.ndarray) -> Tensor:
    """Moments f32 [48, t, h, w] of one clip u8 [f, H, W, 3], its tiles faded into each other."""
    pixels = to_pixels(frames, vae.device)
    rows, cols = cut_axis(pixels.shape[-2]), cut_axis(pixels.shape[-1])
    tiles = (vae.encode_job(_tile(pixels, rows, row, cols, col))[0] for row, col in _places(rows, cols))
    return stitch(tiles, rows.in_latents(), cols.in_latents())


def to_pixels(frames: np.ndarray, device: torch.device) -> Tensor:
    """ImageNet-normalised float32 [1, 3, f, H, W] from levels u8 [f, H, W, 3]."""
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).to(device).permute(3, 0, 1, 2)[None]
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    return (pixels.to(torch.float32).div(255) - mean) / std


def _places(rows: Axis, cols: Axis) -> list[tuple[int, int]]:
    return [(row, col) for row in range(len(rows.starts)) for col in range(len(cols.starts))]


def _tile(pixels: Tensor, rows: Axis, row: int, cols: Axis, col: int) -> Tensor:
    top, left = rows.starts[row], cols.starts[col]
    return pixels[..., top : top + rows.size, left : left + cols.size]
