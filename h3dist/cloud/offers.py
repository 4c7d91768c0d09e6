"""Which GPU types fit a plan, and what they cost: the planner's memory against each type's."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from h3dist.cloud.checkpoints import RELEASED
from h3dist.cloud.gpus import BY_ID, GPU_TYPES, GpuType
from h3dist.cloud.models import GpuOffer
from h3dist.errors import PlanError
from h3dist.request import Request, resolve

USABLE = 0.94  # of a GPU's nominal memory; the rest is the driver's and rounding
PROMPT_ROWS = 96  # a prompt of usual length, in tokens


@dataclass(frozen=True)
class Shape:
    """The clip that memory is planned for; the default is the largest cell of the scaling matrix."""

    width: int = 1344
    height: int = 768
    frames: int = 243
    steps: int = 12


@dataclass(frozen=True)
class Fit:
    """One GPU type and count: `peak` bytes on the fullest GPU, `mode` that was planned, whether it fits, and
    `price` in dollars an hour for all, with `live` false when it is only a rough figure."""

    gpu: str
    count: int
    memory_gb: int
    mode: str
    peak: int
    fits: bool
    price: float | None
    live: bool
    stock: str = ""


def peak_memory(shape: Shape, count: int, usable: float) -> tuple[str, int]:
    """Mode and bytes on the fullest of `count` GPUs, for the released checkpoints.

    The layout is what `--mode auto` takes for GPUs with `usable` bytes each.
    """
    from h3dist.plan import make_layout, make_plan, released_dims

    resolved = resolve(
        Request(
            prompt="a clip",
            width=shape.width,
            height=shape.height,
            frames=shape.frames,
            steps=shape.steps,
            seed=0,
        ),
        allow_untrained=True,
    )
    files = {item.slot: item.size for item in RELEASED if item.size and item.slot != "denoiser"}
    dims = released_dims()

    def peak(layout: object) -> int:
        plan = make_plan(
            resolved, dims, PROMPT_ROWS, layout, dtype="bfloat16", attention="sdpa", steps=shape.steps, files=files
        )  # fmt: skip
        return max(plan.peaks)

    layout = make_layout("auto", count, None, None, dims, fits=lambda layout: peak(layout) <= usable)
    return str(layout), peak(layout)


def fits(shape: Shape, counts: Iterable[int], live: dict[str, GpuOffer], cloud: str) -> list[Fit]:
    """Every known GPU type and count with the planned memory; cheapest that fits first."""
    found: list[Fit] = []
    types = list(GPU_TYPES) + [_new(offer) for offer in live.values() if offer.id not in BY_ID and offer.memory_gb]
    for gpu in types:
        for count in counts:
            found.append(_fit(gpu, count, shape, live.get(gpu.id), cloud))
    return sorted(found, key=lambda f: (not f.fits, f.price or 1e9, f.count))


def _new(offer: GpuOffer) -> GpuType:
    return GpuType(offer.id, offer.memory_gb or 0, 0.0)


def _fit(gpu: GpuType, count: int, shape: Shape, offer: GpuOffer | None, cloud: str) -> Fit:
    memory = (offer.memory_gb if offer else None) or gpu.memory_gb
    usable = memory * 1e9 * USABLE
    try:
        mode, peak = peak_memory(shape, count, usable)
    except PlanError as error:
        mode, peak = str(error), 0
    each = offer.price(cloud) if offer else None
    price = each * count if each else gpu.about * count or None
    return Fit(
        gpu.id,
        count,
        memory,
        mode,
        peak,
        0 < peak <= usable,
        price,
        each is not None,
        (offer and offer.stock) or "",
    )


def table(found: Iterable[Fit], say: Callable[[str], None]) -> None:
    """Print offers, one a line."""
    say(f"{'GPUs':>4}  {'type':<55} {'memory':>7} {'needs':>8}  {'fits':<4} {'$/hour':>8}  stock")
    for fit in found:
        price = "?" if fit.price is None else f"{'' if fit.live else '~'}{fit.price:.2f}"
        need = f"{fit.peak / 1e9:.1f} GB" if fit.peak else "-"
        fitting = "yes" if fit.fits else "no"
        say(f"{fit.count:>4}  {fit.gpu:<55} {fit.memory_gb:>4} GB {need:>8}  {fitting:<4} {price:>8}  {fit.stock}")
