"""The boxes of an MP4 file, as far as we check them: order, completeness, durations in the movie's ticks."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

HEADER = struct.Struct(">I4s")
LONG_SIZE = struct.Struct(">Q")


@dataclass(frozen=True)
class Box:
    """One box: its four letters, and the range of bytes that it holds after its header."""

    kind: str
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The outermost boxes in order, and each track's duration in ticks of 1 / `timescale` s."""

    kinds: tuple[str, ...]
    timescale: int
    ticks: dict[str, int]  # by handler: "vide", "soun"

    @property
    def faststart(self) -> bool:
        """Whether the index lies before the media, so that a player can start on part of the file."""
        return self.kinds.index("moov") < self.kinds.index("mdat")


def read_layout(path: str | Path) -> Layout:
    """Read the boxes of an MP4 file (ISO/IEC 14496-12). Raises ValueError where it is cut short or no MP4."""
    with open(path, "rb") as file:
        outermost = list(_boxes(file, 0, Path(path).stat().st_size))
        kinds = tuple(box.kind for box in outermost)
        if not {"ftyp", "moov", "mdat"} <= set(kinds):
            raise ValueError(f"not a whole MP4 file: its boxes are {', '.join(kinds) or 'none'}")
        movie = outermost[kinds.index("moov")]
        timescale = _number(file, _inside(file, movie, "mvhd"), short=12, long=20)
        ticks = {}
        for track in (box for box in _boxes(file, movie.start, movie.stop) if box.kind == "trak"):
            handler = _inside(file, _inside(file, track, "mdia"), "hdlr")
            name = _read(file, handler.start + 8, 4).decode("latin-1")
            ticks[name] = _number(file, _inside(file, track, "tkhd"), short=20, long=28, wide=True)
    return Layout(kinds, timescale, ticks)


def _boxes(file: BinaryIO, start: int, stop: int) -> Iterator[Box]:
    while start < stop:
        size, kind = HEADER.unpack(_read(file, start, HEADER.size))
        content = start + HEADER.size
        if size == 1:
            (size,) = LONG_SIZE.unpack(_read(file, content, LONG_SIZE.size))
            content += LONG_SIZE.size
        if start + size > stop or content > start + size:
            raise ValueError(f"not a whole MP4 file: a box of {size} bytes at {start} ends beyond {stop}")
        yield Box(kind.decode("latin-1"), content, start + size)
        start += size


def _inside(file: BinaryIO, parent: Box, kind: str) -> Box:
    for box in _boxes(file, parent.start, parent.stop):
        if box.kind == kind:
            return box
    raise ValueError(f"not a whole MP4 file: no {kind} in {parent.kind}")


def _number(file: BinaryIO, box: Box, *, short: int, long: int, wide: bool = False) -> int:
    """A field at `short` of a version 0 box, or at `long` of a version 1 box, there of 8 bytes if `wide`."""
    version = _read(file, box.start, 1)[0]
    offset, size = (short, 4) if version == 0 else (long, 8 if wide else 4)
    return int.from_bytes(_read(file, box.start + offset, size), "big")


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f"not a whole MP4 file: it ends at byte {start + len(data)}")
    return data
