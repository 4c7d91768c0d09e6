"""What the figures of one shape say together: a step against its floor, against diffusers', and what explains it.

The floor is what the blocks' products and the fastest exact attention take alone: in short bursts, and, "steady", in a
GPU that has been busy with them for as long as a step keeps it.
"""

from collections.abc import Mapping
from typing import Any


def ratios(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A step against its floor (products and the fastest exact attention, alone, in every block) and diffusers'."""
    found, blocks = entry["parts"], entry["blocks"]
    exact = {
        name.removeprefix("attention."): part["seconds"]
        for name, part in found.items()
        if name.startswith("attention.") and part["exact"]
    }
    products = found.get("products_fp4", found.get("products"))
    made: dict[str, Any] = {}
    if exact and products:
        best = min(exact, key=lambda name: exact[name])
        floor = blocks * (products["all"]["seconds"] + exact[best])
        kind = "products_fp4" if "products_fp4" in found else "products"
        made |= {"floor_seconds": floor, "floor_attention": best, "floor_products": kind}
        if "steady" in products["all"]:
            made["steady_floor_seconds"] = blocks * (products["all"]["steady"] + found[f"attention.{best}"]["steady"])
        if "step" in found:
            made |= _to_floors(found["step"]["seconds"], made)
    if "step" in found and "diffusers" in found:
        made["diffusers_to_step"] = found["diffusers"]["seconds"] / found["step"]["seconds"]
    if "step" in found and exact and products:
        made["step_unexplained_seconds"] = found["step"]["seconds"] - blocks * _explained(entry)
    if entry.get("variants"):
        made["variants"] = varied(entry, made)
    return made


def varied(entry: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Each variant's step against the floor of exact ones, the plain step and diffusers', as far as those are there."""
    others = {"plain_to_step": "step", "diffusers_to_step": "diffusers"}
    seconds = {label: entry["parts"][name]["seconds"] for label, name in others.items() if name in entry["parts"]}
    told: dict[str, Any] = {}
    for name, variant in entry.get("variants", {}).items():
        told[name] = {label: other / variant["seconds"] for label, other in seconds.items()}
        told[name] |= _to_floors(variant["seconds"], made)
    return told


def _to_floors(seconds: float, made: Mapping[str, Any]) -> dict[str, float]:
    """A step over the floors that are known."""
    floors = {"step_to_floor": "floor_seconds", "step_to_steady_floor": "steady_floor_seconds"}
    return {label: seconds / made[name] for label, name in floors.items() if name in made}


def _explained(entry: Mapping[str, Any]) -> float:
    """Seconds of a block that parts measured alone account for, at the step's own attention."""
    found = entry["parts"]
    fp4 = "products_fp4" in found
    names = ["elementwise"] if fp4 else ["elementwise", "dequantise"]
    attention = found.get(f"attention.{entry['attention']}", {"seconds": 0.0})["seconds"]
    exchange = found.get("exchange", {})
    talk = sum(part["seconds"] * {"rows.gather": 2, "rows.reduce": 2}.get(label, 1) for label, part in exchange.items())
    products = found["products_fp4" if fp4 else "products"]["all"]["seconds"]
    return products + attention + talk + sum(found[name]["seconds"] for name in names if name in found)
