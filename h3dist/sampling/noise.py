"""The initial noise: drawn whole on the CPU from one seeded generator, whatever the ranks and devices."""

import torch

from h3dist.errors import ConfigError, nearest
from h3dist.geometry import Geometry
from h3dist.packing import rows_to_audio

CONTRACTS = ("comfy", "official")


def draw(
    contract: str, seed: int, geometry: Geometry, video_channels: int = 24, audio_channels: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard normal noise, float32 on the CPU: video [1, channels, T, h, w], audio [1, channels, 2, A].

    Both contracts draw the video first. "comfy" then draws the audio in its latent shape, "official"
    (diffusers) as rows [2A, channels]: the same numbers in other places. Raises ConfigError for other names.
    """
    check_contract(contract)
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (1, video_channels, geometry.latent_t, geometry.latent_h, geometry.latent_w)
    video = torch.randn(shape, generator=generator, dtype=torch.float32)
    if contract == "comfy":
        return video, torch.randn((1, audio_channels, 2, geometry.audio_latents), generator=generator)
    return video, rows_to_audio(torch.randn((geometry.audio_rows, audio_channels), generator=generator))


def check_contract(contract: str) -> None:
    """Raises ConfigError unless `contract` is "comfy" or "official"."""
    if contract not in CONTRACTS:
        choices = ", ".join(CONTRACTS)
        raise ConfigError(
            f"unknown noise contract {contract!r}: choose from {choices}{nearest(contract, CONTRACTS)}"
        )
