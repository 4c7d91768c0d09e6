"""A rank's part of the denoiser: which rows and columns of each layer, what they cost, and reading them.

Shapes: H heads of D, F the MLP's width. Arithmetic but for the two readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from h3dist.checkpoint.comfy import DenoiserFile
from h3dist.checkpoint.denoiser_names import DenoiserDims
from h3dist.checkpoint.slices import Range, Slice
from h3dist.checkpoint.storage import ALL

if TYPE_CHECKING:
    from torch import Tensor

    from h3dist.checkpoint.formats import Weight

__all__ = [
    "Slice", "fc1_slice", "fc2_slice", "out_slice", "qkv_slice", "rank_file_bytes", "read_linear",
    "read_tensor", "shared_tensors", "slice_bytes", "text_tensors",
]  # fmt: skip


def qkv_slice(dims: DenoiserDims, heads: Range, order: str = "bands") -> Slice:
    """Rows of `attn.qkv_proj` for these heads, given out as [all q; all k; all v] whichever way they lie.

    `order`: "bands", q of all heads before k and v (Comfy files), or "interleaved", q, k and v of one head
    after another (the official shards).
    """
    size, (first, last) = dims.head_dim, heads
    if order == "bands":
        bands = [band * dims.inner for band in range(3)]
        return Slice(rows=tuple((start + first * size, start + last * size) for start in bands))
    starts = [(3 * head + part) * size for part in range(3) for head in range(first, last)]
    return Slice(rows=tuple((start, start + size) for start in starts))


def out_slice(dims: DenoiserDims, heads: Range) -> Slice:
    """Columns of `attn.out_proj` for these heads."""
    return Slice(cols=(heads[0] * dims.head_dim, heads[1] * dims.head_dim))


def fc1_slice(dims: DenoiserDims, ffn: Range) -> Slice:
    """Rows of `mlp.fc1` for this part of the MLP's width: the gate's rows, then the others."""
    return Slice(rows=(ffn, (dims.ffn + ffn[0], dims.ffn + ffn[1])))


def fc2_slice(dims: DenoiserDims, ffn: Range) -> Slice:
    """Columns of `mlp.fc2` for this part of the MLP's width."""
    assert ffn[1] <= dims.ffn
    return Slice(cols=ffn)


def slice_bytes(state: DenoiserFile, layer: str, cut: Slice = ALL) -> int:
    """Bytes that `read_linear` asks of the file: slices of codes, whole tiles of scales, scalars."""
    return state.linear_bytes(layer, cut)


def read_linear(state: DenoiserFile, layer: str, cut: Slice = ALL) -> Weight:
    """A cut of a linear layer, such as "blocks.3.attn.qkv_proj", as it is stored, on the CPU.

    A whole `attn.qkv_proj` of an interleaved file comes as it lies: take `qkv_slice` of all heads for bands.
    """
    return state.linear(layer, cut)


def read_tensor(state: DenoiserFile, name: str) -> Tensor:
    """A tensor, such as "blocks.3.norm1.weight", on the CPU; a quantised layer's weight as float32."""
    return state.tensor(name)


def rank_file_bytes(
    state: DenoiserFile, heads: Range, ffn: Range, *, refiner: bool, projected: Range | None = None
) -> int:
    """Bytes that a rank asks of the denoiser's file in all: its heads, its part of the MLP, what all read.

    `refiner`: whether it also reads the text projection and the token refiner, as rank 0 does. `projected`: its heads
    of QKV, where they are not those of the output projection.
    """
    dims = state.dims
    cuts = {
        "attn.qkv_proj": qkv_slice(dims, projected or heads, state.qkv_order),
        "attn.out_proj": out_slice(dims, heads),
        "mlp.fc1": fc1_slice(dims, ffn),
        "mlp.fc2": fc2_slice(dims, ffn),
    }
    layers = range(dims.layers)
    sliced = sum(slice_bytes(state, f"blocks.{index}.{name}", cut) for index in layers for name, cut in cuts.items())
    whole = shared_tensors(state) + (text_tensors(state) if refiner else ())
    return sliced + sum(state.tensor_bytes(name) for name in whole)


def shared_tensors(state: DenoiserFile) -> tuple[str, ...]:
    """Tensors that every rank reads whole: all but the four linears of each block and `text_tensors`."""
    four = ("attn.qkv_proj.weight", "attn.out_proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    names = set(state.table) - set(text_tensors(state))
    return tuple(sorted(name for name in names if not (name.startswith("blocks.") and name.endswith(four))))


def text_tensors(state: DenoiserFile) -> tuple[str, ...]:
    """Tensors that only the rank with the text reads: the text projection and the token refiner."""
    return tuple(sorted(name for name in state.table if name.startswith(("condition_proj.", "token_refiner."))))
