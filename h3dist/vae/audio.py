"""The audio VAE: latents to a stereo waveform and back, in diffusers' modules. Always float32."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from h3dist.errors import ConfigError, NumericsError, RequestError
from h3dist.geometry import AUDIO_RATE, SAMPLES_PER_AUDIO_LATENT, SOUND_CHANNELS
from h3dist.vae import released
from h3dist.vae.exact import exact_convolutions
from h3dist.vae.weights import Statistics, fill, keep_float32, read_config, read_statistics, stored_statistics

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import StateFile


@dataclass(frozen=True)
class AudioVae:
    """The audio VAE on one device."""

    parts: nn.ModuleDict  # dec_in_proj and decoder; or encoder, pre_block and mean_proj
    statistics: Statistics
    device: torch.device

    @classmethod
    def load(
        cls, state_file: "StateFile", config: str | Path | None, device: torch.device | str, *, encoder: bool = False
    ) -> "AudioVae":
        """Read a Comfy-format audio VAE; `config` is a diffusers JSON, None the released size.

        It decodes; with `encoder` it encodes instead. Raises CheckpointError or ConfigError where file and
        configuration do not fit each other.
        """
        from diffusers import AutoencoderKLMiniMaxH3Audio

        from h3dist.checkpoint.vae_names import audio_state

        settings = read_config(config, AutoencoderKLMiniMaxH3Audio)
        state = audio_state(state_file) | stored_statistics(state_file)
        return cls.from_state(state, settings, device, encoder=encoder, source=str(state_file.file.path))

    @classmethod
    def from_state(
        cls,
        state: dict[str, torch.Tensor],
        settings: dict[str, Any],
        device: torch.device | str,
        *,
        encoder: bool = False,
        source: str = "audio VAE",
    ) -> "AudioVae":
        """The same from tensors under diffusers' names and from `read_config`; errors call it `source`."""
        device = torch.device(device)
        _check_rate(settings)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the modules use torch's older weight norm
            parts = nn.ModuleDict(_encoder(settings) if encoder else _decoder(settings))
        fill(parts, state, device=device, dtype=keep_float32, source=source)
        statistics = read_statistics(state, settings, released.AUDIO, source=source, device=device)
        return cls(parts, statistics, device)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Sound float32 [2, 800 A] in [-1, 1] on the CPU, uncut, from latents [1, 32, 2, A].

        Raises RequestError for another shape, NumericsError for NaN or infinity before or after decoding.
        """
        channels = len(self.statistics.mean)
        if latents.ndim != 4 or latents.shape[:3] != (1, channels, SOUND_CHANNELS):
            wanted = f"[1, {channels}, {SOUND_CHANNELS}, A]"
            raise RequestError(f"audio latents must be {wanted}, these are {list(latents.shape)}")
        if not torch.isfinite(latents).all():
            raise NumericsError("the audio latents hold NaN or infinity before they are decoded")
        mono = self.statistics.restore(latents[0].transpose(0, 1))  # [2, 32, A]: each channel alone
        with exact_convolutions():
            sound = self.parts["decoder"](self.parts["dec_in_proj"](mono)).squeeze(1)  # [2, 800 A]
        if not torch.isfinite(sound).all():
            raise NumericsError("the audio VAE gave NaN or infinity")
        return sound.cpu()

    @torch.no_grad()
    def encode(self, sound: torch.Tensor) -> torch.Tensor:
        """The denoiser's latents f32 [1, 32, 2, A], on the CPU, of stereo sound f32 [2, N] at 32 kHz.

        A is N / 800 rounded up: the last latent hears silence after the end. Each channel is coded alone, and
        the posterior's mean is taken (both contracts). Raises NumericsError for NaN or infinity.
        """
        missing = -sound.shape[1] % SAMPLES_PER_AUDIO_LATENT
        mono = nn.functional.pad(sound.to(self.device, torch.float32), (0, missing))[:, None]  # [2, 1, 800 A]
        with exact_convolutions():
            trunk = self.parts["encoder"](mono).transpose(1, 2)
            mean = self.parts["mean_proj"](self.parts["pre_block"](trunk).transpose(1, 2))  # [2, 32, A]
        if not torch.isfinite(mean).all():
            raise NumericsError("the audio VAE gave NaN or infinity for the sound of a keyframe or a reference")
        return self.statistics.normalise(mean.cpu()).transpose(0, 1)[None].contiguous()


def _check_rate(settings: dict[str, Any]) -> None:
    found = settings["sampling_rate"], math.prod(settings["decoder_rates"])
    if found != (AUDIO_RATE, SAMPLES_PER_AUDIO_LATENT):
        raise ConfigError(
            f"this audio VAE has {found[0]} samples a second and {found[1]} a latent; only {AUDIO_RATE} and "
            f"{SAMPLES_PER_AUDIO_LATENT} can be decoded"
        )


def _decoder(settings: dict[str, Any]) -> dict[str, nn.Module]:
    """diffusers' modules of the decoding half."""
    from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import MiniMaxH3AudioBigVGANDecoder

    decoder = MiniMaxH3AudioBigVGANDecoder(
        in_channels=settings["latent_dim"],
        upsample_initial_channel=settings["decoder_dim"],
        upsample_rates=settings["decoder_rates"],
        upsample_kernel_sizes=settings["decoder_kernel_sizes"],
        resblock_kernel_sizes=settings["resblock_kernel_sizes"],
        resblock_dilation_sizes=settings["resblock_dilation_sizes"],
    )
    into = nn.Conv1d(settings["latent_channels"], settings["latent_dim"], kernel_size=1)
    return {"dec_in_proj": into, "decoder": decoder}


def _encoder(settings: dict[str, Any]) -> dict[str, nn.Module]:
    """diffusers' modules of the encoding half, less the log variance that nobody reads."""
    from diffusers.models.autoencoders import autoencoder_kl_minimax_h3_audio as h3

    trunk, channels = settings["latent_dim"], settings["latent_channels"]
    strides = tuple(settings["encoder_rates"])
    return {
        "encoder": h3.MiniMaxH3AudioEncoder(d_model=settings["encoder_dim"], strides=strides, d_latent=trunk),
        "pre_block": h3.MiniMaxH3AudioAttnProjection(trunk, channels, num_heads=settings["num_attention_heads"]),
        "mean_proj": nn.Conv1d(channels, channels, kernel_size=1),
    }
