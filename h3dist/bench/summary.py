"""A benchmark's record in words: a Markdown table for each shape. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any


def summary(record: Mapping[str, Any]) -> str:
    """Every part at every shape, the ratios, and what failed."""
    made, layout = record["environment"], record["layout"]
    said = (
        made["device"],
        f"sp {layout['sp']} x tp {layout['tp']}",
        record["dtype"],
        f"torch {made['torch']}",
        made["made"],
    )
    lines = [", ".join(said)]
    for entry in record["shapes"]:
        lines += ["", *_shape(entry)]
    lines += [f"failed: {name}: {why}" for name, why in record.get("failed", {}).items()]
    return "\n".join(lines)


def _shape(entry: Mapping[str, Any]) -> Iterator[str]:
    yield f"{entry['shape']}, {entry['rows']} rows"
    yield ""
    yield "| part | ms | least to most | rate |"
    yield "| --- | --- | --- | --- |"
    for name, part in _flat(entry["parts"]):
        spread = f"{_ms(part['min'])} to {_ms(part['max'])}" if "min" in part else ""
        yield f"| {name} | {_ms(part['seconds'])} | {spread} | {_rate(part)} |"
    yield from _variants(entry)
    yield from _ratios(entry["ratios"])
    yield from (f"failed: {name}: {why}" for name, why in entry["failed"].items())


def _variants(entry: Mapping[str, Any]) -> Iterator[str]:
    if not entry.get("variants"):
        return
    yield ""
    yield "| step | ms | x floor | x steady floor | diffusers x | plain x | error | GB resident | GB at most |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, found in entry["variants"].items():
        told = entry["ratios"]["variants"][name]
        keys = "step_to_floor", "step_to_steady_floor", "diffusers_to_step", "plain_to_step"
        numbers = [told.get(key) for key in keys]
        memory = [f"{found[key] / 1e9:.2f}" for key in ("resident_bytes", "peak_bytes")]
        error = "" if found["error"] is None else f"{found['error']:.2e}"
        cells = [_ms(found["seconds"]), *("" if value is None else f"{value:.3f}" for value in numbers), error, *memory]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    for name, found in entry["variants"].items():
        if "offload" in found:
            moved, rate, alone, pinned = (f"{number / 1e9:.4g}" for number in found["offload"].values())
            yield f"{name}: {moved} GB of blocks a step, at {rate} GB/s; at {alone} with nothing done between"
            yield f"{name}: {pinned} GB of pinned memory"


def _flat(found: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, part in found.items():
        if "seconds" in part:
            yield name, part
        else:
            yield from ((f"{name} {inner}", each) for inner, each in part.items())


def _ratios(found: Mapping[str, Any]) -> Iterator[str]:
    if "step_to_floor" in found:
        floor = f"{_ms(found['floor_seconds'])} ms, {found['floor_products']} and {found['floor_attention']} alone"
        yield f"step: {found['step_to_floor']:.3f} x its floor ({floor})"
    if "diffusers_to_step" in found:
        yield f"diffusers: {found['diffusers_to_step']:.3f} x our step"
    if "step_unexplained_seconds" in found:
        yield f"step: {_ms(found['step_unexplained_seconds'])} ms that no part accounts for"


def _rate(part: Mapping[str, Any]) -> str:
    if "flop_per_second" in part:
        return f"{part['flop_per_second'] / 1e12:.3g} TFLOP/s"
    if "bytes_per_second" in part:
        return f"{part['bytes_per_second'] / 1e9:.4g} GB/s"
    return f"{part['peak_bytes'] / 1e9:.1f} GB at most" if part.get("peak_bytes") else ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}"
