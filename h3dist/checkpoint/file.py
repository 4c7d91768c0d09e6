"""One safetensors file: the header, checked before anything is believed, and reads of rows or columns."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from h3dist.checkpoint.slices import Range, length, merge
from h3dist.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# safetensors dtype -> bytes of one element, and torch's name for it
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "BOOL": "bool", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
LARGEST_HEADER = 100_000_000  # bytes, the limit that safetensors itself sets
IMPOSTORS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file: run `git lfs pull`, or download it again",
    b"<!doctype": "an HTML page, not a model: the download failed or wants a login",
    b"<html": "an HTML page, not a model: the download failed or wants a login",
    b"<?xml": "an XML page, not a model: the download failed",
    b"pk\x03\x04": "a zip or PyTorch archive, not safetensors",
    b"\x80\x02": "a Python pickle, not safetensors",
    b"gguf": "a GGUF file; only safetensors is read",
    b"{": "JSON text, not a model: an index or an error message was saved in its place",
}


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the header: dtype as safetensors spells it, shape, bytes [start, stop) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return prod(self.shape[1:]) * ITEM_BYTES[self.dtype]


@dataclass(eq=False)
class TensorFile:
    """An open safetensors file; several threads may read from it.

    `bytes_read` counts what `read` and `read_bytes` gave out, not `peek`. `pinned`: whether that lies in memory from
    which a GPU copies by itself, and which torch uses again for the next tensors.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    size: int
    header_hash: str  # SHA-256, hex, of the header's bytes and the file's size
    descriptor: int
    bytes_read: int = field(default=0, init=False)
    pinned: bool = field(default=False, init=False)
    _counting: Lock = field(default_factory=Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TensorFile:
        """Opens `path` and checks its header against its size. Reads no tensor.

        Raises CheckpointError for anything but one whole safetensors file: absent, a folder, empty, an LFS
        pointer, a web page, truncated, padded, a header that is no JSON, tensors that overlap or leave holes.
        """
        path = Path(path)
        descriptor = _open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            header = _header(path, descriptor, size)
            metadata, tensors = _parse(path, header)
            _check_layout(path, tensors, 8 + len(header), size)
        except BaseException:
            os.close(descriptor)
            raise
        digest = hashlib.sha256(header + str(size).encode()).hexdigest()
        return cls(path, tensors, metadata, size, digest, descriptor)

    def read(self, name: str, rows: Iterable[Range] | None = None, cols: Range | None = None) -> Tensor:
        """A tensor in own memory, or ranges of a matrix's rows, in their order, and one range of its columns.

        Only the bytes asked for are counted. Raises CheckpointError when the file ends early.
        """
        import torch

        info = self.tensors[name]
        assert cols is None or len(info.shape) == 2, (name, info.shape)
        item = ITEM_BYTES[info.dtype]
        span = None if cols is None else (cols[0] * item, cols[1] * item)
        raw = self.read_bytes(name, rows=rows, cols=span)  # [rows, bytes]
        if not info.shape:
            shape: tuple[int, ...] = ()
        else:
            shape = (raw.shape[0], *(info.shape[1:] if cols is None else (cols[1] - cols[0],)))
        return raw.view(-1).view(getattr(torch, TORCH_NAMES[info.dtype])).view(shape)

    def read_bytes(
        self,
        name: str,
        row_bytes: int | None = None,
        rows: Iterable[Range] | None = None,
        cols: Range | None = None,
    ) -> Tensor:
        """A tensor's bytes as a uint8 matrix, cut likewise; `row_bytes` wide, default a row of the tensor.

        `cols` counts bytes. Rows that follow each other in the file are read as one piece.
        """
        import torch

        info = self.tensors[name]
        width = info.row_bytes if row_bytes is None else row_bytes
        count = info.nbytes // width if width else 0
        ranges = ((0, count),) if rows is None else merge(rows)
        start, stop = cols if cols is not None else (0, width)
        assert 0 <= start <= stop <= width and all(0 <= a <= b <= count for a, b in ranges), (
            name,
            ranges,
            cols,
        )
        out = torch.empty((length(ranges), stop - start), dtype=torch.uint8, pin_memory=self.pinned)
        if stop - start == width:
            self._read_rows(name, info, width, ranges, memoryview(out.numpy()).cast("B") if out.numel() else None)
        else:
            self._copy_columns(info, width, ranges, (start, stop), out.numpy())
        with self._counting:
            self.bytes_read += out.numel()
        return out

    def peek(self, name: str) -> bytes:
        """The bytes of a small tensor (a scalar, a format's marker), read while opening and not counted."""
        info = self.tensors[name]
        data = os.pread(self.descriptor, info.nbytes, info.start)
        if len(data) != info.nbytes:
            raise CheckpointError(f"{self.path}: ended early while reading {name}")
        return data

    def _read_rows(
        self, name: str, info: TensorInfo, width: int, ranges: Iterable[Range], out: memoryview | None
    ) -> None:
        position = 0
        for start, stop in ranges if out is not None else ():
            offset, left = info.start + start * width, (stop - start) * width
            while left:
                done = os.preadv(self.descriptor, [out[position : position + left]], offset)
                if done == 0:
                    raise CheckpointError(f"{self.path}: ended early while reading {name}")
                position, offset, left = position + done, offset + done, left - done

    def _copy_columns(self, info: TensorInfo, width: int, ranges: Iterable[Range], cols: Range, out: Any) -> None:
        import numpy as np

        matrix = np.frombuffer(self._map, np.uint8, info.nbytes, info.start).reshape(-1, width)
        position = 0
        for start, stop in ranges:
            out[position : position + stop - start] = matrix[start:stop, cols[0] : cols[1]]
            position += stop - start

    @cached_property
    def _map(self) -> mmap.mmap:
        return mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)


