"""A file of single measurements that `h3dist report` reads: one point after the other, each kept once."""

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

SCHEMA, VERSION = "h3dist.measured", 1
SAME = ("ranks", "layout", "shape", "runner", "hardware")  # what tells a point from the others


def keep(path: Path, title: str, point: dict[str, Any], **facts: Any) -> None:
    """Adds a point to the file, in the place of one of the same kind; `facts` are told above the table."""
    document = {"schema": SCHEMA, "schema_version": VERSION, "title": title, "facts": {}, "points": []}
    if path.is_file():
        document = json.loads(path.read_text(encoding="utf-8"))
    told = {"measured": date.today().isoformat()} | facts
    others = [other for other in document["points"] if not _same(other, point)]
    document |= {"facts": document["facts"] | told, "points": [*others, point]}
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in SAME)
