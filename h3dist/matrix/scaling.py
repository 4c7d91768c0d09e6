"""What the cells say together: spreads over steps, ranks and repeats, and the gain over one rank of the same shape."""

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from h3dist.matrix.cells import PLAINLY

Record = dict[str, Any]
FIGURES = 6  # digits after the point, of seconds and ratios


def spread(values: Iterable[float]) -> Record | None:
    """The smallest, the median, the largest of `values`, and how many they are; None for none."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    return {
        "min": round(min(found), FIGURES),
        "median": round(median(found), FIGURES),
        "max": round(max(found), FIGURES),
        "count": len(found),
    }


def family(cell: Mapping[str, Any]) -> str:
    """What two cells must share for their latents to be comparable: the shape, and all settings of the matrix."""
    return json.dumps([cell["shape"], cell["settings"]], sort_keys=True)


def group(cell: Mapping[str, Any]) -> str:
    """What repeats of one measurement share."""
    return json.dumps([family(cell), cell["asked"], cell["ranks"], cell["attention"], moved(cell)])


def moved(cell: Mapping[str, Any]) -> str:
    """The word for how heads moved; files from before there were several ways do not say it."""
    return cell.get("exchange", PLAINLY)


def done(cells: Iterable[Record]) -> list[Record]:
    """The cells that have figures."""
    return [cell for cell in cells if cell["state"] == "done"]


def add_gains(cells: Sequence[Record]) -> None:
    """Write into every done cell its speed-up over the one rank of its shape, settings and attention: warm steps."""
    finished = done(cells)
    for cell in finished:
        base = _one_rank(cell, finished)
        own = cell["seconds"]["warm"]
        gain = base / own["median"] if base and own else None
        cell["speedup"] = None if gain is None else round(gain, FIGURES)
        cell["efficiency"] = None if gain is None else round(gain / cell["ranks"], FIGURES)


def _one_rank(cell: Record, finished: Iterable[Record]) -> float | None:
    """Median seconds of a warm step on one rank, over its repeats."""
    same = [
        other["seconds"]["warm"]["median"]
        for other in finished
        if other["ranks"] == 1 and other["attention"] == cell["attention"] and family(other) == family(cell)
        if other["seconds"]["warm"]
    ]
    return median(same) if same else None


def summarise(cells: Sequence[Record]) -> list[Record]:
    """One entry for every group of repeats, in the order of their first: spreads over all that was measured."""
    groups: dict[str, list[Record]] = {}
    for cell in done(cells):
        groups.setdefault(group(cell), []).append(cell)
    return [_summary(repeats) for repeats in groups.values()]


def _summary(repeats: Sequence[Record]) -> Record:
    first = repeats[0]
    seconds = [cell["seconds"] for cell in repeats]
    stages = {name for cell in seconds for name in cell["stages"]}
    shared = ("shape", "asked", "ranks", "layout", "attention", "settings")
    return {name: first[name] for name in shared} | {
        "exchange": moved(first),
        "cells": [cell["key"] for cell in repeats],
        "predicted_step_seconds": first["predicted"]["step_seconds"],
        "step_seconds": spread(step for cell in seconds for step in cell["steps"][1:]),
        "first_step_seconds": spread(cell["first_step"] for cell in seconds),
        "load_seconds": spread(cell["load"] for cell in seconds),
        "wall_seconds": spread(cell["wall"] for cell in seconds),
        "stage_seconds": {
            name: spread(cell["stages"][name]["max"] for cell in seconds if name in cell["stages"])
            for name in sorted(stages, key=list(seconds[0]["stages"]).index)
        },
        "speedup": _middle(cell["speedup"] for cell in repeats),
        "efficiency": _middle(cell["efficiency"] for cell in repeats),
        "relative_error": _largest(cell["parity"]["relative_error"] for cell in repeats),
        "repeats_equal": len({cell["latents"]["sha256"] for cell in repeats}) == 1 if len(repeats) > 1 else None,
        "bytes_planned": first["bytes"]["planned"],
        "bytes_counted": first["bytes"]["counted"],
        "peak_memory": max(peak for cell in repeats for peak in cell["memory"]["peak"]),
    }


def _largest(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return max(found) if found else None


def _middle(values: Iterable[float | None]) -> float | None:
    found = spread(value for value in values if value is not None)
    return found["median"] if found else None
