"""Keyframes and references as the denoiser reads them: encoded by the VAEs, noised, as rows. Rank 0 alone does it here.

Shape letters: n rows of pictures, m rows of sound, C latent channels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from h3dist.checkpoint.comfy import Slots
from h3dist.conditions import Condition
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
    seen = [item for item in material if item.frames is not None]
    heard = [item.sound for item in material if item.sound is not None]
    latents = _pictures(seen, slots, model, contract, device) if seen else []
    rows = video_rows(latents, [item.condition for item in seen], contract, seed)
    return by_kind(rows, audio_rows(_sounds(heard, slots, model, device) if heard else []))


def _pictures(
    seen: Sequence[Material], slots: Slots, model: ModelConfig, contract: str, device: torch.device
) -> list[Tensor]:
    vae = VideoVae.load(slots.video_vae, model.video_vae_config, device, encoder=True, decoder=False)
    return [encode_frames(vae, item.frames[: item.condition.frames], contract) for item in seen]


def _sounds(heard: Sequence[np.ndarray], slots: Slots, model: ModelConfig, device: torch.device) -> list[Tensor]:
    vae = AudioVae.load(slots.audio_vae, model.audio_vae_config, device, encoder=True)
    return [vae.encode(torch.from_numpy(sound)) for sound in heard]


def video_rows(latents: Sequence[Tensor], seen: Sequence[Condition], contract: str, seed: int) -> list[Tensor]:
    """The rows [n, 4C] of each condition's latents [1, C, t, h, w], noised as `contract` says."""
    if not latents:
        return []
    noise = draw_conditions(contract, seed, seen, latents[0].shape[1])
    return [blur(patchify(clean), noisy) for clean, noisy in zip(latents, noise, strict=True)]


def audio_rows(latents: Sequence[Tensor]) -> list[Tensor]:
    """The rows [m, C] of each sound's latents [1, C, 2, A]."""
    return [audio_to_rows(sound) for sound in latents]


def by_kind(video: Sequence[Tensor], audio: Sequence[Tensor]) -> dict[str, Tensor]:
    """All rows of each kind; a kind without rows is left out."""
    parts = dict(zip(KEPT, (video, audio), strict=True))
    return {kind: torch.cat(list(rows)) for kind, rows in parts.items() if rows}