def _open_regular(path: Path) -> int:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise CheckpointError(f"{path} is a folder; a single .safetensors file is needed")
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path} is no regular file")
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _header(path: Path, descriptor: int, size: int) -> bytes:
    head = os.pread(descriptor, 64, 0)
    if not head:
        raise CheckpointError(f"{path} is empty (0 bytes)")
    count = struct.unpack("<Q", head[:8])[0] if len(head) > 8 else LARGEST_HEADER + 1
    if count > LARGEST_HEADER or head[8:9] != b"{":
        start = head.lstrip().lower()
        found = next((meaning for mark, meaning in IMPOSTORS.items() if start.startswith(mark)), None)
        raise CheckpointError(f"{path} is {found or 'no safetensors file: it does not begin with a header'}")
    if 8 + count > size:
        raise CheckpointError(f"{path} is truncated: its header alone is {count} bytes, the file {size}")
    return os.pread(descriptor, count, 8)


def _parse(path: Path, header: bytes) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is no JSON: {error}") from None
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ of the header is no map of strings")
    return metadata, {name: _entry(path, name, entry, 8 + len(header)) for name, entry in entries.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return entries


def _entry(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the header's entry of {name!r} is malformed") from None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: {name!r} has the unknown dtype {dtype!r}")
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise CheckpointError(f"{path}: {name!r} has an illegal shape or offset")
    if prod(shape) * ITEM_BYTES[dtype] != stop - start:
        raise CheckpointError(
            f"{path}: {name!r} is {dtype} {list(shape)} = {prod(shape) * ITEM_BYTES[dtype]} bytes, "
            f"but its offsets hold {stop - start}"
        )
    return TensorInfo(dtype, shape, base + start, base + stop)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
    end = max((info.stop for info in tensors.values()), default=base)
    if end > size:
        raise CheckpointError(f"{path} is truncated: {size} bytes of {end}; download it again")
    if end < size:
        raise CheckpointError(f"{path} has {size - end} bytes after its last tensor: {size} where {end} are due")
    last, position = "the header", base
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start < position:
            raise CheckpointError(f"{path}: {name!r} overlaps {last}")
        if info.start > position:
            raise CheckpointError(f"{path}: {info.start - position} bytes before {name!r} belong to no tensor")
        last, position = repr(name), info.stop
