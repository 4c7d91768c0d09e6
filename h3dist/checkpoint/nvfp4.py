"""NVFP4 in memory: two 4-bit codes a byte, an 8-bit scale for 16 columns, one float32 scale for the matrix.

W[r, k] = E2M1(code[r, k]) * (E4M3(scale[r, k // 16]) * global scale), in float32, cast once (Comfy checkpoint
format; comfy-kitchen's CUDA kernel computes the same). Column 2j is the HIGH nibble of byte j. Shapes: N
rows, K columns, B = ceil(K / 16) blocks. `tiles` says where scales lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from h3dist.checkpoint.formats import Weight, dense_by_rows, take_cols
from h3dist.checkpoint.slices import Range, Slice, length
from h3dist.checkpoint.tiles import (
    BLOCK,
    PAIR,
    TILE_BLOCKS,
    TILE_BYTES,
    TILE_ROWS,
    ceil_to,
    code_shape,
    cut_error,
    scale_shape,
    tile_cols,
    tile_rows,
    whole_tiles,
)
from h3dist.errors import CheckpointError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MAGNITUDES = 0x77  # the bits of a byte's two codes that are not signs
E4M3_NAN = 0x7F  # all bits but the sign
WRITTEN = 512  # elements that a block of threads of comfy-kitchen's CUDA kernel writes: 4 each, without a bound

Kernel = Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]  # codes, global scale, scales as E4M3, dtype


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(Weight):
    """A matrix of logical `shape` (N, K), padded to 16 rows and 16 columns with zeros.

    codes uint8 [ceil16(N), ceil16(K) / 2]; scales uint8 (bits of E4M3), swizzled tiles, nominally
    [ceil128(N), ceil4(B)]; global_scale float32 []. `full_precision` forbids 4-bit arithmetic on the
    activations.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    shape: tuple[int, int]
    full_precision: bool = False
    input_scale: Tensor | None = None
    pre_quant_scale: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] in `dtype`; on CUDA by comfy-kitchen's kernel where there is one."""
        count, width = self.shape
        kernel = _cuda_kernel() if self.codes.is_cuda else None
        if kernel is not None and count and width:
            return dense_by_kernel(self, kernel, dtype)
        values = torch.tensor(E2M1, device=self.codes.device)
        pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)  # [byte, (high, low)]
        scales = unswizzle(self.scales, self.shape).view(torch.float8_e4m3fn)  # [N, B]

        def rows(start: int, stop: int) -> Tensor:
            scale_nB = scales[start:stop].float() * self.global_scale
            code_nB16 = embedding(self.codes[start:stop].int(), pairs).view(*scale_nB.shape, BLOCK)
            return (code_nB16 * scale_nB[..., None]).flatten(1)[:, :width]

        return dense_by_rows(self.shape, dtype, self.codes.device, rows)

    def slice(self, cut: Slice) -> Nvfp4Weight:
        """A cut, at columns that are multiples of 16; CheckpointError elsewhere."""
        ranges, cols = cut.row_ranges(self.shape[0]), legal_cols(cut, self.shape)
        across, band = tile_cols(cols), tile_rows(ranges)
        tiles = self.scales.view(-1, scale_shape(self.shape)[1] // TILE_BLOCKS * TILE_BYTES)  # [tile rows, bytes]
        tiles = tiles[:, across[0] * TILE_BYTES : across[1] * TILE_BYTES]
        codes = self.codes[:, cols[0] // PAIR : ceil_to(cols[1], BLOCK) // PAIR]
        return replace(
            self,
            codes=pad_codes(torch.cat([codes[:0], *(codes[a:b] for a, b in ranges)])),
            scales=cut_scales(torch.cat([tiles[:0], *(tiles[a:b] for a, b in band)]), ranges, cols),
            shape=cut.shape(self.shape),
            pre_quant_scale=take_cols(self.pre_quant_scale, cut),
        )


def dense_by_kernel(weight: Nvfp4Weight, kernel: Kernel, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] in `dtype` by a kernel like comfy-kitchen's on CUDA."""
    count, width = weight.shape
    scales = weight.scales.view(torch.float8_e4m3fn)
    return kernel(in_whole_blocks(weight.codes), weight.global_scale, scales, dtype)[:count, :width]


def in_whole_blocks(codes: Tensor) -> Tensor:
    """Codes with 16 rows of zeros more where comfy-kitchen's kernel (0.2.40) would write past the end of its result.

    Where both sides are odd multiples of 16, its last block of threads has half of its elements left over: 512 bytes of
    bfloat16 on whatever lies behind. Scales, whose tiles have 128 rows, reach 16 rows further there.
    """
    return pad(codes, (0, 0, 0, BLOCK)) if codes.numel() * PAIR % WRITTEN else codes


def legal_cols(cut: Slice, shape: tuple[int, int]) -> Range:
    """The cut's columns. Raises CheckpointError where it would part the 16 columns that share a scale."""
    cols = cut.col_range(shape[1])
    error = cut_error(cols, shape[1])
    if error:
        raise CheckpointError(error)
    return cols


def pad_codes(codes: Tensor) -> Tensor:
    """Codes [N, ceil16(K) / 2] with zero rows up to a multiple of 16."""
    missing = code_shape((codes.shape[0], 0))[0] - codes.shape[0]
    return pad(codes, (0, 0, 0, missing)) if missing else codes


def cut_scales(tiles: Tensor, ranges: tuple[Range, ...], cols: Range) -> Tensor:
    """The swizzled scales of a cut, from the tiles that it touches: uint8 [touched tile rows, their bytes].

    Tiles that the cut takes whole stay as they lie; else unswizzle, pick rows and blocks, swizzle with zero
    padding.
    """
    shape = (length(ranges), cols[1] - cols[0])
    if whole_tiles(ranges, cols):
        return tiles.contiguous().view(scale_shape(shape))
    touched = [tile for start, stop in tile_rows(ranges) for tile in range(start, stop)]
    place = {tile: index * TILE_ROWS for index, tile in enumerate(touched)}
    across = tile_cols(cols)
    blocks = (across[1] - across[0]) * TILE_BLOCKS
    grid = _grid(tiles, len(touched) * TILE_ROWS, blocks)
    first = cols[0] // BLOCK - across[0] * TILE_BLOCKS
    picked = []
    for start, stop in ranges:
        row = place[start // TILE_ROWS] + start % TILE_ROWS
        picked.append(grid[row : row + stop - start, first : first + ceil_to(shape[1], BLOCK) // BLOCK])
    return swizzle(torch.cat(picked)) if picked else tiles.new_zeros(scale_shape(shape))


def swizzle(scales_NB: Tensor) -> Tensor:
    """Block scales in rows [N, B] to tiles, zeros in the padding; result nominally [ceil128(N), ceil4(B)]."""
    count, blocks = scales_NB.shape
    full = scale_shape((count, blocks * BLOCK))
    grid = pad(scales_NB, (0, full[1] - blocks, 0, full[0] - count))
    tiles = grid.view(full[0] // TILE_ROWS, 4, 32, full[1] // TILE_BLOCKS, TILE_BLOCKS)  # [R, r//32, r%32, C, c%4]
    return tiles.permute(0, 3, 2, 1, 4).reshape(full)


def unswizzle(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Tiles to block scales in rows [N, B], for a matrix of logical `shape` (N, K)."""
    return _grid(scales, *scale_shape(shape))[: shape[0], : ceil_to(shape[1], BLOCK) // BLOCK]


def _grid(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    parts = tiles.reshape(rows // TILE_ROWS, blocks // TILE_BLOCKS, 32, 4, TILE_BLOCKS)  # [R, C, r%32, r//32, c%4]
    return parts.permute(0, 3, 2, 1, 4).reshape(rows, blocks)


def check_scales(weight: Nvfp4Weight, name: str) -> None:
    """Raises CheckpointError where a block scale is NaN, or is zero over codes that are not."""
    if weight.scales.numel() == 0:
        return
    least, most = torch.aminmax(weight.scales)  # one pass and no copy: reading waits for this
    if most >= E4M3_NAN:  # a NaN, or a sign, which is looked past
        least, most = torch.aminmax(weight.scales & E4M3_NAN)
    if most == E4M3_NAN:
        raise CheckpointError(f"{name}.weight_scale holds NaN: the file is damaged")
    if least > 0:  # no zero, not even in padding
        return
    zero_NB = (unswizzle(weight.scales, weight.shape) & E4M3_NAN) == 0
    rows, blocks = zero_NB.nonzero(as_tuple=True)
    codes = weight.codes.view(weight.codes.shape[0], -1, BLOCK // PAIR)[rows, blocks]  # [zero scales, 8 bytes]
    lost = int(((codes & MAGNITUDES) != 0).any(dim=1).sum())
    if lost:
        raise CheckpointError(f"{name}.weight_scale is zero for {lost} blocks of weights that are not: damaged")


@cache
def _cuda_kernel() -> Kernel | None:
    """comfy-kitchen's own CUDA kernel, or None: its other backends round differently."""
    try:
        from comfy_kitchen.exceptions import BackendError
        from comfy_kitchen.registry import registry
    except ImportError:
        return None
    try:
        return registry.get_implementation("dequantize_nvfp4", backend="cuda")
    except BackendError:
        return None
