"""Does a plan fit the memory that is free, and if not, what would: another layout, or less to make?"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from h3dist.conditions import Condition
from h3dist.errors import PlanError
from h3dist.geometry import Geometry
from h3dist.plan.layout import Layout
from h3dist.plan.plan import Plan, relayout

GIB = 1 << 30
MACHINE = 8  # GPUs of the largest machine that advice names
WAYS = 3  # ways out that a refusal names


@dataclass(frozen=True)
class Cut:
    """Less to make: what to change, in the user's words, and what of the plan it changes."""

    words: str
    geometry: Geometry
    conditions: tuple[Condition, ...]
    text_rows: int
    shown_rows: int

    def of(self, plan: Plan) -> Plan:
        """The plan, on its layout, of what is left to make."""
        kept = sum(condition.video_rows + condition.audio_rows for condition in self.conditions)
        rows = self.text_rows + kept + self.geometry.audio_rows + self.geometry.video_rows
        sizes = {"geometry": self.geometry, "conditions": self.conditions}
        text = {"text_rows": self.text_rows, "shown_rows": self.shown_rows}
        return relayout(replace(plan, rows=rows, **sizes, **text), plan.layout)


def fits(plan: Plan, free: Sequence[int]) -> bool:
    """Whether every rank's largest stage fits its free bytes."""
    return all(need <= have for need, have in zip(plan.peaks, free, strict=True))


def check_memory(plan: Plan, free: Sequence[int], cuts: Iterable[Iterable[Cut]] = ()) -> None:
    """Refuses a plan that needs more than the `free` bytes of each rank, naming the cheapest that fit.

    First the nearest layout, which costs nothing of the clip; then, of each kind of `cuts`, the one that gives up
    the fewest rows, those with the fewest first; three in all, each with its need. Raises PlanError.
    """
    if fits(plan, free):
        return
    rank = max(range(len(free)), key=lambda r: plan.peaks[r] - free[r])
    stage, need = max(plan.memory[rank].items(), key=lambda item: item[1])
    raise PlanError(
        f"rank {rank} needs about {need / GIB:.1f} GiB to {stage} and {free[rank] / GIB:.1f} GiB are free "
        f"({plan.layout}, {plan.rows} rows); {_advice(plan, free, stage, cuts)}"
    )


def _advice(plan: Plan, free: Sequence[int], stage: str, cuts: Iterable[Iterable[Cut]]) -> str:
    """The ways out in words, or that there are none."""
    layouts, smaller = list(_nearest_fit(plan, min(free))), _cut(plan, free, cuts)
    spread = list(_spread_text(plan, min(free))) if stage == "encode" and not layouts else []
    ways = [*layouts, *spread, *smaller][:WAYS]
    begin = "the nearest that fits is " if layouts else "what fits is "
    told = [begin + "; or ".join(ways)] if ways else []
    if layouts:
        return told[0]
    if stage in ("encode", "refine"):
        return "; ".join(["no layout changes that", *told])
    none = f"no layout of up to {max(plan.layout.world, MACHINE)} ranks fits"
    return f"{none}; {told[0]}" if told else f"{none}: ask for fewer frames or a smaller canvas"


def _nearest_fit(plan: Plan, free: int) -> Iterator[str]:
    """The same ranks cut otherwise, else the fewest more; each has `free` bytes. At most one."""
    world = plan.layout.world
    for ranks in range(world, max(world, MACHINE) + 1):
        for tp in (t for t in range(1, ranks + 1) if ranks % t == 0):
            layout = Layout(sp=ranks // tp, tp=tp)
            peak = _peak(plan, layout)
            if peak is not None and peak <= free:
                more = f"--gpus {ranks} " if ranks != world else ""
                yield f"{more}{layout.overrides()}, {peak / GIB:.1f} GiB"
                return


def _spread_text(plan: Plan, free: int) -> Iterator[str]:
    """The text encoder over the same ranks, else the fewest more, where rank 0 alone has it. At most one."""
    if not plan.encode.spread:
        other = replace(plan, encode=replace(plan.encode, text="tp"))
        yield from (f"encode=tp {way}" for way in _nearest_fit(other, free))


def _peak(plan: Plan, layout: Layout) -> int | None:
    """The largest need of any rank under another layout; None where the layout is not legal."""
    if layout.world > plan.dims.heads:
        return None
    try:
        return max(relayout(plan, layout).peaks)
    except PlanError:  # more tp ranks than FFN units
        return None


def _cut(plan: Plan, free: Sequence[int], cuts: Iterable[Iterable[Cut]]) -> list[str]:
    """Of each kind of cut the smallest that fits, as words with its need; the fewest rows given up first."""
    found = []
    for kind in cuts:
        made = sorted(((cut.of(plan), cut.words) for cut in kind), key=lambda item: -item[0].rows)
        fitting = next(((smaller, words) for smaller, words in made if fits(smaller, free)), None)
        found += [fitting] if fitting else []
    found.sort(key=lambda item: -item[0].rows)
    return [f"{words}, {max(smaller.peaks) / GIB:.1f} GiB" for smaller, words in found]
