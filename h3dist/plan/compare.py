"""Several numbers of ranks side by side, as a Markdown table."""

from collections.abc import Sequence
from typing import Any

from h3dist.plan.choose import Option
from h3dist.plan.explain import duration
from h3dist.plan.fit import GIB

TABLE_COUNTS = (1, 2, 4, 6, 8)
TITLES = (
    "GPUs",
    "layout",
    "exchange",
    "s/step",
    "speed-up",
    "of ideal",
    "between ranks",
    "largest term",
    "GiB at most",
)


def table_text(options: Sequence[Option]) -> str:
    """One line for each option; speed-up is against the first if that is a single rank."""
    lines = [_line(option, _alone(options)) for option in options]
    widths = [max(len(line[i]) for line in (TITLES, *lines)) for i in range(len(TITLES))]
    rule = tuple("-" * width for width in widths)
    rows = (TITLES, rule, *lines)
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


def table_dict(options: Sequence[Option]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    one = _alone(options)
    return [option.as_dict() | {"speedup": _speedup(option, one)} for option in options]


def _line(option: Option, one: Option | None) -> tuple[str, ...]:
    world, cost, speedup = option.layout.world, option.cost, _speedup(option, one)
    peak = f"{max(option.plan.peaks) / GIB:.1f}" + (f" (lacks {option.lacking / GIB:.1f})" if option.lacking else "")
    moved = option.plan.exchange.brief if option.layout.sp > 1 else ""
    if cost is None:
        return str(world), str(option.layout), moved, "?", "?", "?", "?", "?", peak
    gain = (f"{speedup:.2f}x", f"{speedup / world:.0%}") if speedup else ("?", "?")
    between = f"{cost.talking / cost.seconds:.0%}" if world > 1 else ""
    seconds = duration(cost.seconds).removesuffix(" s")
    return str(world), str(option.layout), moved, seconds, *gain, between, cost.dominant, peak


def _alone(options: Sequence[Option]) -> Option | None:
    return next((option for option in options if option.layout.world == 1), None)


def _speedup(option: Option, one: Option | None) -> float | None:
    return one.cost.seconds / option.cost.seconds if one and one.cost and option.cost else None
