"""The denoiser's file: its dimensions, derived from shapes, and every tensor that it must hold.

Two forms: "full" computes the time embedding by an MLP; "curve" (the pruned files) reads it from a table of
the grid. Shapes: C hidden, I heads * head_dim, F ffn, M the width of the time embedding that AdaLN reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from h3dist.checkpoint.file import TensorInfo
from h3dist.checkpoint.shapes import Shapes, block_count
from h3dist.checkpoint.storage import Spec
from h3dist.errors import CheckpointError

IGNORABLE = re.compile(r"blocks\.\d+\.attn\.to_gate_compress\..*")  # gates of a sparse attention, unused by the dense
MODALITIES = 3
CHUNKS = 6  # shift, scale, gate of attention and of the MLP
PATCH_AREA = 4  # latent pixels of one video row
F32 = ("F32",)


@dataclass(frozen=True)
class DenoiserDims:
    """Sizes of a denoiser. `curve_*` are 0 in the full form, `time_freq` and `time_hidden` in the curve form.

    `time_dim` is the width that the AdaLN projections read: the MLP's output, or the curve's rank.
    """

    hidden: int
    heads: int
    head_dim: int
    ffn: int
    layers: int
    refiner_layers: int
    text_dim: int
    video_channels: int
    audio_channels: int
    rope_freqs: int
    form: Literal["full", "curve"]
    curve_grid: int
    curve_rank: int
    time_freq: int
    time_hidden: int
    time_dim: int

    @property
    def inner(self) -> int:
        """Width of q, of k and of v: heads * head_dim."""
        return self.heads * self.head_dim


def denoiser_dims(path: Path, tensors: Mapping[str, TensorInfo]) -> DenoiserDims:
    """The sizes of a denoiser whose tensors (names without prefix) these are. Raises CheckpointError."""
    shapes = Shapes(path, tensors)
    block = "token_refiner.blocks.0" if "token_refiner.blocks.0.attn.q_norm.weight" in tensors else "blocks.0"
    head_dim = max(1, shapes.rows(f"{block}.attn.q_norm.weight"))
    curve = "adaln_t_table" in tensors
    return DenoiserDims(
        hidden=shapes.rows("video_patch_proj.weight"),
        heads=shapes.rows(f"{block}.attn.qkv_proj.weight") // (3 * head_dim),
        head_dim=head_dim,
        ffn=shapes.rows(f"{block}.mlp.fc1.weight") // 2,
        layers=block_count(tensors, "blocks"),
        refiner_layers=block_count(tensors, "token_refiner.blocks"),
        text_dim=shapes.cols("condition_proj.weight"),
        video_channels=shapes.cols("video_patch_proj.weight") // PATCH_AREA,
        audio_channels=shapes.cols("audio_patch_proj.weight"),
        rope_freqs=shapes.rows("rope.inv_freq"),
        form="curve" if curve else "full",
        curve_grid=shapes.rows("adaln_t_table") if curve else 0,
        curve_rank=shapes.cols("adaln_t_table") if curve else 0,
        time_freq=0 if curve else shapes.cols("time_embedder.proj_in.weight"),
        time_hidden=0 if curve else shapes.rows("time_embedder.proj_in.weight"),
        time_dim=shapes.cols("adaln_t_table") if curve else shapes.rows("time_embedder.proj_out.weight"),
    )


def denoiser_table(dims: DenoiserDims) -> dict[str, Spec]:
    """Every tensor of a denoiser, by name without prefix; linear weights as their logical shape."""
    video = PATCH_AREA * dims.video_channels
    table = {
        **_linear("video_patch_proj", dims.hidden, video),
        **_linear("audio_patch_proj", dims.hidden, dims.audio_channels),
        **_linear("condition_proj", dims.hidden, dims.text_dim),
        "rope.inv_freq": Spec((dims.rope_freqs,), F32),
        **_time(dims),
        "token_refiner.final_norm.weight": Spec((dims.hidden,)),
        "final_layer.norm.weight": Spec((dims.hidden,)),
        **_linear("final_layer.adaln_proj.linear", 2 * dims.hidden, dims.time_dim),
        **_linear("final_layer.video_out", video, dims.hidden),
        **_linear("final_layer.audio_out", dims.audio_channels, dims.hidden),
    }
    for index in range(dims.refiner_layers):
        table |= _block(f"token_refiner.blocks.{index}", dims)
    for index in range(dims.layers):
        table |= _block(f"blocks.{index}", dims)
        table |= _linear(f"blocks.{index}.adaln_proj.linear", MODALITIES * CHUNKS * dims.hidden, dims.time_dim)
    return table


def refuse_banks(path: Path, tensors: Mapping[str, TensorInfo], dims: DenoiserDims) -> None:
    """Raises CheckpointError for an output projection that is a bank of several (for few-step schedules)."""
    rows = Shapes(path, tensors).rows("final_layer.video_out.weight")
    count, rest = divmod(rows, PATCH_AREA * dims.video_channels)
    if count > 1 and rest == 0:
        raise CheckpointError(f"{path}: final_layer.video_out is a bank of {count} heads, which is not supported yet")


def _linear(name: str, rows: int, cols: int) -> dict[str, Spec]:
    return {f"{name}.weight": Spec((rows, cols), linear=True), f"{name}.bias": Spec((rows,))}


def _time(dims: DenoiserDims) -> dict[str, Spec]:
    if dims.form == "curve":
        return {"adaln_t_table": Spec((dims.curve_grid, dims.curve_rank), F32)}
    return _linear("time_embedder.proj_in", dims.time_hidden, dims.time_freq) | _linear(
        "time_embedder.proj_out", dims.time_dim, dims.time_hidden
    )


def _block(name: str, dims: DenoiserDims) -> dict[str, Spec]:
    hidden, inner, ffn = dims.hidden, dims.inner, dims.ffn
    return {
        f"{name}.norm1.weight": Spec((hidden,)),
        f"{name}.norm2.weight": Spec((hidden,)),
        f"{name}.attn.qkv_proj.weight": Spec((3 * inner, hidden), linear=True),
        f"{name}.attn.q_norm.weight": Spec((dims.head_dim,)),
        f"{name}.attn.k_norm.weight": Spec((dims.head_dim,)),
        f"{name}.attn.out_proj.weight": Spec((hidden, inner), linear=True),
        f"{name}.mlp.fc1.weight": Spec((2 * ffn, hidden), linear=True),
        f"{name}.mlp.fc2.weight": Spec((hidden, ffn), linear=True),
    }
