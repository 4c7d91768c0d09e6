"""Safetensors files written by hand, so that tests can write what no library would and damage the sound."""

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

SIZES = {"F64": 8, "F32": 4, "I64": 8, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "BOOL": 1}
Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> dtype, shape, bytes


def parse(path: Path) -> tuple[Tensors, dict[str, str]]:
    """A file's tensors and its metadata."""
    data = path.read_bytes()
    (count,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + count])
    metadata = header.pop("__metadata__", {})
    body = data[8 + count :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }, metadata


def write(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None, pad: int = 0) -> Path:
    """Writes a file; `pad` blanks end the header."""
    header, position = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        assert len(data) == prod(shape) * SIZES[dtype], name
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    body = b"".join(data for _, _, data in tensors.values())
    return raw(path, json.dumps(header).encode() + b" " * pad, body)


def raw(path: Path, header: bytes, body: bytes = b"") -> Path:
    """Writes a header of any bytes, its length before it, and a body."""
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)
    return path


def edited(source: Path, path: Path, edit: Callable[[Tensors], object]) -> Path:
    """A copy of a file whose tensors `edit` has changed in place."""
    tensors, metadata = parse(source)
    edit(tensors)
    return write(path, tensors, metadata)


def text(value: object) -> tuple[str, list[int], bytes]:
    """The tensor of a format's marker: JSON as bytes."""
    data = json.dumps(value).encode()
    return "U8", [len(data)], data


def scalar(value: float) -> tuple[str, list[int], bytes]:
    """A float32 scalar."""
    return "F32", [], struct.pack("<f", value)
