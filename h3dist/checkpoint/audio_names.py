"""The audio VAE's file: its sizes, and every tensor that it must hold. Names without the file's prefix.

Names are those of the original modules, with each pair of a normalised weight's magnitude and direction
folded into one `weight` (Comfy checkpoint format). Kernel sizes and strides are the released ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3dist.checkpoint.file import TensorInfo
from h3dist.checkpoint.shapes import Shapes
from h3dist.checkpoint.storage import Spec

IGNORABLE = re.compile(r"(?!)")  # nothing
ENCODER_STRIDES = (2, 4, 4, 5, 5)
UP_KERNELS = (9, 9, 4, 4, 4, 4, 4)
RES_KERNELS = (3, 7, 11)
DILATIONS = 3  # of each residual block
FILTER_TAPS = 12  # of the anti-aliasing filters around each activation


@dataclass(frozen=True)
class AudioDims:
    """Sizes of the audio VAE: first encoder width, trunk width, latent channels, first decoder width."""

    encoder: int
    trunk: int
    latent: int
    decoder: int


RELEASED = AudioDims(encoder=64, trunk=2048, latent=32, decoder=1024)


def audio_dims(path: Path, tensors: Mapping[str, TensorInfo]) -> AudioDims:
    """The sizes of an audio VAE whose tensors these are. Raises CheckpointError."""
    shapes = Shapes(path, tensors)
    return AudioDims(
        encoder=shapes.rows("encoder.block.0.bias"),
        trunk=shapes.rows("pre_block.attn.zero_k_bias"),
        latent=shapes.rows("mean_proj.bias"),
        decoder=shapes.rows("decoder.conv_pre.bias"),
    )


def configured_dims(config: Mapping[str, Any]) -> AudioDims:
    """The sizes that a diffusers `config.json` states; its defaults are the released ones."""
    return AudioDims(
        encoder=config.get("encoder_dim", RELEASED.encoder),
        trunk=config.get("latent_dim", RELEASED.trunk),
        latent=config.get("latent_channels", RELEASED.latent),
        decoder=config.get("decoder_dim", RELEASED.decoder),
    )


def normalised_weights(dims: AudioDims) -> tuple[str, ...]:
    """Layers whose modules keep magnitude and direction apart: all convolutions but the three `*_proj`."""
    return tuple(_encoder_convs(dims)) + tuple(_decoder_convs(dims))


def audio_table(dims: AudioDims) -> dict[str, Spec]:
    """Every tensor of the audio VAE."""
    table = {"latents_mean": Spec((dims.latent,)), "latents_std": Spec((dims.latent,))}
    for name, shape in (_encoder_convs(dims) | _decoder_convs(dims)).items():
        table[f"{name}.weight"] = Spec(shape)
        if name.startswith("decoder.ups."):  # transposed: outputs are its second dimension
            table[f"{name}.bias"] = Spec((shape[1],))
        elif name != "decoder.conv_post":
            table[f"{name}.bias"] = Spec((shape[0],))
    for name in ("mean_proj", "logs_proj"):
        table |= _biased(name, (dims.latent, dims.latent, 1))
    table |= _biased("dec_in_proj", (dims.trunk, dims.latent, 1))
    return table | _encoder_activations(dims) | _pre_block(dims) | _decoder_activations(dims)


def _biased(name: str, shape: tuple[int, ...]) -> dict[str, Spec]:
    return {f"{name}.weight": Spec(shape), f"{name}.bias": Spec((shape[0],))}


def _encoder_convs(dims: AudioDims) -> dict[str, tuple[int, ...]]:
    convs: dict[str, tuple[int, ...]] = {"encoder.block.0": (dims.encoder, 1, 7)}
    width = dims.encoder
    for level, stride in enumerate(ENCODER_STRIDES, start=1):
        for unit in range(3):
            convs[f"encoder.block.{level}.block.{unit}.block.1"] = (width, width, 7)
            convs[f"encoder.block.{level}.block.{unit}.block.3"] = (width, width, 1)
        convs[f"encoder.block.{level}.block.4"] = (2 * width, width, 2 * stride)
        width *= 2
    return convs | {f"encoder.block.{len(ENCODER_STRIDES) + 2}": (dims.trunk, width, 3)}


def _encoder_activations(dims: AudioDims) -> dict[str, Spec]:
    table: dict[str, Spec] = {}
    width = dims.encoder
    for level in range(1, len(ENCODER_STRIDES) + 1):
        stems = [f"block.{unit}.block.{place}" for unit in range(3) for place in (0, 2)]
        table |= {f"encoder.block.{level}.{stem}.alpha": Spec((1, width, 1)) for stem in (*stems, "block.3")}
        width *= 2
    return table | {f"encoder.block.{len(ENCODER_STRIDES) + 1}.alpha": Spec((1, width, 1))}


def _pre_block(dims: AudioDims) -> dict[str, Spec]:
    trunk, latent = dims.trunk, dims.latent
    table = {f"pre_block.attn.{name}": Spec((trunk,)) for name in ("q_bias", "v_bias", "zero_k_bias")}
    for name, width in (("norm1", trunk), ("norm2", latent), ("norm3", trunk), ("mlp.norm", latent)):
        table |= _biased(f"pre_block.{name}", (width,))
    table["pre_block.attn.qkv.weight"] = Spec((3 * trunk, trunk))
    return (
        table
        | _biased("pre_block.attn.proj", (latent, latent))
        | _biased("pre_block.proj", (latent, trunk))
        | _biased("pre_block.mlp.w0", (2 * latent, latent))
        | _biased("pre_block.mlp.w1", (2 * latent, latent))
        | _biased("pre_block.mlp.w2", (latent, 2 * latent))
    )


def _decoder_convs(dims: AudioDims) -> dict[str, tuple[int, ...]]:
    convs: dict[str, tuple[int, ...]] = {"decoder.conv_pre": (dims.decoder, dims.trunk, 7)}
    width = dims.decoder
    for level, up_kernel in enumerate(UP_KERNELS):
        convs[f"decoder.ups.{level}.0"] = (width, width // 2, up_kernel)
        width //= 2
        for place, kernel in enumerate(RES_KERNELS):
            block = f"decoder.resblocks.{level * len(RES_KERNELS) + place}"
            stems = [f"{block}.{group}.{index}" for group in ("convs1", "convs2") for index in range(DILATIONS)]
            convs |= dict.fromkeys(stems, (width, width, kernel))
    return convs | {"decoder.conv_post": (1, width, 7)}


def _decoder_activations(dims: AudioDims) -> dict[str, Spec]:
    table: dict[str, Spec] = {}
    width = dims.decoder
    for level in range(len(UP_KERNELS)):
        width //= 2
        for place in range(len(RES_KERNELS)):
            block = f"decoder.resblocks.{level * len(RES_KERNELS) + place}"
            for index in range(2 * DILATIONS):
                table |= _activation(f"{block}.activations.{index}", width)
    return table | _activation("decoder.activation_post", width)


def _activation(name: str, width: int) -> dict[str, Spec]:
    taps = Spec((1, 1, FILTER_TAPS))
    return {
        f"{name}.act.alpha": Spec((width,)),
        f"{name}.act.beta": Spec((width,)),
        f"{name}.upsample.filter": taps,
        f"{name}.downsample.lowpass.filter": taps,
    }
