"""A benchmark's record as rows of the table of rates, each with where it comes from. Imports no torch."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from h3dist.bench.spec import Spec
from h3dist.errors import ConfigError
from h3dist.plan import Layout, Plan
from h3dist.plan.cost import elementwise_bytes
from h3dist.plan.rates import TABLE, DeviceRates, Rates, read_rates

Row = dict[str, Any]
RATED = {
    "products": "product",
    "products_fp4": "product.nvfp4",
    "products_fp8": "product.fp8",
    "products_int8": "product.int8",
}


def read_record(path: Path) -> dict[str, Any]:
    """A file that `h3dist bench --out` wrote. Raises ConfigError for any other."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no benchmark can be read from it: {error}") from None
    if not isinstance(record, dict) or (record.get("form"), record.get("version")) != ("h3dist-bench", 1):
        raise ConfigError(f"{path} is no record of h3dist bench, version 1")
    return record


def rows_of(record: Mapping[str, Any], table: Rates) -> list[Row]:
    """The rates that a record measured, of its device's class. Raises ConfigError for a device without a class."""
    name = record["environment"]["device"]
    device = table.device(name)
    if device is None:
        raise ConfigError(f"{name} is of no class in the table of rates: add one to {TABLE.name} first")
    made = record["environment"]
    shapes = [entry for entry in record["shapes"] if entry["parts"]]
    sizes = ", ".join(str(entry["rows"]) for entry in shapes)
    commit = f", commit {made['commit'][:12]}" if made["commit"] else ""
    source = f"h3dist bench at {sizes} rows, torch {made['torch']}{commit}"
    common = {"kind": "measured", "date": made["made"][:10], "source": source}
    own = [{"of": device.name, **row, **common} for row in _rates(record, shapes)]
    return own + [row | common for row in _links(record, shapes, device)]


def refreshed(text: str, rows: Sequence[Row]) -> str:
    """The table's text with these rows in the places of those of the same device and quantity."""
    table = json.loads(text)
    kept = [dict(row) for row in table["rows"]]
    for row in rows:
        places = [i for i, old in enumerate(kept) if (old["of"], old["what"]) == (row["of"], row["what"])]
        after = max((i for i, old in enumerate(kept) if old["of"] == row["of"]), default=len(kept) - 1)
        if places:
            kept[places[0]] = _ordered(row)
        else:
            kept.insert(after + 1, _ordered(row))
    return written(table | {"rows": kept})


def written(table: Mapping[str, Any]) -> str:
    """The table as it is shipped: one class or row a line, a blank line before the rows of another device."""
    classes = ",\n".join(f"    {_line(entry)}" for entry in table["classes"])
    rows, last = [], None
    for row in table["rows"]:
        blank = "\n" if last not in (None, row["of"]) and not (_is_link(last) and _is_link(row["of"])) else ""
        rows.append(f"{blank}    {_line(row)}")
        last = row["of"]
    body = ",\n".join(rows)
    return f'{{\n  "version": {table["version"]},\n  "classes": [\n{classes}\n  ],\n  "rows": [\n{body}\n  ]\n}}\n'


def refresh(record_path: Path, table_path: Path = TABLE) -> list[Row]:
    """Put a record's rates into a table file; gives the rows."""
    rows = rows_of(read_record(record_path), read_rates(table_path))
    table_path.write_text(refreshed(table_path.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return rows


def _rates(record: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for part, what in RATED.items():
        found = [entry["parts"][part]["all"] for entry in shapes if part in entry["parts"]]
        if found:
            suffix = f".{record['dtype']}" if what == "product" else ""
            yield _row(what + suffix, _over(found, "flop"), "FLOP/s")
    names = sorted({name for entry in shapes for name in entry["parts"] if name.startswith("attention.")})
    for name in names:
        yield _row(name, _over([e["parts"][name] for e in shapes if name in e["parts"]], "flop"), "FLOP/s")
    for part in ("dequantise", "copy"):
        found = [entry["parts"][part] for entry in shapes if part in entry["parts"]]
        if found:
            yield _row(part, _over(found, "bytes"), "B/s")
    yield from _elementwise(record, shapes)
    hosts = [entry["parts"]["host"]["seconds"] for entry in shapes if "host" in entry["parts"]]
    if hosts:
        yield _row("launch", median(hosts), "s/block")


def _elementwise(record: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """From what steps leave beside their other parts, where one rank ran them: so the table adds up to steps.

    Else from the part that was timed alone.
    """
    whole = [
        entry for entry in shapes if "step_unexplained_seconds" in entry["ratios"] and "elementwise" in entry["parts"]
    ]
    alone = [entry["parts"]["elementwise"] for entry in shapes if "elementwise" in entry["parts"]]
    if whole and record["layout"] == {"dp": 1, "sp": 1, "tp": 1}:
        seconds = sum(
            entry["ratios"]["step_unexplained_seconds"] + entry["blocks"] * entry["parts"]["elementwise"]["seconds"]
            for entry in whole
        )
        if seconds > 0:
            yield _row("elementwise", sum(_moved(record, entry) for entry in whole) / seconds, "B/s")
            return
    if alone:
        yield _row("elementwise", _over(alone, "bytes"), "B/s")


def _links(record: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], device: DeviceRates) -> Iterator[Row]:
    """What the exchange over sp reached, where one kind of link joins all GPUs; a message's latency is not told."""
    found = [entry["parts"]["exchange"] for entry in shapes if "heads.to" in entry["parts"].get("exchange", {})]
    if not found or len(record["environment"]["links"]) != 1:
        return
    kind = record["environment"]["links"][0]
    reached = _over([part[label] for part in found for label in ("heads.to", "heads.from")], "bytes")
    if kind.startswith("NV"):
        count = int(kind.removeprefix("NV")) if kind != "NVL" else 1
        yield {"of": "NV"} | _row("efficiency", reached / (count * device.nvlink), "")
    else:
        yield {"of": kind} | _row("bandwidth", reached, "B/s")


def _moved(record: Mapping[str, Any], entry: Mapping[str, Any]) -> float:
    plan: Plan = Spec.from_dict(record["spec"]).plan(
        entry["shape"], Layout(), dtype=record["dtype"], capability=None, steps=1
    )
    return elementwise_bytes(plan, plan.shares[0])


def _over(parts: Sequence[Mapping[str, Any]], quantity: str) -> float:
    """One rate of all shapes: what was done in all, over the seconds it took in all."""
    return sum(part[quantity] for part in parts) / sum(part["seconds"] for part in parts)


def _row(what: str, value: float, unit: str) -> Row:
    return {"what": what, "value": float(f"{value:.4g}"), "unit": unit}


def _ordered(row: Row) -> Row:
    order = ("of", "what", "value", "unit", "kind", "date", "source")
    return {name: row[name] for name in order if name in row}


def _line(entry: Mapping[str, Any]) -> str:
    parts = (
        f"{json.dumps(key)}: {_number(value) if key == 'value' else json.dumps(value)}" for key, value in entry.items()
    )
    return f"{{{', '.join(parts)}}}"


def _number(value: float) -> str:
    """Four digits, the exponent short: 7.45e14."""
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{value:.4g}")


def _is_link(of: str | None) -> bool:
    return of in ("NV", "NV copy", "PIX", "PXB", "PHB", "NODE", "SYS", "SHM", "HOST")
