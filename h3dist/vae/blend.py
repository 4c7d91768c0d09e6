"""Decoded tiles become frames: tiles are faded into their neighbours, then chunks into the chunk before.

Letters: f frames, y and x pixels of a tile, H and W pixels of the picture. A tile is [3, f, y, x].
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from h3dist.geometry import CHUNK_FRAMES, TAIL_FRAMES
from h3dist.tiles import Axis, Cuts

FRAMES, ROWS, COLS = -3, -2, -1  # axes of a tile


def cross_fade(old: torch.Tensor, new: torch.Tensor, overlap: int, axis: int) -> torch.Tensor:
    """`new` with its first `overlap` entries along `axis` faded in over the last ones of `old`.

    Entry j has weight j / overlap on the new side and 1 - j / overlap on the old one.
    """
    shape = [1] * new.ndim
    shape[axis] = overlap
    weight = (torch.arange(overlap, device=new.device, dtype=new.dtype) / overlap).view(shape)
    under = old.narrow(axis, old.shape[axis] - overlap, overlap)
    faded = under * (1 - weight) + new.narrow(axis, 0, overlap) * weight
    return torch.cat([faded, new.narrow(axis, overlap, new.shape[axis] - overlap)], dim=axis)


def stitch(tiles: Iterator[torch.Tensor], rows: Axis, cols: Axis) -> torch.Tensor:
    """One picture [3, f, H, W] from its tiles, taken in row order; only two rows of tiles are held at a time.

    Both fades take their neighbour as the decoder gave it, unblended, as diffusers does; it shows only where
    four tiles meet.
    """
    strips: list[torch.Tensor] = []
    above: list[torch.Tensor] = []
    for index in range(len(rows.starts)):
        row = list(islice(tiles, len(cols.starts)))
        faded = row if index == 0 else _fade_down(above, row, rows.overlaps[index - 1])
        strip = _strip(faded, row, cols)
        kept = rows.size - rows.overlaps[index] if index < len(rows.overlaps) else rows.size
        strips.append(strip.narrow(ROWS, 0, kept))
        above = row
    return torch.cat(strips, dim=ROWS)


def _fade_down(above: list[torch.Tensor], row: list[torch.Tensor], overlap: int) -> list[torch.Tensor]:
    return [cross_fade(old, new, overlap, ROWS) for old, new in zip(above, row, strict=True)]


def _strip(tiles: list[torch.Tensor], beside: list[torch.Tensor], cols: Axis) -> torch.Tensor:
    """A strip [3, f, y, W] of `tiles`, each faded in over its left neighbour in `beside`."""
    parts = []
    for index, tile in enumerate(tiles):
        if index > 0:
            tile = cross_fade(beside[index - 1], tile, cols.overlaps[index - 1], COLS)
        kept = cols.size - cols.overlaps[index] if index < len(cols.overlaps) else cols.size
        parts.append(tile.narrow(COLS, 0, kept))
    return torch.cat(parts, dim=COLS)


def blend(tiles: Iterable[torch.Tensor], cuts: Cuts) -> Iterator[torch.Tensor]:
    """Raw frames [3, f, H, W], one tensor a chunk, from the results of `cuts.jobs()` in that order.

    A result holds a chunk's 17 frames and its tail of 5, [3, 22, y, x], wherever it was decoded; all arithmetic here
    is in float32.
    """
    tiles = (tile.float() for tile in tiles)
    held: torch.Tensor | None = None  # the tail of the chunk before
    for index, chunk in enumerate(cuts.chunks):
        head, tail = stitch(tiles, cuts.rows, cuts.cols).split([CHUNK_FRAMES, TAIL_FRAMES], dim=FRAMES)
        if held is not None:
            head = cross_fade(held, head, TAIL_FRAMES, FRAMES)
        held = tail.clone()  # alone: the chunk itself is not kept
        last = index == len(cuts.chunks) - 1
        yield (torch.cat([head, tail], dim=FRAMES) if last else head).narrow(FRAMES, 0, chunk.frames)
