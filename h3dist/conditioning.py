"""Keyframes and references as the denoiser reads them: encoded by the VAEs, noised, as rows. Rank 0 alone.

Shape letters: n rows of pictures, m rows of sound, C latent channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from h3dist.checkpoint.comfy import Slots
from h3dist.config import ModelConfig
from h3dist.material import Material
from h3dist.packing import audio_to_rows, patchify
from h3dist.sampling.noise import blur, draw_conditions
from h3dist.vae import AudioVae, VideoVae
from h3dist.vae.encode import encode_frames

KEPT = ("kept video", "kept audio")  # the kinds of rows that conditions give


def encode_conditions(
    material: Sequence[Material], slots: Slots, model: ModelConfig, *, contract: str, seed: int, device: torch.device
) -> dict[str, Tensor]:
    """Rows f32 on the CPU by kind, in the order of the conditions: "kept video" [n, 4C], "kept audio" [m, C].

    A kind without rows is left out. Each VAE's encoder is read only where it is needed, and leaves again.
    """
    parts = {
        "kept video": _video_rows(material, slots, model, contract, seed, device),
        "kept audio": _audio_rows(material, slots, model, device),
    }
    return {kind: torch.cat(rows) for kind, rows in parts.items() if rows}


def _video_rows(
    material: Sequence[Material], slots: Slots, model: ModelConfig, contract: str, seed: int, device: torch.device
) -> list[Tensor]:
    seen = [item for item in material if item.frames is not None]
    if not seen:
        return []
    vae = VideoVae.load(slots.video_vae, model.video_vae_config, device, encoder=True, decoder=False)
    latents = [encode_frames(vae, item.frames[: item.condition.frames], contract) for item in seen]
    channels = latents[0].shape[1]
    noise = draw_conditions(contract, seed, [item.condition for item in seen], channels)
    return [blur(patchify(clean), noisy) for clean, noisy in zip(latents, noise, strict=True)]


def _audio_rows(material: Sequence[Material], slots: Slots, model: ModelConfig, device: torch.device) -> list[Tensor]:
    heard = [item.sound for item in material if item.sound is not None]
    if not heard:
        return []
    vae = AudioVae.load(slots.audio_vae, model.audio_vae_config, device, encoder=True)
    return [audio_to_rows(vae.encode(torch.from_numpy(sound))) for sound in heard]
