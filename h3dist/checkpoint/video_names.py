"""The video VAE's file: its sizes, and every tensor that it must hold. Names without the file's prefix.

A causal 3-D convolutional encoder and a ViT decoder whose fused qkv rows lie head by head, and whose `ff.w1`
holds the gate's rows before the others (Comfy checkpoint format).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h3dist.checkpoint.file import TensorInfo
from h3dist.checkpoint.shapes import Shapes, block_count
from h3dist.checkpoint.storage import Spec

IGNORABLE = re.compile(r"decoder\.mask_token")  # zero, and read by nothing
PATCH_PIXELS = 4 * 16 * 16  # frames x height x width of one latent
DOWN_LEVELS = 4  # the first levels of the encoder end in a strided convolution


@dataclass(frozen=True)
class VideoDims:
    """Sizes of the video VAE: encoder channels of each level, decoder width, latent channels."""

    channels: tuple[int, ...]
    blocks_per_level: int
    latent: int
    width: int
    ffn: int
    layers: int
    registers: int


RELEASED = VideoDims((128, 256, 256, 512, 512, 1024), 2, latent=24, width=2048, ffn=8192, layers=36, registers=4)


def video_dims(path: Path, tensors: Mapping[str, TensorInfo]) -> VideoDims:
    """The sizes of a video VAE whose tensors these are. Raises CheckpointError."""
    shapes = Shapes(path, tensors)
    levels = block_count(tensors, "encoder.down")
    registers = tensors.get("decoder.register_tokens")
    return VideoDims(
        channels=tuple(shapes.rows(f"encoder.down.{level}.block.0.conv1.weight") for level in range(levels)),
        blocks_per_level=block_count(tensors, "encoder.down.0.block"),
        latent=shapes.rows("post_quant_conv.weight"),
        width=shapes.rows("decoder.norm_out.weight"),
        ffn=shapes.rows("decoder.transformer_blocks.0.ff.w1.bias") // 2,
        layers=block_count(tensors, "decoder.transformer_blocks"),
        registers=registers.shape[1] if registers and len(registers.shape) == 3 else 0,
    )


def configured_dims(config: Mapping[str, Any]) -> VideoDims:
    """The sizes that a diffusers `config.json` states; its defaults are the released ones."""
    heads, head_dim = (
        config.get("decoder_num_attention_heads", 32),
        config.get("decoder_attention_head_dim", 64),
    )
    return VideoDims(
        channels=tuple(config.get("block_out_channels", RELEASED.channels)),
        blocks_per_level=config.get("layers_per_block", RELEASED.blocks_per_level),
        latent=config.get("latent_channels", RELEASED.latent),
        width=heads * head_dim,
        ffn=heads * head_dim * config.get("decoder_ffn_mult", 4),
        layers=config.get("decoder_num_layers", RELEASED.layers),
        registers=config.get("decoder_num_register_tokens", RELEASED.registers),
    )


def video_table(dims: VideoDims) -> dict[str, Spec]:
    """Every tensor of the video VAE."""
    last = dims.channels[-1]
    table = {
        "latents_mean": Spec((dims.latent,)),
        "latents_std": Spec((dims.latent,)),
        **_conv("quant_conv", 2 * dims.latent, 2 * dims.latent, 1),
        **_conv("post_quant_conv", dims.latent, dims.latent, 1),
        **_conv("encoder.conv_in", dims.channels[0], 3, 3),
        **_norm("encoder.norm_out", last),
        **_conv("encoder.conv_out", 2 * dims.latent, last, 3),
    }
    before = (dims.channels[0], *dims.channels[:-1])
    for level, (inner, outer) in enumerate(zip(before, dims.channels, strict=True)):
        table |= _level(f"encoder.down.{level}", inner, outer, dims.blocks_per_level)
        if level < DOWN_LEVELS:
            table |= _conv(f"encoder.down.{level}.downsample.conv", outer, outer, 3)
    return table | _decoder(dims)


def _level(name: str, inner: int, outer: int, blocks: int) -> dict[str, Spec]:
    table: dict[str, Spec] = {}
    for index in range(blocks):
        block, width = f"{name}.block.{index}", inner if index == 0 else outer
        table |= _norm(f"{block}.norm1", width) | _conv(f"{block}.conv1", outer, width, 3)
        table |= _norm(f"{block}.norm2", outer) | _conv(f"{block}.conv2", outer, outer, 3)
        if width != outer:
            table |= _conv(f"{block}.nin_shortcut", outer, width, 1)
    return table


def _decoder(dims: VideoDims) -> dict[str, Spec]:
    width = dims.width
    table = {
        "decoder.register_tokens": Spec((1, dims.registers, width)),
        **_linear("decoder.x_embedder", width, dims.latent),
        **_norm("decoder.norm_out", width),
        **_linear("decoder.proj_out", 3 * PATCH_PIXELS, width),
    }
    for index in range(dims.layers):
        block = f"decoder.transformer_blocks.{index}"
        vectors = ("norm1.weight", "norm2.weight", "scale1", "scale2")
        table |= {f"{block}.{name}": Spec((width,)) for name in vectors}
        table |= _linear(f"{block}.attn.to_qkv", 3 * width, width) | _linear(f"{block}.attn.to_out", width, width)
        table |= _linear(f"{block}.ff.w1", 2 * dims.ffn, width) | _linear(f"{block}.ff.w2", width, dims.ffn)
    return table


def _conv(name: str, outer: int, inner: int, size: int) -> dict[str, Spec]:
    return {f"{name}.weight": Spec((outer, inner, size, size, size)), f"{name}.bias": Spec((outer,))}


def _norm(name: str, width: int) -> dict[str, Spec]:
    return {f"{name}.weight": Spec((width,)), f"{name}.bias": Spec((width,))}


def _linear(name: str, rows: int, cols: int) -> dict[str, Spec]:
    return {f"{name}.weight": Spec((rows, cols), linear=True), f"{name}.bias": Spec((rows,))}
