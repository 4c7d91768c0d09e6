"""The text encoder's file (Qwen3-VL cut after layer 50): its sizes, and every tensor that it must hold.

`model.` is the language model without final norm and head, `visual.` the vision tower. Names without the
file's prefix.
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
from h3dist.errors import CheckpointError

IGNORABLE = re.compile(r"(?!)")  # nothing
LAYERS = 50  # H3 reads the hidden state after this many decoder layers


@dataclass(frozen=True)
class VisionDims:
    """Sizes of the vision tower. `patch`: channels, frames, height, width; `merge`: patches in one row."""

    hidden: int
    ffn: int
    layers: int
    positions: int
    patch: tuple[int, ...]
    merge: int
    deepstack: int


@dataclass(frozen=True)
class TextDims:
    """Sizes of the text encoder."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    vision: VisionDims


RELEASED = TextDims(
    hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocab=151936,
    vision=VisionDims(1152, 4304, 27, 2304, (3, 2, 16, 16), merge=4, deepstack=3),
)  # fmt: skip


def text_dims(path: Path, tensors: Mapping[str, TensorInfo]) -> TextDims:
    """The sizes of a text encoder whose tensors these are.

    Raises CheckpointError, for one with more layers than H3's as well: then it is the whole Qwen3-VL.
    """
    layers = block_count(tensors, "model.layers")
    if layers > LAYERS:
        raise CheckpointError(
            f"{path} has {layers} decoder layers where H3's text encoder has {LAYERS}: it is the whole model"
        )
    shapes = Shapes(path, tensors)
    layer = "model.layers.0"
    head_dim = max(1, shapes.rows(f"{layer}.self_attn.q_norm.weight"))
    scale = f"{layer}.mlp.down_proj.pre_quant_scale"  # tells the width without any padding of packed rows
    return TextDims(
        hidden=shapes.rows(f"{layer}.input_layernorm.weight"),
        heads=shapes.rows(f"{layer}.self_attn.q_proj.weight") // head_dim,
        kv_heads=shapes.rows(f"{layer}.self_attn.k_proj.weight") // head_dim,
        head_dim=head_dim,
        ffn=shapes.rows(scale if scale in tensors else f"{layer}.mlp.gate_proj.weight"),
        vocab=shapes.rows("model.embed_tokens.weight"),
        vision=_vision_dims(shapes),
    )


def configured_dims(config: Mapping[str, Any]) -> TextDims:
    """The sizes that a Hugging Face `config.json` of Qwen3-VL states. Raises KeyError for what it lacks."""
    text, vision = config["text_config"], config["vision_config"]
    return TextDims(
        hidden=text["hidden_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        ffn=text["intermediate_size"],
        vocab=text["vocab_size"],
        vision=VisionDims(
            hidden=vision["hidden_size"],
            ffn=vision["intermediate_size"],
            layers=vision["depth"],
            positions=vision["num_position_embeddings"],
            patch=(
                vision["in_channels"],
                vision["temporal_patch_size"],
                vision["patch_size"],
                vision["patch_size"],
            ),
            merge=vision["spatial_merge_size"] ** 2,
            deepstack=len(vision["deepstack_visual_indexes"]),
        ),
    )


def text_table(dims: TextDims) -> dict[str, Spec]:
    """Every tensor of the text encoder; linear weights as their logical shape."""
    table = {"model.embed_tokens.weight": Spec((dims.vocab, dims.hidden), linear=True)}
    for index in range(LAYERS):
        table |= _decoder_layer(f"model.layers.{index}", dims)
    return table | _vision_table(dims)


def _vision_dims(shapes: Shapes) -> VisionDims:
    hidden = max(1, shapes.rows("visual.blocks.0.norm1.weight"))
    patch = shapes.tensors.get("visual.patch_embed.proj.weight")
    return VisionDims(
        hidden=hidden,
        ffn=shapes.rows("visual.blocks.0.mlp.linear_fc1.weight"),
        layers=block_count(shapes.tensors, "visual.blocks"),
        positions=shapes.rows("visual.pos_embed.weight"),
        patch=patch.shape[1:] if patch else (),
        merge=shapes.rows("visual.merger.linear_fc1.weight") // hidden,
        deepstack=block_count(shapes.tensors, "visual.deepstack_merger_list"),
    )


def _linear(name: str, rows: int, cols: int) -> dict[str, Spec]:
    return {f"{name}.weight": Spec((rows, cols), linear=True)}


def _biased(name: str, rows: int, cols: int) -> dict[str, Spec]:
    return _linear(name, rows, cols) | {f"{name}.bias": Spec((rows,))}


def _norm(name: str, width: int) -> dict[str, Spec]:
    return {f"{name}.weight": Spec((width,)), f"{name}.bias": Spec((width,))}


def _decoder_layer(name: str, dims: TextDims) -> dict[str, Spec]:
    queries, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return {
        f"{name}.input_layernorm.weight": Spec((dims.hidden,)),
        f"{name}.post_attention_layernorm.weight": Spec((dims.hidden,)),
        f"{name}.self_attn.q_norm.weight": Spec((dims.head_dim,)),
        f"{name}.self_attn.k_norm.weight": Spec((dims.head_dim,)),
        **_linear(f"{name}.self_attn.q_proj", queries, dims.hidden),
        **_linear(f"{name}.self_attn.k_proj", keys, dims.hidden),
        **_linear(f"{name}.self_attn.v_proj", keys, dims.hidden),
        **_linear(f"{name}.self_attn.o_proj", dims.hidden, queries),
        **_linear(f"{name}.mlp.gate_proj", dims.ffn, dims.hidden),
        **_linear(f"{name}.mlp.up_proj", dims.ffn, dims.hidden),
        **_linear(f"{name}.mlp.down_proj", dims.hidden, dims.ffn),
    }


def _vision_table(dims: TextDims) -> dict[str, Spec]:
    vision = dims.vision
    width, merged = vision.hidden, vision.hidden * vision.merge
    table = {
        "visual.patch_embed.proj.weight": Spec((width, *vision.patch)),
        "visual.patch_embed.proj.bias": Spec((width,)),
        "visual.pos_embed.weight": Spec((vision.positions, width)),
        **_merger("visual.merger", width, merged, dims.hidden),
    }
    for index in range(vision.layers):
        block = f"visual.blocks.{index}"
        table |= _norm(f"{block}.norm1", width) | _norm(f"{block}.norm2", width)
        table |= _biased(f"{block}.attn.qkv", 3 * width, width) | _biased(f"{block}.attn.proj", width, width)
        table |= _biased(f"{block}.mlp.linear_fc1", vision.ffn, width)
        table |= _biased(f"{block}.mlp.linear_fc2", width, vision.ffn)
    for index in range(vision.deepstack):
        table |= _merger(f"visual.deepstack_merger_list.{index}", merged, merged, dims.hidden)
    return table


def _merger(name: str, norm: int, merged: int, out: int) -> dict[str, Spec]:
    inner = _norm(f"{name}.norm", norm) | _biased(f"{name}.linear_fc1", merged, merged)
    return inner | _biased(f"{name}.linear_fc2", out, merged)
