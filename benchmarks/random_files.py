"""A denoiser's file with random content, of the released layout and any number of blocks, written as fast as a disk
takes it: random bytes are drawn once and used again. To time reading; what such a model computes means nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from h3dist.checkpoint.denoiser_names import DenoiserDims, denoiser_table
from h3dist.checkpoint.file import ITEM_BYTES
from h3dist.checkpoint.storage import Extras, Nvfp4, Spec
from h3dist.checkpoint.tiny import BLOCK_LINEARS, FLOAT32

DRAWN = (64 << 20) + 4099  # bytes that are drawn; no power of two, so that tensors begin at other places of them
ORDER = ("F32", "BF16", "F16", "F8_E4M3", "U8")  # of the tensors in a file: the wide first, as safetensors writes them
MARKER = json.dumps({"format": "nvfp4"}).encode()
TEXT = ("condition_proj.", "token_refiner.")  # read by nothing that is timed: left as holes


@dataclass(frozen=True)
class Entry:
    """A tensor to write. content: "codes" and "scales" of NVFP4, "values" near 1, a "marker", or a "hole" of zeros."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


def write_denoiser(path: Path, dims: DenoiserDims, seed: int = 0) -> None:
    """Writes the file and has the disk take it."""
    listed = sorted(entries(dims), key=lambda entry: (ORDER.index(entry.dtype), entry.name))
    header, position = {}, 0
    for entry in listed:
        span = [position, position + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        position = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    drawn = contents(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in listed:
            write(file, entry, drawn)
        file.truncate()
        file.flush()


def entries(dims: DenoiserDims) -> Iterator[Entry]:
    """Every tensor of the file, with the dtypes of the released one."""
    for name, spec in denoiser_table(dims).items():
        if name.startswith("blocks.") and name.endswith(BLOCK_LINEARS):
            yield from _quantised(name.removesuffix(".weight"), spec)
        elif name.startswith(TEXT):
            yield Entry(name, "BF16", spec.shape, "hole")
        else:
            narrow = "F16" if "adaln_proj" in name else "BF16"
            yield Entry(name, "F32" if name.startswith(FLOAT32) else narrow, spec.shape, "values")


def _quantised(layer: str, spec: Spec) -> Iterator[Entry]:
    rows, columns = spec.shape
    contents = {"weight": "codes", "weight_scale": "scales", "weight_scale_2": "values"}
    for part, stored in Nvfp4((rows, columns), False, Extras(False, None)).parts().items():
        yield Entry(f"{layer}.{part}", stored.dtypes[0], stored.shape, contents[part])
    yield Entry(f"{layer}.comfy_quant", "U8", (len(MARKER),), "marker")


def contents(seed: int) -> dict[str, bytes]:
    """Bytes to take what is written from: any codes; scales from 1 to 1.875."""
    codes = np.random.default_rng(seed).integers(0, 256, DRAWN, dtype=np.uint8)
    return {"codes": codes.tobytes(), "scales": (codes & 0x07 | 0x38).tobytes()}


def write(file: BinaryIO, entry: Entry, drawn: dict[str, bytes]) -> None:
    """One tensor, where the file is."""
    if entry.content == "hole":
        file.seek(entry.nbytes, 1)
    elif entry.content == "marker":
        file.write(MARKER)
    elif entry.content == "values":
        file.write(_ones(entry.dtype) * (entry.nbytes // ITEM_BYTES[entry.dtype]))
    else:
        source, left = memoryview(drawn[entry.content]), entry.nbytes
        while left:
            left -= file.write(source[:left])


def _ones(dtype: str) -> bytes:
    """1 in a float dtype, as it lies in a file."""
    return {"F32": b"\x00\x00\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\x00\x3c"}[dtype]
