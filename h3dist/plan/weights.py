"""Bytes of the denoiser: what a rank asks of the file, and what it keeps in memory.

With the file at hand the first is exact and comes from the checkpoint's own slicing. Without it both follow
from the released sizes in the form "Comfy checkpoint format, pruned, NVFP4": 4-bit codes and one 8-bit
scale for 16 weights.
"""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from h3dist.plan.layout import Span

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import DenoiserDims, DenoiserFile

NVFP4_BYTES = 9 / 16  # of one weight: half a byte of code, a sixteenth of a scale byte
F32, BF16 = 4, 2
TIMESTEPS = 2  # distinct times of one evaluation: the video's and the sound's
MODULATED = 3  # (modality, time) pairs in use: video rows, text rows, audio rows
FP4_CAPABILITY = (10, 0)
KEPT = 2  # and with conditions: their video rows, their audio rows
LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


def released_dims() -> "DenoiserDims":
    """The released 33B model, pruned (its AdaLN as a curve over time)."""
    from h3dist.checkpoint.comfy import DenoiserDims

    return DenoiserDims(
        hidden=5376, heads=56, head_dim=128, ffn=14336, layers=50, refiner_layers=2, text_dim=5120,
        video_channels=24, audio_channels=32, rope_freqs=16, form="curve", curve_grid=1025, curve_rank=8,
        time_freq=0, time_hidden=0, time_dim=8,
    )  # fmt: skip


def linear_shapes(
    dims: "DenoiserDims", heads: int, ffn: int, projected: int | None = None
) -> dict[str, tuple[int, int]]:
    """Logical [N, K] of a block's four linears, cut to `heads` heads and `ffn` FFN columns.

    `projected` heads of QKV, where they are not the same.
    """
    inner = heads * dims.head_dim
    qkv = 3 * (heads if projected is None else projected) * dims.head_dim
    shapes = ((qkv, dims.hidden), (dims.hidden, inner), (2 * ffn, dims.hidden), (dims.hidden, ffn))
    return dict(zip(LINEARS, shapes, strict=True))


def linear_weights(dims: "DenoiserDims", heads: int, ffn: int, projected: int | None = None) -> int:
    """Weights, as a count, of the four linears of all blocks, cut as in `linear_shapes`."""
    return dims.layers * sum(prod(shape) for shape in linear_shapes(dims, heads, ffn, projected).values())


def kept_bytes(dims: "DenoiserDims") -> int:
    """The small tensors that every rank reads and keeps: norms, patch projections, heads, rotary frequencies."""
    norms = BF16 * (dims.layers * 2 * (dims.hidden + dims.head_dim) + dims.hidden)
    widths = (4 * dims.video_channels, dims.audio_channels)
    patches = F32 * sum(dims.hidden * (width + 1) for width in widths)
    outputs = F32 * sum((dims.hidden + 1) * width for width in widths)
    return norms + patches + outputs + F32 * dims.rope_freqs


def adaln_bytes(dims: "DenoiserDims") -> int:
    """AdaLN as stored: every rank reads all of it once, block by block, and keeps the table it gives."""
    features = dims.layers * 18 * dims.hidden + 2 * dims.hidden  # 3 modalities x 6 chunks; last layer: 2 chunks
    projections = BF16 * features * (dims.time_dim + 1)
    if dims.form == "curve":
        return projections + F32 * dims.curve_grid * dims.curve_rank
    return projections + F32 * (dims.time_hidden * (dims.time_freq + 1) + dims.time_dim * (dims.time_hidden + 1))


def refiner_weights(dims: "DenoiserDims") -> int:
    """Weights, as a count, of the text projection and the token refiner: rank 0 alone reads them."""
    linears = sum(prod(shape) for shape in linear_shapes(dims, dims.heads, dims.ffn).values())
    blocks = dims.refiner_layers * (linears + 2 * (dims.hidden + dims.head_dim))
    return blocks + dims.hidden + dims.hidden * (dims.text_dim + 1)


