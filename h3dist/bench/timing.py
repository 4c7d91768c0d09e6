"""How long work takes: by CUDA events on a GPU, by the clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

WARM = 2  # runs before those that count: allocations, plans, clocks
BUSY = 0.5  # seconds of work after which a GPU's clocks are those of a long run


@dataclass(frozen=True)
class Timing:
    """Seconds of each run that counts."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    def as_dict(self, **more: float) -> dict[str, float | int]:
        """Median, least and most, and `more` facts beside them."""
        spread = {"seconds": self.median, "min": min(self.seconds), "max": max(self.seconds)}
        return spread | {"repeats": len(self.seconds)} | more


@dataclass(frozen=True)
class Clock:
    """Times work on a device, `repeats` times after WARM runs."""

    device: torch.device
    repeats: int

    def time(self, work: Callable[[], object], warm: int = WARM) -> Timing:
        """Seconds of `work` on the device; on a GPU what the host does meanwhile does not count."""
        for _ in range(warm):
            work()
        once = self._by_events if self.device.type == "cuda" else _by_clock
        return Timing(tuple(once(work) for _ in range(self.repeats)))

    def steady(self, work: Callable[[], object], seconds: float) -> float:
        """Median seconds of `work`, which takes about `seconds`, in a device that has been at it for BUSY seconds and
        never waits: a step's own state, in which power keeps clocks lower than in a short burst.
        """
        if self.device.type != "cuda":
            return seconds
        for _ in range(int(BUSY / seconds) + 1):
            work()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self.repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        self.settle()
        return median(before.elapsed_time(after) / 1000 for before, after in pairwise(marks))

    def host_time(self, work: Callable[[], object], warm: int = WARM) -> Timing:
        """Seconds that the host takes to start `work`, with nothing before it in the device's queue."""
        seconds = []
        for run in range(warm + self.repeats):
            self.settle()
            begun = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begun)
            if run < warm:
                seconds.clear()
        self.settle()
        return Timing(tuple(seconds))

    def settle(self) -> None:
        """Waits until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _by_events(self, work: Callable[[], object]) -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        work()
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / 1000


def _by_clock(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
