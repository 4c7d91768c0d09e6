"""Rows of a table of ways to decode: what each took, timed and told."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

BEGUN = time.monotonic()


@dataclass(frozen=True)
class Row:
    """What one way took: median seconds of a clip, or of a tile.

    `error` is relative, in the 2-norm, the largest of any tile looked at; `mean_levels` and `worst_levels` how far
    bytes of a clip's frames are apart; `first` seconds of the first call; `failed` why there are no figures.
    """

    name: str
    unit: str  # "clip" or "tile"
    seconds: float | None = None
    error: float | None = None
    equal: bool | None = None  # to the last bit
    first: float | None = None
    peak_memory: int | None = None
    failed: str | None = None
    mean_levels: float | None = None
    worst_levels: int | None = None
    runs: tuple[float, ...] = ()  # seconds of each


def clock(work: Callable[[], Any]) -> float:
    """Seconds of one run."""
    synchronise()
    begun = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - begun


def synchronise() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    """Peak memory is counted from here."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> int | None:
    """Bytes."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def told(error: Exception) -> str:
    """One line of it."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def shown(rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows, each printed as it comes; gains are against the first row of its unit."""
    head = ["way", "seconds", "gain", "relative error", "levels", "equal bits", "first call", "peak memory", "after"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    plain: dict[str, float] = {}
    for row in rows:
        print(f"| {' | '.join(cells(row, plain))} | {time.monotonic() - BEGUN:.0f} s |", flush=True)
        yield row


def cells(row: Row, plain: dict[str, float]) -> list[str]:
    """A row as words."""
    if row.seconds is None:
        return [row.name, row.failed or "", "", "", "", "", "", ""]
    against = plain.setdefault(row.unit, row.seconds)
    time_ = f"{row.seconds:.3f} s a clip" if row.unit == "clip" else f"{1e3 * row.seconds:.2f} ms a tile"
    error = "" if row.error is None else f"{row.error:.1e}"
    levels = "" if row.mean_levels is None else f"{row.mean_levels:.3f}, at most {row.worst_levels}"
    equal = "" if row.equal is None else ("yes" if row.equal else "no")
    memory = "" if row.peak_memory is None else f"{row.peak_memory / 1e9:.1f} GB"
    return [row.name, time_, f"{against / row.seconds:.2f}", error, levels, equal, f"{row.first:.2f} s", memory]
