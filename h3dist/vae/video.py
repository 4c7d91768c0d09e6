"""The video VAE: latents to frames in diffusers' modules, with our own driver of chunks and tiles.

Decoding is three steps that can live on different ranks: cut (`h3dist.tiles`), decode jobs, one or a fixed number
a call (`decode_jobs`, the only step that needs weights), blend the results in serial order (`frames.finish`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from h3dist.errors import ConfigError, NumericsError, RequestError
from h3dist.geometry import CHUNK_FRAMES, CHUNK_LATENTS, LATENT_PIXELS, TAIL_LATENTS, VIDEO_CHANNELS
from h3dist.tiles import HEAD, RAW_FRAMES, TAIL, Job, cut_video
from h3dist.vae import released
from h3dist.vae.exact import exact_convolutions
from h3dist.vae.fast import FastDecoder
from h3dist.vae.frames import finish
from h3dist.vae.weights import Statistics, fill, keep_float32, read_config, read_statistics, stored_statistics

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import StateFile


@dataclass(frozen=True)
class VideoVae:
    """The video VAE on one device: float16 autocast on CUDA, float32 on the CPU."""

    parts: nn.ModuleDict  # post_quant_conv and decoder, quant_conv and encoder: the halves that were asked for
    statistics: Statistics
    device: torch.device
    fast: FastDecoder | None = None  # in the place of the decoder's own forward, if asked for

    @classmethod
    def load(
        cls,
        state_file: "StateFile",
        config: str | Path | None,
        device: torch.device | str,
        *,
        encoder: bool = False,
        decoder: bool = True,
        fast: bool = False,
        gemm: str = "exact",
    ) -> "VideoVae":
        """Read a Comfy-format video VAE; `config` is a diffusers JSON, None the released size.

        Only the weights of the halves that are asked for are read; `fast` is how the decoder computes, and `gemm` how
        a fast one multiplies, exact or fp8. Raises CheckpointError or ConfigError where file and configuration do not
        fit each other, MissingDependency where `fast` lacks a package.
        """
        from diffusers import AutoencoderKLMiniMaxH3

        from h3dist.checkpoint.vae_names import video_state

        settings = read_config(config, AutoencoderKLMiniMaxH3)
        wanted = _wanted(encoder, decoder)
        kept = {name: spec for name, spec in state_file.table.items() if name.split(".", 1)[0] in wanted}
        state = video_state(replace(state_file, table=kept), settings["decoder_attention_head_dim"])
        state |= stored_statistics(state_file)
        source = str(state_file.file.path)
        halves = {"encoder": encoder, "decoder": decoder}
        return cls.from_state(state, settings, device, **halves, fast=fast, gemm=gemm, source=source)

    @classmethod
    def from_state(
        cls,
        state: dict[str, torch.Tensor],
        settings: dict[str, Any],
        device: torch.device | str,
        *,
        encoder: bool = False,
        decoder: bool = True,
        fast: bool = False,
        gemm: str = "exact",
        source: str = "video VAE",
    ) -> "VideoVae":
        """The same from tensors under diffusers' names and from `read_config`; errors call it `source`."""
        device = torch.device(device)
        _check_geometry(settings)
        parts = _build(settings, _wanted(encoder, decoder))
        dtype = _half_dtype if device.type == "cuda" else keep_float32
        fill(parts, state, device=device, dtype=dtype, source=source)
        statistics = read_statistics(state, settings, released.VIDEO, source=source, device=device)
        parts = parts.to(device)
        decoded = FastDecoder.of(parts, device, gemm, taken=gemm != "exact") if fast else None
        return cls(parts, statistics, device, decoded)

    def decode(self, latents: torch.Tensor, batch: int = 1) -> Iterator[torch.Tensor]:
        """Frames uint8 [f, H, W, 3] on the CPU, 17 at a time and last 22, from latents [1, 24, T, h, w].

        `batch`: tiles of a call. Raises RequestError at once where T is not 5k + 2, NumericsError (at once, or at the
        chunk) for NaN or infinity.
        """
        check_latents(latents)
        restored, cuts = self.statistics.restore(latents), cut_video(*latents.shape[2:])
        tiles = (tile for jobs in cuts.calls(batch) for tile in self.decode_jobs(restored, jobs, batch))
        return finish(tiles, cuts, ahead=self.device.type == "cuda")

    def decode_job(self, latents: torch.Tensor, job: Job) -> torch.Tensor:
        """One tile of one chunk, as `decode_jobs`."""
        return self.decode_jobs(latents, [job], 1)[0]

    @torch.no_grad()
    def decode_jobs(self, latents: torch.Tensor, jobs: Sequence[Job], batch: int) -> tuple[torch.Tensor, ...]:
        """Tiles, each raw [3, 22, y, x] of `tile_dtype`, from the restored latents [1, 24, T, h, w], in one call.

        Fewer than `batch` are filled up with the last one, so that every call is of one size. Frames are the chunk's
        17 and the 5 of its tail; the others of the decoder's 28 are never used.
        """
        filled = [*jobs, *[jobs[-1]] * (batch - len(jobs))]
        tiles = torch.cat([under(latents, job) for job in filled])
        return (self.fast or self._by_modules)(tiles)[: len(jobs)].unbind(0)

    def _by_modules(self, tiles: torch.Tensor) -> torch.Tensor:
        """Raw frames [B, 3, 22, Y, X] of tiles [B, 24, 7, y, x]."""
        first = self.parts["post_quant_conv"]
        with self._autocast():
            raw = self.parts["decoder"](first(tiles.to(first.weight.dtype)))
        return torch.cat([raw[:, :, HEAD], raw[:, :, TAIL]], dim=2)

    @torch.no_grad()
    def encode_job(self, pixels: torch.Tensor) -> torch.Tensor:
        """Moments (mean, log variance) f32 [1, 48, t, y/16, x/16] of one normalised tile [1, 3, f, y, x]."""
        with exact_convolutions():
            return self.parts["quant_conv"](self.parts["encoder"](pixels.to(self.device, torch.float32)))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.float16, enabled=self.device.type == "cuda")


