"""How ranks share the work: the mesh (dp, sp, tp) and the splits of rows, heads and FFN columns.

One layout covers every mode: single is 1 x 1, ulysses is sp = P, tensor is tp = P, hybrid is both. Ranks are
numbered with tp innermost, so the ranks of a tp group are neighbours and so are their rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from h3dist.errors import PlanError, nearest

MODES = ("auto", "single", "ulysses", "tensor", "hybrid")
FFN_UNITS = (128, 64, 32, 16)  # 128 rows and 64 columns are whole NVFP4 scale tiles, 16 columns one scale

Span = tuple[int, int]  # start and stop, stop not included


class Splittable(Protocol):
    """What of a denoiser's dims a layout depends on."""

    @property
    def heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """A mesh of dp x sp x tp ranks: rank = (dp index * sp + sp index) * tp + tp index."""

    dp: int = 1
    sp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.dp * self.sp * self.tp

    @property
    def ranks(self) -> int:
        """Ranks that share one request: sp x tp."""
        return self.sp * self.tp

    @property
    def mode(self) -> str:
        """The plainest name of this layout."""
        if self.tp == 1:
            return "single" if self.sp == 1 else "ulysses"
        return "tensor" if self.sp == 1 else "hybrid"

    def __str__(self) -> str:
        replicas = f"dp {self.dp} x " if self.dp > 1 else ""
        return f"{replicas}sp {self.sp} x tp {self.tp}"

    def overrides(self) -> str:
        """The words that ask for this layout on a command line, beside the number of ranks."""
        sizes = f" parallel.sp={self.sp} parallel.tp={self.tp}" if self.mode == "hybrid" else ""
        return f"parallel={self.mode}{sizes}"

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold one set of rows between them; all groups, in the order of their first rank."""
        return tuple(tuple(range(r, r + self.tp)) for r in range(0, self.world, self.tp))

    def sp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same weights for different rows; all groups, in the order of their first rank."""
        starts = (base + t for base in range(0, self.world, self.ranks) for t in range(self.tp))
        return tuple(tuple(range(start, start + self.ranks, self.tp)) for start in starts)

    def request_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share one request; all groups, in the order of their first rank."""
        return tuple(tuple(range(r, r + self.ranks)) for r in range(0, self.world, self.ranks))


def length(span: Span) -> int:
    """What lies in a span."""
    return span[1] - span[0]


def split_rows(rows: int, parts: int) -> tuple[Span, ...]:
    """`rows` in chunks of ceil(rows / parts): later parts are short or empty, never earlier ones.

    So what a run of neighbours lacks of an even size lies at its very end.
    """
    chunk = -(-rows // parts)
    return tuple((min(rows, i * chunk), min(rows, (i + 1) * chunk)) for i in range(parts))


def split_ragged(count: int, parts: int) -> tuple[Span, ...]:
    """`count` things in parts that differ by one at most, the larger first: 56 in 6 is 10, 10, 9, 9, 9, 9."""
    size, more = divmod(count, parts)
    edges = [i * size + min(i, more) for i in range(parts + 1)]
    return tuple(pairwise(edges))


def split_heads(heads: int, sp: int, tp: int) -> tuple[tuple[Span, tuple[Span, ...]], ...]:
    """For each tp index the heads whose weights it holds, and those that each of its sp ranks attends to."""
    shares = []
    for start, stop in split_ragged(heads, tp):
        inner = tuple((start + a, start + b) for a, b in split_ragged(stop - start, sp))
        shares.append(((start, stop), inner))
    return tuple(shares)


def ffn_unit(ffn: int, tp: int) -> int:
    """The largest of 128, 64, 32, 16 columns that leaves none of `tp` ranks without any. Raises PlanError."""
    for unit in FFN_UNITS:
        if -(-ffn // unit) >= tp:
            return unit
    limit = -(-ffn // FFN_UNITS[-1])
    raise PlanError(
        f"tp={tp}: {ffn} FFN columns are {limit} units of {FFN_UNITS[-1]}, too few to go round; "
        f"the largest tp for this model is {limit}"
    )


def ffn_split(ffn: int, tp: int) -> tuple[Span, ...]:
    """FFN columns of each tp rank, in whole units (the last unit of an odd size is short). Raises PlanError.

    14336 over 6 is 19, 19, 19, 19, 18, 18 units of 128.
    """
    unit = ffn_unit(ffn, tp)
    return tuple((a * unit, min(ffn, b * unit)) for a, b in split_ragged(-(-ffn // unit), tp))


def column_spans(width: int, parts: int) -> tuple[Span, ...]:
    """`width` outputs of a product in `parts` runs, or as many as there are, in whole units as FFN columns are."""
    unit = next((unit for unit in FFN_UNITS if -(-width // unit) >= parts), FFN_UNITS[-1])
    units = -(-width // unit)
    return tuple((a * unit, min(width, b * unit)) for a, b in split_ragged(units, min(parts, units)))


def make_layout(
    mode: str,
    world: int,
    sp: int | None,
    tp: int | None,
    dims: Splittable,
    *,
    dp: int | None = None,
    fits: Callable[[Layout], bool] | None = None,
) -> Layout:
    """The layout that `mode` means for `world` ranks and a model of `dims`.

    `sp` and `tp` are what the user fixed, None what is free; `fits` says whether a layout fits the memory
    that is free, and matters to mode "auto" alone. Raises PlanError with the nearest legal value.
    """
    if mode not in MODES:
        raise PlanError(f"parallel mode {mode!r}{nearest(mode, MODES)}; modes are {', '.join(MODES)}")
    for name, value in (("dp", dp), ("sp", sp), ("tp", tp)):
        if value is not None and value < 1:
            raise PlanError(f"parallel.{name}={value}: the least is 1")
    if dp not in (None, 1):
        raise PlanError(f"parallel.dp={dp}: replicas serve several requests, a run makes one; use parallel.dp=1")
    if world > dims.heads:
        raise PlanError(f"{world} ranks: the model has {dims.heads} heads, so at most {dims.heads} can share it")
    layout = _auto(world, sp, tp, fits) if mode == "auto" else _explicit(mode, world, sp, tp)
    ffn_unit(dims.ffn, layout.tp)
    return layout


def _explicit(mode: str, world: int, sp: int | None, tp: int | None) -> Layout:
    if mode == "hybrid":
        return _hybrid(world, sp, tp)
    if mode == "single" and world > 1:
        raise PlanError(f"parallel=single on {world} ranks: it runs on 1; use --gpus 1 or parallel=ulysses")
    layout = Layout(tp=world) if mode == "tensor" else Layout(sp=world)
    if sp not in (None, layout.sp) or tp not in (None, layout.tp):
        raise PlanError(
            f"parallel={mode} on {world} ranks is {layout}; {_asked(sp, tp)} was asked: use parallel=hybrid"
        )
    return layout


def _asked(sp: int | None, tp: int | None) -> str:
    return " x ".join(f"{name} {value}" for name, value in (("sp", sp), ("tp", tp)) if value is not None)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(i for i in range(1, number + 1) if number % i == 0)


def _hybrid(world: int, sp: int | None, tp: int | None) -> Layout:
    """The two degrees: as asked, else the smallest tp that is a real split of both (tp = 1 for a prime)."""
    if sp is None and tp is None:
        tp = next((t for t in _divisors(world) if 1 < t < world), 1)
    given = sp if sp is not None else tp
    assert given is not None
    if sp is not None and tp is not None and sp * tp != world:
        legal = ", ".join(str(Layout(sp=world // t, tp=t)) for t in _divisors(world))
        raise PlanError(f"sp {sp} x tp {tp} is {sp * tp} ranks and {world} run; use --gpus {sp * tp}, or {legal}")
    if world % given:
        near = min(_divisors(world), key=lambda d: (abs(d - given), d))
        raise PlanError(f"{_asked(sp, tp)} does not divide {world} ranks; the nearest that does is {near}")
    return Layout(sp=sp or world // given, tp=tp or world // given)


def _auto(world: int, sp: int | None, tp: int | None, fits: Callable[[Layout], bool] | None) -> Layout:
    """Ulysses, which sends least, if it fits; else the smallest tp that does. What the user fixed stays fixed."""
    if sp is not None or tp is not None:
        return _hybrid(world, sp, tp)
    layouts = [Layout(sp=world // t, tp=t) for t in _divisors(world)]
    return next((layout for layout in layouts if fits is None or fits(layout)), layouts[0])
