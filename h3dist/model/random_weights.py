"""A denoiser of random weights in a chosen size, made on the device: to measure without a checkpoint.

Every rank draws each layer whole, from a seed of its own, and keeps its slices: what a run computes depends on
the seed and not on the layout. The codes are uniform over all bytes and the scales chosen so that outputs keep
the size of inputs, as in a trained model.

Shape letters: N rows, K columns, C hidden, n steps, R pairs of stream time and modality.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from h3dist.checkpoint.denoiser_names import DenoiserDims
from h3dist.checkpoint.nvfp4 import E2M1, Nvfp4Weight
from h3dist.checkpoint.shard import Slice, fc1_slice, fc2_slice, out_slice, qkv_slice
from h3dist.checkpoint.tiles import code_shape, scale_shape
from h3dist.model.modulation import CHUNKS, FINAL_CHUNKS, PAIRS, SCALES, STREAMS, Modulation
from h3dist.model.weights import BlockWeights, DenoiserWeights, Projection
from h3dist.plan import Share

ONE = 0x38  # 1.0 in E4M3
CODE_SIZE = math.sqrt(sum(value * value for value in E2M1) / len(E2M1))  # of a uniform code, root mean square
SPREAD = 0.1  # of the modulation around its neutral values
GATE = 0.3


class RandomSource:
    """Random tensors by name: one name gives one tensor, whoever asks and in whatever order."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.seed, self.device, self.dtype = seed, device, dtype

    def generator(self, name: str) -> torch.Generator:
        seed = zlib.crc32(f"{self.seed}/{name}".encode())
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers of this shape."""
        drawn = torch.randn(shape, generator=self.generator(name), device=self.device)
        return drawn.to(dtype or self.dtype)

    def nvfp4(self, name: str, shape: tuple[int, int], cut: Slice) -> Nvfp4Weight:
        """A cut of a random NVFP4 matrix [N, K] whose products keep the size of their input."""
        codes = torch.randint(
            256, code_shape(shape), generator=self.generator(name), device=self.device, dtype=torch.uint8
        )
        scales = torch.full(scale_shape(shape), ONE, device=self.device, dtype=torch.uint8)
        scale = torch.tensor(1 / (CODE_SIZE * math.sqrt(shape[1])), device=self.device)
        return Nvfp4Weight(codes, scales, scale, shape).slice(cut)


def random_denoiser(
    dims: DenoiserDims, share: Share, *, seed: int, device: torch.device, dtype: torch.dtype
) -> DenoiserWeights:
    """This rank's part of a random denoiser of `dims`, its blocks in NVFP4."""
    source = RandomSource(seed, device, dtype)
    return DenoiserWeights(
        dims=dims,
        blocks=tuple(_block(source, dims, share, f"blocks.{index}") for index in range(dims.layers)),
        video_in=_projection(source, "video_in", dims.hidden, 4 * dims.video_channels),
        audio_in=_projection(source, "audio_in", dims.hidden, dims.audio_channels),
        final_norm=torch.ones(dims.hidden, device=device, dtype=dtype),
        heads=_projection(source, "heads", 4 * dims.video_channels + dims.audio_channels, dims.hidden),
        inv_freq=10000.0 ** (-torch.arange(dims.rope_freqs, device=device) / dims.rope_freqs),
    )


def _block(source: RandomSource, dims: DenoiserDims, share: Share, name: str) -> BlockWeights:
    def ones(size: int) -> Tensor:
        return torch.ones(size, device=source.device, dtype=source.dtype)

    inner, hidden, ffn = dims.inner, dims.hidden, dims.ffn
    return BlockWeights(
        norm1=ones(hidden),
        norm2=ones(hidden),
        q_norm=ones(dims.head_dim),
        k_norm=ones(dims.head_dim),
        qkv=source.nvfp4(f"{name}.qkv", (3 * inner, hidden), qkv_slice(dims, share.projected_heads)),
        out=source.nvfp4(f"{name}.out", (hidden, inner), out_slice(dims, share.tp_heads)),
        fc1=source.nvfp4(f"{name}.fc1", (2 * ffn, hidden), fc1_slice(dims, share.ffn)),
        fc2=source.nvfp4(f"{name}.fc2", (hidden, ffn), fc2_slice(dims, share.ffn)),
    )


def _projection(source: RandomSource, name: str, rows: int, columns: int) -> Projection:
    weight = source.normal(name, rows, columns, dtype=torch.float32) / math.sqrt(columns)
    return Projection(weight, torch.zeros(rows, device=source.device))


def random_modulation(
    dims: DenoiserDims, steps: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Modulation:
    """Tables for `steps` evaluations: factors near 1, small shifts and gates."""
    source = RandomSource(seed, device, dtype)
    blocks = (source.normal(f"table.{i}", steps, len(PAIRS), CHUNKS, dims.hidden) for i in range(dims.layers))
    final = SPREAD * source.normal("table.final", steps, len(STREAMS), FINAL_CHUNKS, dims.hidden)
    final[:, :, 1] += 1
    return Modulation(tuple(_neutral(blocks)), final)


def _neutral(tables: Iterator[Tensor]) -> Iterator[Tensor]:
    for table in tables:
        table *= SPREAD
        table[:, :, SCALES] += 1
        table[:, :, 2::3] *= GATE / SPREAD
        yield table
