"""Blocks that stay in the host's memory, two at a time on the device: one computes while the next one arrives.

A block is a few runs of bytes in pinned memory, so that it moves in as many copies; on the device there are two places
for one, taken in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNED = 256  # bytes at whose multiples tensors begin
LEAST = 8 << 20  # bytes of which a run may waste some


class Piece(NamedTuple):
    """Where a tensor lies in a block's bytes; `path`: the block's field, and the field of that, if it is a weight."""

    path: tuple[str, ...]
    start: int
    like: Tensor  # of the shape and dtype, without memory


class Packed(NamedTuple):
    """A block in the host's memory: its bytes, run by run, where each tensor lies in them, and the block with tensors
    of no memory."""

    runs: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]
    block: Any

    @property
    def size(self) -> int:
        return sum(run.numel() for run in self.runs)


def lengths(size: int) -> list[int]:
    """Of runs that together are so long: powers of two, which torch rounds pinned memory up to, and a rest."""
    found = []
    while size > LEAST:
        found.append(1 << size.bit_length() - 1)
        size -= found[-1]
    return [*found, size] if size else found


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
    memory = torch.empty(size, dtype=torch.uint8, device=found[0][1].device)
    for (_, tensor), piece in zip(found, pieces, strict=True):
        view(memory, piece).copy_(tensor)
    made = (torch.empty(length, dtype=torch.uint8, pin_memory=pinned) for length in lengths(size))
    runs = tuple(run.copy_(part) for run, part in zip(made, memory.split(lengths(size)), strict=True))
    empty = with_tensors(block, ((piece.path, piece.like) for piece in pieces))
    return Packed(runs, tuple(pieces), empty)


def view(memory: Tensor, piece: Piece) -> Tensor:
    """A piece's tensor within a block's bytes."""
    return memory[piece.start : piece.start + piece.like.nbytes].view(piece.like.dtype).view(piece.like.shape)


class OffloadedBlocks(Sequence[Any]):
    """The blocks of a denoiser, to be asked for in order, step after step; each is good until the next is asked for.

    Out of order they come as well, without the overlap.
    """

    def __init__(self, blocks: Iterable[Any], device: torch.device) -> None:
        """Takes blocks one at a time, so that no more than one and its bytes need be on the device. Any formats, any
        sizes."""
        cuda = device.type == "cuda"
        self._home = [pack(block, pinned=cuda) for block in blocks]
        size = max((packed.size for packed in self._home), default=0)
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
        return sum(packed.size for packed in self._home)

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
        packed = self._home[index]
        targets = self._places[place][: packed.size].split([run.numel() for run in packed.runs])
        self._holds[place] = index
        if self._side is None:
            for target, run in zip(targets, packed.runs, strict=True):
                target.copy_(run)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for target, run in zip(targets, packed.runs, strict=True):
                target.copy_(run, non_blocking=True)
            self._arrived[place].record()
