"""Measurements as Markdown: what they stand on, a table for each file, files side by side."""

from collections.abc import Sequence
from string import ascii_uppercase

from h3dist.report.rows import Row, Source, apart

GIB = 1 << 30
HEAD = (
    "shape", "layout", "ranks", "hardware", "runner", "attention", "step s (min to max)", "predicted s", "first s",
    "run s", "speed-up", "efficiency", "latents", "peak GiB", "sent GB",
)  # fmt: skip
ALWAYS = 3  # columns that every table has


def markdown(sources: Sequence[Source], pictures: Sequence[str] = ()) -> str:
    """The whole report; `pictures` are file names to show."""
    parts = [_section(source) for source in sources]
    if len(sources) > 1:
        parts.append(_side_by_side(sources))
    if pictures:
        parts.append("\n\n".join(f"![{name.removesuffix('.png').replace('-', ' ')}]({name})" for name in pictures))
    return "\n\n".join(parts) + "\n"


def _section(source: Source) -> str:
    facts = "\n".join(f"- {name}: {text}" for name, text in source.facts)
    parts = [f"## {source.title}", facts]
    if source.rows:
        parts.append(_rows_table(source.rows))
    notes = [f"- {row.shape} {row.layout} {row.ranks}: {row.note}" for row in source.rows if row.note]
    if len({row.note for row in source.rows}) > 1:  # else the facts say it
        parts.append("\n".join(notes))
    if source.faults:
        parts.append("Not measured:\n\n" + "\n".join(f"- {fault}" for fault in source.faults))
    return "\n\n".join(parts)


def _rows_table(rows: Sequence[Row]) -> str:
    """The columns that any row fills; the hardware where there are several."""
    lines = [_cells(row) for row in rows]
    several = len({row.hardware for row in rows}) > 1
    kept = [i for i, name in enumerate(HEAD) if i < ALWAYS or any(line[i] for line in lines)]
    kept = [i for i in kept if several or HEAD[i] != "hardware"]
    return _table([HEAD[i] for i in kept], [[line[i] for i in kept] for line in lines])


def _cells(row: Row) -> tuple[str, ...]:
    ranged = f" ({row.step_min:.3f} to {row.step_max:.3f})" if row.step_min is not None and row.step_max else ""
    base = f" (of {row.base})" if row.base > 1 and row.gained else ""
    return (
        row.shape,
        row.layout,
        str(row.ranks),
        row.hardware,
        row.runner or "",
        row.attention or "",
        f"{row.step:.3f}{ranged}" if row.step is not None else "",
        _number(row.predicted, "{:.3f}"),
        _number(row.first_step, "{:.3f}"),
        _number(row.total, "{:.1f}" if row.total and row.total >= 1 else "{:.4f}"),
        _number(row.speedup if row.gained else None, "{:.2f}") + base,
        _number(row.efficiency if row.gained else None, "{:.1%}"),
        "equal" if row.equal else _number(row.error, "{:.1e}"),
        _number(row.peak_memory and row.peak_memory / GIB, "{:.1f}"),
        _number(sum(row.counted.values()) / 1e9 if row.counted else None, "{:.2f}"),
    )


def _side_by_side(sources: Sequence[Source]) -> str:
    """What every file says of each shape, layout and number of ranks; of two files the ratio."""
    letters = ascii_uppercase[: len(sources)]
    rows = sorted((row for source in sources for row in source.rows), key=lambda row: (row.area, row.ranks, row.layout))
    lines = []
    for key in dict.fromkeys(map(_key, rows)):
        same = [[row for row in source.rows if _key(row) == key] for source in sources]
        ratio = [_ratio(*same)] if len(sources) == 2 else []
        lines.append([key[0], key[1], str(key[2]), *map(_beside, same), *ratio])
    head = ["shape", "layout", "ranks", *letters, *(["A / B"] if len(sources) == 2 else [])]
    legend = "\n".join(f"- {letter}: {source.title}" for letter, source in zip(letters, sources, strict=True))
    return f"## Side by side\n\nSeconds a step, and the efficiency.\n\n{legend}\n\n{_table(head, lines)}"


def _key(row: Row) -> tuple[str, str, int]:
    return row.shape, row.layout, row.ranks


def _beside(rows: Sequence[Row]) -> str:
    """What one file says of a shape, a layout and a number of ranks: every row of it, named where there are several."""
    return "; ".join(": ".join(filter(None, (name, _brief(row)))) for name, row in zip(apart(rows), rows, strict=True))


def _brief(row: Row) -> str:
    step = _number(row.step, "{:.3f}") or _number(row.total, "{:.1f} in all")
    efficiency = f"{row.efficiency:.1%}" if row.efficiency is not None and row.ranks > row.base else ""
    return " ".join(filter(None, (step, efficiency)))


def _ratio(first: Sequence[Row], second: Sequence[Row]) -> str:
    """How many times as long the first file's step takes, where each file has one."""
    if len(first) != 1 or len(second) != 1 or not first[0].step or not second[0].step:
        return ""
    return f"{first[0].step / second[0].step:.3f}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
