"""What a file holds against what it must hold: formats, names, shapes, dtypes, scalar scales."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from h3dist.checkpoint.file import TensorFile, TensorInfo
from h3dist.checkpoint.storage import FORMATS, PLAIN_NAMES, Spec, Storage, storage_of
from h3dist.errors import CheckpointError

MARKER = "comfy_quant"
KNOWN_FIELDS = {
    "format", "full_precision_matrix_mult", "convrot", "convrot_groupsize", "group_size", "linear_dtype",
    "params",
}  # fmt: skip
NAMES_SHOWN = 5


@dataclass(frozen=True)
class Linear:
    """One linear layer's weight: how it lies in the file, and its marker (None: plain)."""

    storage: Storage
    config: dict[str, Any] | None


def check(
    file: TensorFile,
    prefix: str,
    tensors: Mapping[str, TensorInfo],
    table: Mapping[str, Spec],
    ignorable: re.Pattern[str],
) -> tuple[dict[str, Linear], tuple[str, ...]]:
    """The linear layers of a part of a file, and notes. `tensors` and `table` are by name without `prefix`.

    Raises CheckpointError, each with a count and five names: a format that is not supported, tensors missing
    or unexpected, of a wrong shape or dtype, scalar scales that are not finite and positive.
    """
    ignored = sorted(name for name in tensors if ignorable.fullmatch(name))
    tensors = {name: info for name, info in tensors.items() if name not in set(ignored)}
    configs = markers(file, prefix, tensors)
    layers = [name.removesuffix(".weight") for name, spec in table.items() if spec.linear]
    linears = {layer: _linear(layer, tensors, table[f"{layer}.weight"], configs) for layer in layers}
    due = {name: spec for name, spec in table.items() if not spec.linear}
    for layer, linear in linears.items():
        due |= {f"{layer}.{part}": spec for part, spec in linear.storage.parts().items()}
    marks = {f"{layer}.{MARKER}" for layer, linear in linears.items() if linear.config}
    _check_names(file.path, due.keys(), tensors.keys() - marks)
    _check_specs(file.path, due, tensors)
    _check_scalars(file, prefix, due, tensors)
    notes = [f"left out, as not used here: {some(ignored)}"] if ignored else []
    return linears, (*notes, *_field_notes(configs))


