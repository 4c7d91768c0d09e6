"""Where NVFP4's block scales lie: one for 16 columns, in tiles of 128 rows x 4 blocks = 512 bytes.

Inside a matrix of N rows and B blocks, tile (R, C) is the 512 bytes at (R * ceil(B / 4) + C) * 512, and in it
the scale of row r and block c is byte (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4 (the layout that cuBLAS
wants, and that Comfy's NVFP4 files keep). Arithmetic only.
"""

from collections.abc import Iterable
from itertools import pairwise

from h3dist.checkpoint.slices import Range, merge

BLOCK = 16  # columns that share one scale
PAIR = 2  # columns in one byte
TILE_ROWS = 128
TILE_BLOCKS = 4
TILE_BYTES = TILE_ROWS * TILE_BLOCKS
PACK_ROWS = 16  # stored rows are padded to this


def ceil_to(count: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `count`."""
    return -(-count // unit) * unit


def code_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the packed codes, uint8, of a matrix of logical `shape`."""
    return ceil_to(shape[0], PACK_ROWS), ceil_to(shape[1], BLOCK) // PAIR


def scale_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Nominal shape of the block scales of a matrix of logical `shape`; their bytes are tiles, not rows."""
    return ceil_to(ceil_to(shape[0], PACK_ROWS), TILE_ROWS), ceil_to(ceil_to(shape[1], BLOCK) // BLOCK, TILE_BLOCKS)


def tile_rows(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Rows of tiles that hold the given matrix rows, each once, rising."""
    touched = {tile for start, stop in merge(ranges) for tile in range(start // TILE_ROWS, -(-stop // TILE_ROWS))}
    return merge((tile, tile + 1) for tile in sorted(touched))


def tile_cols(cols: Range) -> Range:
    """Columns of tiles that hold the given matrix columns."""
    width = BLOCK * TILE_BLOCKS
    return cols[0] // width, -(-cols[1] // width)


def whole_tiles(ranges: tuple[Range, ...], cols: Range) -> bool:
    """Whether a cut takes whole tiles in rising order: its tiles, as they lie, are then its own scales."""
    width = BLOCK * TILE_BLOCKS
    rows_whole = all(start % TILE_ROWS == 0 and stop % TILE_ROWS == 0 for start, stop in ranges)
    rising = all(first[1] < second[0] for first, second in pairwise(ranges))
    return rows_whole and rising and cols[0] % width == 0 and cols[1] % width == 0


def cut_error(cols: Range, width: int) -> str | None:
    """Why a cut of columns is illegal: it may part neither a byte nor the 16 columns that share a scale."""
    bad = [edge for edge in cols if edge % BLOCK and (edge != width or edge == cols[0])]
    if not bad:
        return None
    low = bad[0] // BLOCK * BLOCK
    return (
        f"NVFP4 keeps one scale for {BLOCK} columns: {cols[0]}..{cols[1]} of {width} cannot be cut out; the "
        f" nearest legal edges to {bad[0]} are {low} and {min(low + BLOCK, width)}"
    )
