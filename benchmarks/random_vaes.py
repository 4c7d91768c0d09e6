"""VAEs with random weights, of the released size or smaller: their values mean nothing, their work does."""

from typing import Any

import torch

from h3dist.vae import AudioVae, VideoVae
from h3dist.vae.audio import _decoder
from h3dist.vae.video import _build, _wanted
from h3dist.vae.weights import read_config

SMALL = {"decoder_num_layers": 1, "decoder_num_attention_heads": 4, "decoder_attention_head_dim": 64}
TINY = {"decoder_num_layers": 1, "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 16}


def video_settings(**changes: Any) -> dict[str, Any]:
    """The released configuration of the video VAE, with changes."""
    from diffusers import AutoencoderKLMiniMaxH3

    return read_config(None, AutoencoderKLMiniMaxH3) | changes


def random_video_vae(settings: dict[str, Any], device: torch.device) -> VideoVae:
    """The decoder of a video VAE; its norms keep sizes and every layer adds to the sum, so that errors show."""
    state = _noise(_build(settings, _wanted(False, True)), device)
    for name, tensor in state.items():
        if "norm" in name and name.endswith("weight"):
            tensor += 1
        if name.endswith(("scale1", "scale2")):
            tensor += 0.3
    return VideoVae.from_state(state, settings, device)


def random_audio_vae(device: torch.device) -> AudioVae:
    """The decoder of the audio VAE, of the released size."""
    from diffusers import AutoencoderKLMiniMaxH3Audio

    settings = read_config(None, AutoencoderKLMiniMaxH3Audio)
    with torch.device("meta"):
        parts = torch.nn.ModuleDict(_decoder(settings))
    return AudioVae.from_state(_noise(parts, device), settings, device)


def _noise(parts: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.empty(meta.shape, device=device).normal_(0, 0.02, generator=generator)
        for name, meta in parts.state_dict().items()
    }
