"""The initial noise: drawn whole on the CPU from one seeded generator, whatever the ranks and devices."""

from collections.abc import Sequence

import torch

from h3dist.conditions import VISUAL_TIME, Condition
from h3dist.errors import ConfigError, nearest
from h3dist.geometry import PATCH, Geometry
from h3dist.packing import patchify, rows_to_audio

CONTRACTS = ("comfy", "official")


def draw(
    contract: str,
    seed: int,
    geometry: Geometry,
    video_channels: int = 24,
    audio_channels: int = 32,
    conditions: Sequence[Condition] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard normal noise, float32 on the CPU: video [1, channels, T, h, w], audio [1, channels, 2, A].

    Both contracts draw the video first. "comfy" then draws the audio in its latent shape, "official"
    (diffusers) as rows [2A, channels]: the same numbers in other places. "official" draws the noise of
    `conditions` before them, from the same generator. Raises ConfigError for other names.
    """
    check_contract(contract)
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (1, video_channels, geometry.latent_t, geometry.latent_h, geometry.latent_w)
    if contract == "official":
        _official_condition_noise(generator, conditions, video_channels)
    video = torch.randn(shape, generator=generator, dtype=torch.float32)
    if contract == "comfy":
        return video, torch.randn((1, audio_channels, 2, geometry.audio_latents), generator=generator)
    return video, rows_to_audio(torch.randn((geometry.audio_rows, audio_channels), generator=generator))


def draw_conditions(
    contract: str, seed: int, conditions: Sequence[Condition], video_channels: int = 24
) -> list[torch.Tensor]:
    """The noise of every condition that has a picture, in their order: rows f32 [n, 4 channels] on the CPU.

    "official": one generator for all of a request's noise, conditions first, drawn in latent shape; no two share
    noise. "comfy": the generator starts again for each, and draws rows. Raises ConfigError for other names.
    """
    check_contract(contract)
    if contract == "official":
        return _official_condition_noise(torch.Generator("cpu").manual_seed(seed), conditions, video_channels)
    shapes = [(condition.video_rows, video_channels * PATCH**2) for condition in conditions if condition.latent_t]
    return [torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)) for shape in shapes]


def _official_condition_noise(
    generator: torch.Generator, conditions: Sequence[Condition], channels: int
) -> list[torch.Tensor]:
    shapes = [(1, channels, c.latent_t, c.latent_h, c.latent_w) for c in conditions if c.latent_t]
    return [patchify(torch.randn(shape, generator=generator)) for shape in shapes]


def blur(rows: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A visual condition's rows as the model was trained to see them: 0.999 rows + 0.001 noise, float32."""
    keep = torch.tensor(VISUAL_TIME, dtype=torch.float32)
    return keep * rows + (1 - keep) * noise


def check_contract(contract: str) -> None:
    """Raises ConfigError unless `contract` is "comfy" or "official"."""
    if contract not in CONTRACTS:
        choices = ", ".join(CONTRACTS)
        raise ConfigError(f"unknown noise contract {contract!r}: choose from {choices}{nearest(contract, CONTRACTS)}")
