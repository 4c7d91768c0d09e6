"""Blocks that stay in the host's memory, two at a time on the device: one computes while the next one arrives.

A block is one run of bytes in pinned memory, so that it moves in one copy; on the device there are two places for one,
taken in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNED = 256  # bytes at whose multiples tensors begin


class Piece(NamedTuple):
    """Where a tensor lies in a block's bytes; `path`: the block's field, and the field of that, if it is a weight."""

    path: tuple[str, ...]
    start: int
    like: Tensor  # of the shape and dtype, without memory


class Packed(NamedTuple):
    """A block in the host's memory: its bytes, where each tensor lies, and the block with tensors of no memory."""

    memory: Tensor
    pieces: tuple[Piece, ...]
    block: Any


def tensors_of(block: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Every tensor of a block: of its own fields, and of those that are weights, which are dataclasses too."""
    for item in fields(block):
        value = getattr(block, item.name)
        if isinstance(value, Tensor):
            yield (item.name,), value
        else:
            parts = ((part.name, getattr(value, part.name)) for part in fields(value))
            yield from (((item.name, name), part) for name, part in parts if isinstance(part, Tensor))


def with_tensors(block: Any, tensors: Iterable[tuple[tuple[str, ...], Tensor]]) -> Any:
    """The block with these tensors in the places of its own."""
    own: dict[str, Any] = {}
    for (name, *inner), tensor in tensors:
        if inner:
            own[name] = replace(own.get(name, getattr(block, name)), **{inner[0]: tensor})
        else:
            own[name] = tensor
    return replace(block, **own)


def pack(block: Any, *, pinned: bool) -> Packed:
    """A block's bytes, copied to the host."""
    pieces, size = [], 0
    found = list(tensors_of(block))
    for path, tensor in found:
        pieces.append(Piece(path, size, tensor.to("meta")))
        size += -(-tensor.nbytes // ALIGNED) * ALIGNED
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for (_, tensor), piece in zip(found, pieces, strict=True):
        view(memory, piece).copy_(tensor)
    empty = with_tensors(block, ((piece.path, piece.like) for piece in pieces))
    return Packed(memory, tuple(pieces), empty)


def view(memory: Tensor, piece: Piece) -> Tensor:
    """A piece's tensor within a block's bytes."""
    return memory[piece.start : piece.start + piece.like.nbytes].view(piece.like.dtype).view(piece.like.shape)


class OffloadedBlocks(Sequence[Any]):
    """The blocks of a denoiser, to be asked for in order, step after step; each is good until the next is asked for.

    Out of order they come as well, without the overlap.
    """

    def __init__(self, blocks: Iterable[Any], device: torch.device) -> None:
        """Takes blocks one at a time, so that no more than one need be on the device. Any formats, any sizes."""
        cuda = device.type == "cuda"
        self._home = [pack(block, pinned=cuda) for block in blocks]
        size = max((packed.memory.numel() for packed in self._home), default=0)
        self._places = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._holds: list[int | None] = [None, None]
        self._turn = 0
        self._side = torch.cuda.Stream(device) if cuda else None
        if self._side is not None:
            for place in self._places:
                place.record_stream(self._side)  # not given to others while the last copy runs
        self._arrived = [torch.cuda.Event() if cuda else None for _ in range(2)]

    @property
    def host_bytes(self) -> int:
        """Bytes of all blocks in the host's memory, which come to the device in every step."""
        return sum(packed.memory.numel() for packed in self._home)

    @property
    def device_bytes(self) -> int:
        """Bytes of the two places on the device."""
        return sum(place.numel() for place in self._places)

    def __len__(self) -> int:
        return len(self._home)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self._home):
            raise IndexError(index)
        place = self._turn
        if self._holds[place] != index:
            self._fetch(index, place)
        self._turn = 1 - place
        self._fetch((index + 1) % len(self._home), self._turn)
        if self._side is not None:
            torch.cuda.current_stream().wait_event(self._arrived[place])
        packed, memory = self._home[index], self._places[place]
        return with_tensors(packed.block, ((piece.path, view(memory, piece)) for piece in packed.pieces))

    def _fetch(self, index: int, place: int) -> None:
        """Begin to copy a block; what was begun on the current stream, and reads that place, comes first."""
        source = self._home[index].memory
        target = self._places[place][: source.numel()]
        self._holds[place] = index
        if self._side is None:
            target.copy_(source)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            self._arrived[place].record()