def modulation_bytes(dims: "DenoiserDims", steps: int, *, kept: bool = False) -> int:
    """The AdaLN table of a whole run in float32: six chunks a block for each (modality, time) pair, and the end.

    `kept` says that there are conditions, with pairs of their own.
    """
    pairs = MODULATED + KEPT * kept
    return F32 * steps * dims.hidden * (dims.layers * 6 * pairs + 2 * TIMESTEPS)


def stored_bytes(dims: "DenoiserDims", heads: int, ffn: int, *, refiner: bool, projected: int | None = None) -> int:
    """What a rank asks of a released NVFP4 file: its slices, each linear's scalar, all small tensors."""
    linears = round(NVFP4_BYTES * linear_weights(dims, heads, ffn, projected)) + F32 * len(LINEARS) * dims.layers
    return linears + kept_bytes(dims) + adaln_bytes(dims) + refiner * BF16 * refiner_weights(dims)


def file_bytes(
    dims: "DenoiserDims",
    dfile: "DenoiserFile | None",
    heads: Span,
    ffn: Span,
    *,
    refiner: bool,
    projected: Span | None = None,
) -> int:
    """What a rank asks of the denoiser's file: exact for `dfile`, else of a released NVFP4 file of `dims`."""
    if dfile is None:
        start, stop = projected or heads
        return stored_bytes(dims, heads[1] - heads[0], ffn[1] - ffn[0], refiner=refiner, projected=stop - start)
    from h3dist.checkpoint.shard import rank_file_bytes

    return rank_file_bytes(dfile, heads, ffn, refiner=refiner, projected=projected)


def bytes_per_weight(dims: "DenoiserDims", dfile: "DenoiserFile | None") -> float:
    """Bytes that one weight of the blocks' linears takes in `dfile` (NVFP4 without a file), scales included."""
    if dfile is None:
        return NVFP4_BYTES
    from h3dist.checkpoint.shard import Slice, slice_bytes

    stored = sum(slice_bytes(dfile, name, Slice()) for name in block_linears(dims))
    return stored / linear_weights(dims, dims.heads, dims.ffn)


def block_linears(dims: "DenoiserDims") -> tuple[str, ...]:
    """The names of the blocks' linears, without prefix."""
    return tuple(f"blocks.{block}.{name}" for block in range(dims.layers) for name in LINEARS)


def fp4_linears(
    dims: "DenoiserDims", dfile: "DenoiserFile | None", capability: tuple[int, int] | None, dtype: str
) -> tuple[int, int]:
    """How many of the blocks' linears run as FP4 products, and how many of those agree on an activation scale.

    `capability` is the lowest of the ranks' devices, None on a CPU. FP4 products exist from capability 10 on and
    for 16-bit results; they take NVFP4 weights unless the layer's marker asks for full precision. A layer that
    stores its `input_scale` needs no agreement. Without a file: the released NVFP4 form, where none has one.
    """
    if capability is None or capability < FP4_CAPABILITY or dtype != "bfloat16":
        return 0, 0
    names = block_linears(dims)
    if dfile is None:
        return len(names), len(names)
    fp4 = [name for name in names if _quantises(dfile.linears[name].config)]
    return len(fp4), sum(f"{name}.input_scale" not in dfile.tensors for name in fp4)


def packed_inputs(dims: "DenoiserDims", dfile: "DenoiserFile | None") -> tuple[int, int]:
    """Of how many blocks QKV, and fc1, are FP4 products where devices have such: these can take packed rows."""
    if dfile is None:
        return dims.layers, dims.layers
    names = ([f"blocks.{block}.{name}" for block in range(dims.layers)] for name in (LINEARS[0], LINEARS[2]))
    qkv, fc1 = (sum(_quantises(dfile.linears[name].config) for name in each) for each in names)
    return qkv, fc1


def _quantises(marker: Mapping[str, Any] | None) -> bool:
    return marker is not None and marker["format"] == "nvfp4" and not marker["full_precision_matrix_mult"]
