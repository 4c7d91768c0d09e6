"""Does a plan fit the memory that is free, and if not, what would?"""

from collections.abc import Sequence

from h3dist.errors import PlanError
from h3dist.plan.layout import Layout
from h3dist.plan.plan import Plan, relayout

GIB = 1 << 30
MACHINE = 8  # GPUs of the largest machine that advice names


def fits(plan: Plan, free: Sequence[int]) -> bool:
    """Whether every rank's largest stage fits its free bytes."""
    return all(need <= have for need, have in zip(plan.peaks, free, strict=True))


def check_memory(plan: Plan, free: Sequence[int]) -> None:
    """Refuses a plan that needs more than the `free` bytes of each rank, naming the nearest layout that fits.

    Raises PlanError.
    """
    if fits(plan, free):
        return
    rank = max(range(len(free)), key=lambda r: plan.peaks[r] - free[r])
    stage, need = max(plan.memory[rank].items(), key=lambda item: item[1])
    advice = _nearest_fit(plan, min(free)) if stage == "denoise" else "no layout changes that"
    raise PlanError(
        f"rank {rank} needs about {need / GIB:.1f} GiB to {stage} and {free[rank] / GIB:.1f} GiB are free "
        f"({plan.layout}, {plan.rows} rows); {advice}"
    )


def _nearest_fit(plan: Plan, free: int) -> str:
    """What to ask for instead: the same ranks cut otherwise, else the fewest more; each has `free` bytes."""
    world = plan.layout.world
    for ranks in range(world, max(world, MACHINE) + 1):
        for tp in (t for t in range(1, ranks + 1) if ranks % t == 0):
            layout = Layout(sp=ranks // tp, tp=tp)
            peak = _peak(plan, layout)
            if peak is not None and peak <= free:
                more = f"--gpus {ranks} " if ranks != world else ""
                return f"the nearest that fits is {more}{layout.overrides()}, {peak / GIB:.1f} GiB"
    return f"no layout of up to {max(world, MACHINE)} ranks fits: ask for fewer frames or a smaller canvas"


def _peak(plan: Plan, layout: Layout) -> int | None:
    """The largest need of any rank under another layout; None where the layout is not legal."""
    if layout.world > plan.dims.heads:
        return None
    try:
        return max(relayout(plan, layout).peaks)
    except PlanError:  # more tp ranks than FFN units
        return None
