"""The matrix while it runs: a live table on a terminal, a line a cell elsewhere. On stderr."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from h3dist.matrix.cells import PLAINLY
from h3dist.matrix.scaling import moved

COLUMNS = (
    "shape",
    "layout",
    "ranks",
    "attention",
    "#",
    "state",
    "first s",
    "step s",
    "speed-up",
    "efficiency",
    "latents",
)
STYLES = {"done": "green", "running": "cyan", "skipped": "dim", "pending": "dim"}


class LiveTable:
    """Shows records as they change; `changed` says which one did."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._console = Console(stderr=True)
        self._records = records
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> "LiveTable":
        if self._live:
            self._live.start()
            self._live.update(table(self._records), refresh=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def changed(self, record: Mapping[str, Any]) -> None:
        """Show how this cell stands now."""
        if self._live:
            self._live.update(table(self._records), refresh=True)
        elif record["state"] != "running":
            self._console.print(f"h3dist: {line(record)}", highlight=False, soft_wrap=True, markup=False)


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """All cells but those skipped, which are counted."""
    skipped = sum(record["state"] == "skipped" for record in records)
    made = Table(*COLUMNS, caption=f"{skipped} skipped" if skipped else None)
    for record in records:
        if record["state"] != "skipped":
            made.add_row(*cells(record), style=STYLES.get(record["state"], "red"))
    return made


def cells(record: Mapping[str, Any]) -> tuple[str, ...]:
    """A record as the table's cells; empty where there is no figure yet."""
    shape, seconds = record["shape"], record.get("seconds")
    warm = seconds and seconds["warm"]
    return (
        f"{shape['width']}x{shape['height']}x{shape['frames']}",
        record["asked"] if moved(record) == PLAINLY else f"{record['asked']} {moved(record)}",
        str(record["ranks"]),
        record["attention"],
        str(record["repeat"]),
        record["state"],
        f"{seconds['first_step']:.3f}" if seconds else "",
        f"{warm['median']:.3f}" if warm else "",
        _number(record.get("speedup"), "{:.2f}"),
        _number(record.get("efficiency"), "{:.0%}"),
        latents(record),
    )


def latents(record: Mapping[str, Any]) -> str:
    """How far a cell's latents are from the first cell's of its shape: first, equal, or the relative error."""
    parity = record.get("parity")
    if parity is None:
        return ""
    if parity["reference"] == record["key"]:
        return "first"
    return "equal" if parity["equal"] else _number(parity["relative_error"], "{:.1e}") or "not equal"


def line(record: Mapping[str, Any]) -> str:
    """A record on one line."""
    if record["state"] == "skipped":
        return f"{record['name']}: skipped: {record['reason']}"
    if record["state"] != "done":
        return f"{record['name']}: {record['state']}: {(record['cause'] or {}).get('message', '')}"
    *_, step, speedup, efficiency, error = cells(record)
    gain = f", {speedup} x one rank, {efficiency}" if speedup else ""
    return f"{record['name']}: {step or 'one'} s a step{gain}{f', latents {error}' if error else ''}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
