"""Tiles faded in place are the bits of tiles faded into new ones, and frames keep their levels."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from h3dist.errors import NumericsError
from h3dist.tiles import Axis, Cuts, cut_video
from h3dist.vae.blend import blend
from h3dist.vae.frames import PIXEL_MEAN, PIXEL_STD, finish, late, leave, to_levels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def faded(old: Tensor, new: Tensor, overlap: int, axis: int) -> Tensor:
    """As diffusers fades two tiles: into a third."""
    shape = [1] * new.ndim
    shape[axis] = overlap
    weight = (torch.arange(overlap, device=new.device, dtype=new.dtype) / overlap).view(shape)
    under = old.narrow(axis, old.shape[axis] - overlap, overlap) * (1 - weight)
    rest = new.narrow(axis, overlap, new.shape[axis] - overlap)
    return torch.cat([under + new.narrow(axis, 0, overlap) * weight, rest], dim=axis)


def stitched(tiles: list[Tensor], rows: Axis, cols: Axis) -> Tensor:
    wide, strips = len(cols.starts), []
    for i in range(len(rows.starts)):
        parts = []
        for j in range(wide):
            tile = tiles[i * wide + j]
            if i:
                tile = faded(tiles[(i - 1) * wide + j], tile, rows.overlaps[i - 1], -2)
            if j:
                tile = faded(tiles[i * wide + j - 1], tile, cols.overlaps[j - 1], -1)
            y, x = (axis.size - (*axis.overlaps, 0)[at] for axis, at in ((rows, i), (cols, j)))
            parts.append(tile[..., :y, :x])
        strips.append(torch.cat(parts, dim=-1))
    return torch.cat(strips, dim=-2)


def blended(tiles: list[Tensor], cuts: Cuts) -> list[Tensor]:
    """Every chunk's raw frames, in float32 throughout."""
    found, held, count = [], None, cuts.tiles
    for index, chunk in enumerate(cuts.chunks):
        whole = stitched([tile.float() for tile in tiles[index * count : (index + 1) * count]], cuts.rows, cuts.cols)
        head, tail = whole.split([17, 5], dim=1)
        head = head if held is None else faded(held, head, 5, -3)
        held = tail
        found.append(torch.cat([head, tail], dim=1)[:, : chunk.frames])
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("t", "h", "w"), [(2, 2, 3), (12, 18, 2), (17, 2, 30), (7, 30, 34)])
def test_blended_in_place_are_the_bits_of_fading_into_new_tiles(device, dtype, t, h, w):
    """480 pixels have overlaps of 144 on both sides of a tile, more than what is left of it."""
    cuts, generator = cut_video(t, h, w), torch.Generator().manual_seed(t)
    shape = (3, 22, cuts.rows.size, cuts.cols.size)
    tiles = [torch.randn(shape, generator=generator).to(device, dtype) for _ in cuts.jobs()]
    before = [tile.clone() for tile in tiles]
    found, wanted = list(blend(tiles, cuts)), blended(tiles, cuts)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, tiles, before)), "a neighbour's tile is not to be changed"


@pytest.mark.parametrize("device", DEVICES)
def test_frames_are_the_levels_of_the_plain_arithmetic(device):
    raw = (torch.randn(3, 4, 6, 10, generator=torch.Generator().manual_seed(0)) * 1.5).to(device)
    before = raw.clone()
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    wanted = (raw * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 3, 0).cpu()
    assert torch.equal(to_levels(raw).cpu(), wanted)
    found = leave(raw).arrived()
    assert torch.equal(found, wanted) and found.is_contiguous() and torch.equal(raw, before)
    assert found.is_pinned() == (device == "cuda")
    other = leave(raw.neg()).arrived()
    assert torch.equal(found, wanted) and not torch.equal(other, wanted), "a chunk that is in use stays"


@pytest.mark.parametrize("device", DEVICES)
def test_a_chunk_is_handed_out_once_the_next_is_begun_and_told_of_where_it_is_not_finite(device):
    cuts, begun = cut_video(17, 2, 18), []  # three chunks of two tiles

    def tiles(wrong: int | None = None) -> Iterator[Tensor]:
        for index, _ in enumerate(cuts.jobs()):
            begun.append(index)
            tile = torch.randn(3, 22, 32, 256, generator=torch.Generator().manual_seed(index)).to(device)
            yield tile * torch.inf if index == wrong else tile

    wanted = list(finish(tiles(), cuts))
    assert [len(frames) for frames in wanted] == [17, 17, 22]
    begun.clear()
    frames = finish(tiles(), cuts, ahead=1)
    first = next(frames)
    assert begun == [0, 1, 2, 3]
    assert all(map(torch.equal, [first, *frames], wanted))
    frames = finish(tiles(wrong=5), cuts, ahead=1)
    assert torch.equal(next(frames), wanted[0]) and torch.equal(next(frames), wanted[1])
    with pytest.raises(NumericsError, match="frames 34 to 55"):
        next(frames)


def test_tiles_come_late_but_in_order():
    begun = []
    tiles = late((begun.append(index) or torch.tensor(index) for index in range(5)), 2)
    assert next(tiles) == 0 and begun == [0, 1, 2]
    assert [tile.item() for tile in tiles] == [1, 2, 3, 4]
    assert list(late(iter([]), 2)) == []
