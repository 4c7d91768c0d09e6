"""Decoded tiles become frames: tiles are faded into their neighbours, then chunks into the chunk before.

Letters: f frames, y and x pixels of a tile, H and W pixels of the picture. A tile is [3, f, y, x].
"""

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

import torch

from h3dist.geometry import CHUNK_FRAMES, TAIL_FRAMES
from h3dist.tiles import Axis, Cuts

FRAMES, ROWS, COLS = -3, -2, -1  # axes of a tile


def fade_in(new: torch.Tensor, old: torch.Tensor, overlap: int, axis: int) -> None:
    """The first `overlap` entries of `new` along `axis`, in place, over the last ones of `old`; float32.

    Entry j has weight j / overlap on the new side and 1 - j / overlap on the old one. `new` may end before them all.
    """
    length = min(overlap, new.shape[axis])
    shape = [1] * new.ndim
    shape[axis] = length
    weight = (torch.arange(length, device=new.device, dtype=new.dtype) / overlap).view(shape)
    under = old.narrow(axis, old.shape[axis] - overlap, length)
    new.narrow(axis, 0, length).mul_(weight).add_(under * (1 - weight))


def stitch(tiles: Iterator[torch.Tensor], rows: Axis, cols: Axis) -> torch.Tensor:
    """One picture f32 [..., H, W] from its tiles [..., y, x], taken in row order; two rows of them are held at a time.

    Both fades take their neighbour as the decoder gave it, unblended, as diffusers does; it shows only where
    four tiles meet.
    """
    picture: torch.Tensor | None = None
    above: list[torch.Tensor] = []
    for index, (top, bottom) in enumerate(_kept(rows)):
        row = list(islice(tiles, len(cols.starts)))
        if picture is None:
            shape = (*row[0].shape[:ROWS], rows.starts[-1] + rows.size, cols.starts[-1] + cols.size)
            picture = row[0].new_empty(shape, dtype=torch.float32)
        strip = picture[..., top:bottom, :]
        _place(strip, row, cols, above, rows.overlaps[index - 1] if index else 0)
        above = row
    assert picture is not None
    return picture


def _place(strip: torch.Tensor, row: list[torch.Tensor], cols: Axis, above: list[torch.Tensor], overlap: int) -> None:
    """The tiles of a row into its strip of the picture, faded in over those above by `overlap` and over the left."""
    height = strip.shape[ROWS]
    for index, (left, right) in enumerate(_kept(cols)):
        part = strip[..., left:right]
        part.copy_(row[index][..., :height, : right - left])
        if overlap:
            fade_in(part, above[index][..., : right - left], overlap, ROWS)
        if index:
            fade_in(part, row[index - 1][..., :height, :], cols.overlaps[index - 1], COLS)


def _kept(axis: Axis) -> Iterator[tuple[int, int]]:
    """Of each tile the half-open range of the picture that is its own: to where the next one starts."""
    return pairwise((*axis.starts, axis.starts[-1] + axis.size))


def blend(tiles: Iterable[torch.Tensor], cuts: Cuts) -> Iterator[torch.Tensor]:
    """Raw frames f32 [3, f, H, W], one tensor a chunk, from the results of `cuts.jobs()` in that order.

    A result holds a chunk's 17 frames and its tail of 5, [3, 22, y, x], wherever it was decoded; all arithmetic here
    is in float32.
    """
    tiles = iter(tiles)
    held: torch.Tensor | None = None  # the tail of the chunk before
    for index, chunk in enumerate(cuts.chunks):
        picture = stitch(tiles, cuts.rows, cuts.cols)
        head, tail = picture.split([CHUNK_FRAMES, TAIL_FRAMES], dim=FRAMES)
        if held is not None:
            fade_in(head, held, TAIL_FRAMES, FRAMES)
        held = tail.clone()  # alone: the chunk itself is not kept
        last = index == len(cuts.chunks) - 1
        yield (picture if last else head).narrow(FRAMES, 0, chunk.frames)