def under(latents: torch.Tensor, job: Job) -> torch.Tensor:
    """The latents [1, 24, 7, y, x] that a tile is made of; by slices, since places in a list would be copied to a GPU,
    which waits for all that it has to do."""
    begin, end = job.latents[0], job.latents[-1] + 1
    tile = latents[:, :, begin:end, slice(*job.rows), slice(*job.cols)]
    again = len(job.latents) - tile.shape[2]  # the last one, where the video has no more
    return torch.cat([tile, *[tile[:, :, -1:]] * again], dim=2) if again else tile


def check_latents(latents: torch.Tensor) -> None:
    """Refuse what is not the denoiser's [1, 24, T, h, w]: RequestError for the shape, NumericsError for NaN."""
    if latents.ndim != 5 or latents.shape[:2] != (1, VIDEO_CHANNELS):
        raise RequestError(f"video latents must be [1, {VIDEO_CHANNELS}, T, h, w], these are {list(latents.shape)}")
    if not torch.isfinite(latents).all():
        raise NumericsError("the video latents hold NaN or infinity before they are decoded")


def tile_dtype(device: torch.device) -> torch.dtype:
    """What a decoder on `device` gives."""
    return torch.float16 if device.type == "cuda" else torch.float32


def _check_geometry(settings: dict[str, Any]) -> None:
    """Chunks, tiles and frame counts are those of the released VAE; only widths may differ."""
    found = (
        settings["clip_length"],
        settings["token_drop"],
        math.prod(settings["spatial_downsample_factors"]),
        math.prod(settings["temporal_downsample_factors"]),
    )
    wanted = (CHUNK_FRAMES, CHUNK_LATENTS - TAIL_LATENTS, LATENT_PIXELS, RAW_FRAMES)
    if found != wanted:
        raise ConfigError(
            f"this video VAE has clip_length, token_drop and compression in space and time {found}; only "
            f"{wanted} can be decoded"
        )


def _wanted(encoder: bool, decoder: bool) -> tuple[str, ...]:
    return ("post_quant_conv", "decoder") * decoder + ("quant_conv", "encoder") * encoder


def _build(settings: dict[str, Any], wanted: tuple[str, ...]) -> nn.ModuleDict:
    """diffusers' modules without their weights (on the meta device); only the rotary frequencies are real."""
    channels = settings["latent_channels"]
    makers = {
        "post_quant_conv": lambda: nn.Conv3d(channels, channels, kernel_size=1),
        "decoder": lambda: _build_decoder(settings),
        "quant_conv": lambda: nn.Conv3d(2 * channels, 2 * channels, kernel_size=1),
        "encoder": lambda: _build_encoder(settings),
    }
    with torch.device("meta"):
        return nn.ModuleDict({name: makers[name]() for name in wanted})


def _build_decoder(settings: dict[str, Any]) -> nn.Module:
    from diffusers.models.autoencoders import autoencoder_kl_minimax_h3 as h3

    head_dim = settings["decoder_attention_head_dim"]
    decoder = h3.MiniMaxH3VideoViTDecoder3d(
        in_channels=settings["latent_channels"],
        out_channels=settings["out_channels"],
        patch_size=LATENT_PIXELS,
        patch_size_t=RAW_FRAMES,
        num_layers=settings["decoder_num_layers"],
        num_attention_heads=settings["decoder_num_attention_heads"],
        attention_head_dim=head_dim,
        num_register_tokens=settings["decoder_num_register_tokens"],
        ffn_mult=settings["decoder_ffn_mult"],
        rope_theta=settings["decoder_rope_theta"],
        rope_dim_ratio=settings["decoder_rope_dim_ratio"],
        norm_eps=settings["decoder_norm_eps"],
    )
    rotary_width = int(head_dim * settings["decoder_rope_dim_ratio"])
    with torch.device("cpu"):  # its frequencies are in no file
        decoder.rope = h3.MiniMaxH3VideoRotaryPosEmbed(rotary_width, theta=settings["decoder_rope_theta"])
    return decoder


def _build_encoder(settings: dict[str, Any]) -> nn.Module:
    from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import MiniMaxH3VideoEncoder3d

    same = (
        "in_channels",
        "block_out_channels",
        "layers_per_block",
        "spatial_downsample_factors",
        "temporal_downsample_factors",
        "norm_num_groups",
        "norm_eps",
        "spatial_padding_mode",
    )
    return MiniMaxH3VideoEncoder3d(
        out_channels=2 * settings["latent_channels"], **{name: settings[name] for name in same}
    )


def _half_dtype(name: str) -> torch.dtype:
    """float16 for the decoder's linears and input convolution; norms, scales, the encoder stay float32."""
    kept = name.startswith(("encoder.", "quant_conv.")) or "norm" in name or "scale" in name
    return torch.float32 if kept else torch.float16
