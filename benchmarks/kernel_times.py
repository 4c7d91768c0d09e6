"""What a trace's kernels say, as pure arithmetic: of what kind each is, how long, and what ran beside what.

A kernel's time is its own; kernels that run side by side are counted each. A union counts what is covered once.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CATEGORIES = ("products", "attention", "dequantise", "exchange", "packing", "elementwise")
ATTENTION, EXCHANGE = "trace.attention", "trace.exchange"  # ranges of the host, in which kernels are launched
BY_NAME = (  # the first that fits; flash-attn-4's kernels are called cutlass too
    ("exchange", re.compile(r"nccl|gloo|c10d|memcpy ptop|memcpy peer", re.I)),
    ("attention", re.compile(r"flash|fmha|sdpa|attention|attn", re.I)),
    ("dequantise", re.compile(r"dequant", re.I)),
    ("products", re.compile(r"gemm|cutlass|nvjet|xmma|wgmma|cublas|splitk|aten::(linear|addmm|mm|bmm|matmul)\b", re.I)),
)
Span = tuple[float, float]


@dataclass(frozen=True)
class Kernel:
    """One of a trace: when it ran, in microseconds, and in which of the host's ranges it was launched, if in one.

    aside: on another stream than the step's own.
    """

    name: str
    start: float
    stop: float
    within: str | None = None
    aside: bool = False

    @property
    def category(self) -> str:
        """By its name; what has none that says it belongs to the range it was launched in."""
        found = next((kind for kind, names in BY_NAME if names.search(self.name)), None)
        if self.within == ATTENTION and found != "exchange":
            return "attention"
        if self.within == EXCHANGE:
            return found or ("exchange" if self.aside else "packing")  # copies between GPUs may be called as any others
        return found or "elementwise"


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def length(spans: Iterable[Span]) -> float:
    """How much time spans cover in all, what several cover counted once."""
    return sum(stop - start for start, stop in union(spans))


def shared(one: Sequence[Span], other: Sequence[Span]) -> float:
    """How much time both cover."""
    return length(one) + length(other) - length([*one, *other])


def summary(kernels: Sequence[Kernel], blocks: int) -> dict[str, float | dict[str, float]]:
    """Milliseconds a block of a trace of `blocks` blocks in all: by category, idle, wall; what of the exchange shows.

    exposed: while kernels of the exchange ran and nothing else. beside: attention's time beside the exchange's.
    """
    spans: dict[str, list[Span]] = {kind: [] for kind in CATEGORIES}
    for kernel in kernels:
        spans[kernel.category].append((kernel.start, kernel.stop))
    every = [span for kind in CATEGORIES for span in spans[kind]]
    others = [span for kind in CATEGORIES if kind != "exchange" for span in spans[kind]]
    wall = max(stop for _, stop in every) - min(start for start, _ in every)
    exposed = length(every) - length(others)
    per = 1000 * blocks
    return {
        "categories": {kind: sum(stop - start for start, stop in spans[kind]) / per for kind in CATEGORIES},
        "idle": (wall - length(every)) / per,
        "wall": wall / per,
        "exposed": exposed / per,
        "exposed_share": exposed / wall,
        "beside": shared(spans["attention"], spans["exchange"]) / per,
    }


def longest(kernels: Iterable[Kernel], blocks: int, count: int = 25) -> list[dict[str, str | float]]:
    """The kernels with the most time, by name (cut to 100 characters) and category: calls and milliseconds a block."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        found[kernel.name[:100], kernel.category].append(kernel.stop - kernel.start)
    most = sorted(found.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {"name": name, "category": kind, "calls": len(times) / blocks, "ms": sum(times) / 1000 / blocks}
        for (name, kind), times in most
    ]