def markers(file: TensorFile, prefix: str, tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """Layer name -> its marker, with `format` and `full_precision_matrix_mult` filled in.

    From the `comfy_quant` tensors and the `_quantization_metadata` of the header; the tensor wins. Raises
    CheckpointError for a marker that cannot be read, and for a format that is not supported, naming it.
    """
    if "scaled_fp8" in tensors:
        raise _unsupported(file, "float8_e4m3fn (the older `scaled_fp8` files)", ["scaled_fp8"])
    raw = {name.removeprefix(prefix): value for name, value in _metadata_markers(file).items()}
    raw = {name: value for name, value in raw.items() if f"{name}.weight" in tensors}
    for name in tensors:
        if name.endswith(f".{MARKER}"):
            raw[name.removesuffix(f".{MARKER}")] = _json(file, name, file.peek(prefix + name))
    configs = {layer: _config(file, layer, value) for layer, value in raw.items()}
    formats: dict[str, list[str]] = {}
    for layer, config in configs.items():
        formats.setdefault(_format_name(config), []).append(layer)
    for name, layers in formats.items():
        if name not in FORMATS:
            raise _unsupported(file, name, layers)
    return configs


def some(names: Iterable[str]) -> str:
    """The first five names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def numbers(file: TensorFile, name: str) -> tuple[float, ...]:
    """The values of a small float tensor (full name), without torch."""
    data, dtype = file.peek(name), file.tensors[name].dtype
    if dtype == "BF16":  # the upper half of a float32
        data, dtype = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2)), "F32"
    code, size = {"F32": ("f", 4), "F16": ("e", 2), "F64": ("d", 8)}[dtype]
    return struct.unpack(f"<{len(data) // size}{code}", data)


def positive(file: TensorFile, name: str) -> None:
    """Raises CheckpointError unless every value of a small tensor (full name) is finite and above zero."""
    bad = [value for value in numbers(file, name) if not (isfinite(value) and value > 0)]
    if bad:
        raise CheckpointError(f"{file.path}: {name} holds {bad[0]}; it must be finite and above zero")


def _linear(layer: str, tensors: Mapping[str, TensorInfo], spec: Spec, configs: Mapping[str, dict[str, Any]]) -> Linear:
    own = {part: tensors[f"{layer}.{part}"] for part in _PARTS if f"{layer}.{part}" in tensors}
    config = configs.get(layer)
    rows, *rest = spec.shape
    assert len(rest) == 1, (layer, spec.shape)
    return Linear(storage_of((rows, rest[0]), config, own), config)


_PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")


def _metadata_markers(file: TensorFile) -> dict[str, Any]:
    text = file.metadata.get("_quantization_metadata")
    if text is None:
        return {}
    layers = _json(file, "_quantization_metadata", text.encode())
    layers = layers.get("layers") if isinstance(layers, dict) else None
    if not isinstance(layers, dict):
        raise CheckpointError(f"{file.path}: _quantization_metadata of the header has no map `layers`")
    return layers


def _json(file: TensorFile, name: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file.path}: {name} is no JSON: {data[:60]!r}") from None


def _config(file: TensorFile, layer: str, value: Any) -> dict[str, Any]:
    config = {"format": value} if isinstance(value, str) else value
    if not isinstance(config, dict) or not isinstance(config.get("format"), str):
        raise CheckpointError(f"{file.path}: the marker of {layer} names no format: {value!r}")
    config = {"full_precision_matrix_mult": False} | config
    if not isinstance(config["full_precision_matrix_mult"], bool):
        raise CheckpointError(f"{file.path}: full_precision_matrix_mult of {layer} is neither true nor false")
    return config


def _format_name(config: Mapping[str, Any]) -> str:
    params = config.get("params")
    rotated = config.get("convrot") or (isinstance(params, dict) and params.get("convrot"))
    return config["format"] + (" with convrot" if rotated else "")


def _field_notes(configs: Mapping[str, dict[str, Any]]) -> list[str]:
    unknown = sorted({key for config in configs.values() for key in config} - KNOWN_FIELDS)
    return [f"markers of formats have fields that are not known here: {some(unknown)}"] if unknown else []


def _unsupported(file: TensorFile, name: str, layers: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: the format {name} is not supported yet ({len(layers)} layers: {some(layers)}); "
        f"supported are {', '.join([*PLAIN_NAMES.values(), *FORMATS])}"
    )


def _check_names(path: Path, due: Iterable[str], found: Iterable[str]) -> None:
    missing, unexpected = sorted(set(due) - set(found)), sorted(set(found) - set(due))
    faults = [f"{len(names)} tensors are {word}: {some(names)}" for word, names in
              (("missing", missing), ("unexpected", unexpected)) if names]  # fmt: skip
    if faults:
        raise CheckpointError(f"{path}: " + "; ".join(faults))


def _check_specs(path: Path, due: Mapping[str, Spec], tensors: Mapping[str, TensorInfo]) -> None:
    wrong = [
        f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, not {spec}"
        for name, spec in due.items()
        if not spec.fits(tensors[name])
    ]
    if wrong:
        raise CheckpointError(f"{path}: {len(wrong)} tensors have a wrong shape or dtype: {some(wrong)}")


def _check_scalars(file: TensorFile, prefix: str, due: Mapping[str, Spec], tensors: Mapping[str, TensorInfo]) -> None:
    for name, spec in due.items():
        if spec.shape == () and tensors[name].dtype == "F32":
            positive(file, prefix + name)
