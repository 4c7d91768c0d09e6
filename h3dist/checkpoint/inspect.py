"""What a checkpoint file is, in words: kind, sizes, formats, bytes, metadata, notes, from its header."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from h3dist.checkpoint.comfy import StateFile, open_part
from h3dist.checkpoint.file import TensorFile
from h3dist.checkpoint.kinds import NAMES, find_parts, looks_like
from h3dist.errors import CheckpointError


def describe(path: str | os.PathLike[str]) -> str:
    """A few lines on a file. Raises CheckpointError for what is no whole and supported file of H3."""
    file = TensorFile.open(path)
    parts = find_parts(file)
    if not parts:
        raise CheckpointError(f"{file.path} is no H3 model: {looks_like(file.tensors)}")
    lines = [f"{file.path}: {file.size:,} bytes, {len(file.tensors)} tensors"]
    held = 0
    for kind in parts:
        state = open_part(file, kind)
        held += len(state.tensors)
        lines += [_title(state), *(f"  {line}" for line in _body(state))]
    if held < len(file.tensors):
        lines.append(f"{len(file.tensors) - held} tensors belong to no part that is known here")
    lines.append(f"metadata: {', '.join(sorted(file.metadata)) or 'none'}")
    return "\n".join(lines)


def _title(state: StateFile) -> str:
    form = getattr(state.dims, "form", None)
    prefix = f", names after {state.prefix!r}" if state.prefix else ""
    return f"{NAMES[state.kind].removeprefix('the ')}{f', {form} form' if form else ''}{prefix}"


def _body(state: StateFile) -> Iterator[str]:
    yield f"bytes: {sum(info.nbytes for info in state.tensors.values()):,}"
    yield "sizes: " + ", ".join(f"{name} {value}" for name, value in _sizes(state.dims))
    yield from _linears(state)
    yield "other tensors: " + ", ".join(f"{count} {dtype}" for dtype, count in _others(state).most_common())
    yield from (f"note: {note}" for note in state.notes)


def _sizes(dims: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(dims).items():
        if hasattr(value, "__dict__"):
            yield from ((f"{name} {inner}", size) for inner, size in _sizes(value))
        elif value != 0 and name != "form":
            yield name, value


def _linears(state: StateFile) -> Iterator[str]:
    """One line for each set of layers that differ by number alone and lie alike."""
    groups: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for layer, linear in state.linears.items():
        rows, cols = linear.storage.shape
        exact = " (full precision)" if linear.config and linear.config["full_precision_matrix_mult"] else ""
        group = (re.sub(r"\.\d+(?=\.)", ".*", layer), f"{linear.storage.format}{exact} [{rows}, {cols}]")
        groups[group] += 1
        sizes[group] += state.linear_bytes(layer)
    for (name, form), count in groups.items():
        yield f"{count} x {name}: {form}, {sizes[name, form]:,} bytes"


def _others(state: StateFile) -> Counter[str]:
    inside = {f"{layer}.{part}" for layer, linear in state.linears.items() for part in linear.storage.parts()}
    return Counter(
        info.dtype for name, info in state.tensors.items() if name not in inside and not name.endswith(".comfy_quant")
    )
