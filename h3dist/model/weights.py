"""The denoiser weights that one rank keeps, read from the file slice by slice.

Shape letters: C hidden, D head size, H heads of this rank's share, j heads that it projects to, f its feed-forward
columns, O outputs of both heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from h3dist.checkpoint.comfy import DenoiserDims, DenoiserFile
from h3dist.checkpoint.formats import Weight
from h3dist.checkpoint.readers import READERS, ahead
from h3dist.checkpoint.shard import fc1_slice, fc2_slice, out_slice, qkv_slice, read_linear, read_tensor
from h3dist.model.narrow import narrowed
from h3dist.model.offload import OffloadedBlocks
from h3dist.plan import Share

LINEAR_FIELDS = ("qkv", "out", "fc1", "fc2")  # in the order in which a block multiplies


@dataclass(frozen=True)
class BlockWeights:
    """One block: qkv [3jD, C] in bands q, k, v; out [C, HD]; fc1 [2f, C] gate first; fc2 [C, f]; norms."""

    norm1: Tensor
    norm2: Tensor
    q_norm: Tensor
    k_norm: Tensor
    qkv: Weight
    out: Weight
    fc1: Weight
    fc2: Weight


class Projection(NamedTuple):
    """A dense float32 layer: weight [N, K] and bias [N]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class DenoiserWeights:
    """All that stays resident: blocks as stored, norms in the compute dtype, the float32 layers dense."""

    dims: DenoiserDims
    blocks: Sequence[BlockWeights]
    video_in: Projection
    audio_in: Projection
    final_norm: Tensor
    heads: Projection  # [O, C]: the video head's outputs, then the audio head's
    inv_freq: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, which is the residual stream's."""
        return self.final_norm.dtype

    @property
    def device(self) -> torch.device:
        return self.final_norm.device


def load_denoiser(
    dfile: DenoiserFile,
    share: Share,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    gemm: str = "dense",
    offload: bool = False,
    readers: int = READERS,
) -> DenoiserWeights:
    """Read what this rank keeps: its slices of every block, rounded where `gemm` is fp8 or int8; small layers whole.

    offload: the blocks are left in the host's memory, and come when they are asked for. Blocks are read by so many
    `readers`, threads, and on CUDA into pinned memory: at most two linears a thread are in the host's memory, however
    many blocks there are.
    """
    device = torch.empty(0, device=device).device  # with its index: a thread has a current device of its own
    dfile.file.pinned = device.type == "cuda"
    projected = share.projected_heads
    heads = [read_projection(dfile, f"final_layer.{name}_out", device) for name in ("video", "audio")]
    names = (f"blocks.{index}" for index in range(dfile.dims.layers))
    mine = share.tp_heads, share.ffn, projected
    read = ahead((partial(read_block, dfile, name, *mine, device=device, dtype=dtype) for name in names), readers)
    blocks = (narrow_block(block, gemm, dtype) for block in read)
    return DenoiserWeights(
        dims=dfile.dims,
        blocks=OffloadedBlocks(blocks, torch.device(device)) if offload else tuple(blocks),
        video_in=read_projection(dfile, "video_patch_proj", device),
        audio_in=read_projection(dfile, "audio_patch_proj", device),
        final_norm=read_tensor(dfile, "final_layer.norm.weight").to(device, dtype),
        heads=Projection(torch.cat([head.weight for head in heads]), torch.cat([head.bias for head in heads])),
        inv_freq=read_tensor(dfile, "rope.inv_freq").to(device, torch.float32),
    )


def narrow_block(block: BlockWeights, gemm: str, dtype: torch.dtype) -> BlockWeights:
    """The block with its linears as `gemm` takes them: see `narrowed`."""
    return replace(block, **{name: narrowed(getattr(block, name), gemm, dtype) for name in LINEAR_FIELDS})


def read_block(
    dfile: DenoiserFile,
    name: str,
    heads: tuple[int, int],
    ffn: tuple[int, int],
    projected: tuple[int, int] | None = None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> BlockWeights:
    """Heads [a, b) and feed-forward columns [a, b) of a block of the denoiser or the text refiner.

    projected: the heads of QKV, where they are not those of the output projection.
    """
    dims = dfile.dims
    slices = {
        "attn.qkv_proj": qkv_slice(dims, projected or heads, dfile.qkv_order),
        "attn.out_proj": out_slice(dims, heads),
        "mlp.fc1": fc1_slice(dims, ffn),
        "mlp.fc2": fc2_slice(dims, ffn),
    }
    read = [read_tensor(dfile, f"{name}.{norm}.weight") for norm in ("norm1", "norm2", "attn.q_norm", "attn.k_norm")]
    norms = [norm.to(device, dtype, non_blocking=norm.is_pinned()) for norm in read]  # or each waits for large copies
    linears = [read_linear(dfile, f"{name}.{layer}", part).to(device) for layer, part in slices.items()]
    return BlockWeights(*norms, *linears)


def read_projection(dfile: DenoiserFile, name: str, device: torch.device | str) -> Projection:
    """A whole layer with a bias, dense in float32 on the device."""
    return Projection(
        read_dense(dfile, name, device, torch.float32),
        read_tensor(dfile, f"{name}.bias").to(device, torch.float32),
    )


def read_dense(dfile: DenoiserFile, name: str, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """A whole weight [N, K] dense on the device, its `pre_quant_scale` multiplied in if it has one."""
    weight = read_linear(dfile, name).to(device)
    dense = weight.dense(dtype)
    return dense if weight.pre_quant_scale is None else dense * weight.pre_quant_scale.to(dtype)
