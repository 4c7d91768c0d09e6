"""Decoded tiles become frames on the host: blended, rounded to levels, and brought over while a GPU works on.

Nothing here waits for a GPU but `Leaving.arrived`, and that for one chunk alone: what was begun since goes on.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from h3dist.errors import NumericsError
from h3dist.tiles import Cuts
from h3dist.vae.blend import blend

# The decoder speaks in ImageNet-normalised RGB over [0, 1] (diffusers AutoencoderKLMiniMaxH3).
PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)
T = TypeVar("T")


@dataclass(frozen=True)
class Leaving:
    """A chunk on its way to the host, where both tensors are; their values count once `there` has come."""

    frames: Tensor  # uint8 [f, H, W, 3]
    finite: Tensor  # bool [], of what they were made of
    start: int  # the first frame's number
    there: torch.cuda.Event | None = None  # on a CPU they are there at once

    def arrived(self) -> Tensor:
        """The frames, waited for. Raises NumericsError for NaN or infinity."""
        if self.there is not None:
            self.there.synchronize()
        if not self.finite:
            stop = self.start + len(self.frames)
            raise NumericsError(f"the video VAE gave NaN or infinity in frames {self.start} to {stop - 1}")
        return self.frames


def finish(tiles: Iterable[Tensor], cuts: Cuts, ahead: int = 0) -> Iterator[Tensor]:
    """Frames uint8 [f, H, W, 3] on the CPU, a chunk at a time, from the results of `cuts.jobs()` in that order.

    `ahead`: how many chunks more are begun before one is waited for; 1 keeps a GPU busy meanwhile. Raises
    NumericsError, at its chunk, for NaN or infinity.
    """
    return (chunk.arrived() for chunk in late(_leaving(tiles, cuts), ahead))


def _leaving(tiles: Iterable[Tensor], cuts: Cuts) -> Iterator[Leaving]:
    start = 0
    for raw in blend(tiles, cuts):
        yield leave(raw, start)
        start += raw.shape[1]


def leave(raw: Tensor, start: int = 0) -> Leaving:
    """Sends the frames of decoded float32 [3, f, H, W] off to the host.

    From a GPU they go over on a stream of their own, into pinned memory, which torch keeps and gives to a later chunk:
    a copy into new memory takes longer than all before it.
    """
    frames, finite = to_levels(raw), raw.isfinite().all()
    if not raw.is_cuda:
        return Leaving(frames, finite, start)
    stream = torch.cuda.Stream(raw.device)
    stream.wait_stream(torch.cuda.current_stream(raw.device))
    with torch.cuda.stream(stream):
        on_host = [_pinned(frames), _pinned(finite)]
        there = torch.cuda.Event(blocking=True)  # the processor is for whoever encodes
        there.record(stream)
    for tensor in (frames, finite):
        tensor.record_stream(stream)
    return Leaving(*on_host, start, there)


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def to_levels(raw: Tensor) -> Tensor:
    """uint8 [f, H, W, 3], rounded to the nearest level, from decoded float32 [3, f, H, W] on the same device."""
    levels = (raw * _by_channel(raw, PIXEL_STD)).add_(_by_channel(raw, PIXEL_MEAN)).clamp_(0, 1).mul_(255).round_()
    frames = torch.empty((*levels.shape[1:], 3), dtype=torch.uint8, device=raw.device)
    frames.permute(3, 0, 1, 2).copy_(levels)
    return frames


def _by_channel(raw: Tensor, values: tuple[float, ...]) -> Tensor:
    """[3, 1, 1, 1]; filled where they are: to copy numbers to a GPU waits for all that it has to do."""
    return torch.stack([raw.new_full((1, 1, 1), value) for value in values])


def late(items: Iterable[T], count: int) -> Iterator[T]:
    """The same items, each after `count` more were begun."""
    held: deque[T] = deque()
    for item in items:
        held.append(item)
        if len(held) > count:
            yield held.popleft()
    while held:
        yield held.popleft()
