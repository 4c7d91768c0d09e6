"""Which layout a run takes, on which GPUs and how many, what that is predicted to cost, and what else was weighed.

The rules, from public measurements of this model: the smallest tp that fits, since a larger one holds less and sends
more; tensor-parallel ranks on the closest links; of the exchanges left open the plainest that is predicted to take no
more than NEAR longer than the fastest; and, where the number of GPUs is free, the fewest that are predicted to take no
more than MARGIN longer than the fastest number. Where no time is predicted the exchange is the plainest.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, groupby, product
from typing import Any

from h3dist.errors import PlanError
from h3dist.plan.cost import Cost, Pricing, missing_rate
from h3dist.plan.exchange import GROUPS, VARIANTS, ExchangePlan
from h3dist.plan.layout import Layout, ffn_unit
from h3dist.plan.machine import NAMELESS, Machine
from h3dist.plan.order import arrange
from h3dist.plan.plan import Plan, relayout
from h3dist.plan.rates import DeviceRates, Rates

MARGIN = 0.05
NEAR = 0.0005  # a tie: what was predicted fastest by 0.1 % was measured fastest
WEIGHED = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48)  # numbers of ranks that are looked at beside the one asked for


@dataclass(frozen=True)
class Way:
    """One exchange of a layout, what a step costs with it, and the bytes that it lacks, as an option's."""

    exchange: ExchangePlan
    cost: Cost
    lacking: int | None

    def as_dict(self) -> dict[str, Any]:
        """This way as JSON values."""
        return asdict(self.exchange) | {"seconds": self.cost.seconds, "overlapped": self.cost.overlapped}


@dataclass(frozen=True)
class Option:
    """One layout on certain GPUs, with its exchange. `lacking`: bytes that the rank with the least room lacks; None:
    memory unknown. `ways` are all exchanges that were priced for it, those that were not to be chosen among them.
    """

    plan: Plan
    seats: tuple[int, ...]  # rank -> GPU, by its place in CUDA's order
    lacking: int | None
    cost: Cost | None
    ways: tuple[Way, ...] = ()

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        return not self.lacking

    @property
    def seconds(self) -> float:
        """Of a predicted step; infinite where nothing is predicted."""
        return self.cost.seconds if self.cost else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """This option as JSON values."""
        return {
            "ranks": self.layout.world,
            "layout": {"dp": self.layout.dp, "sp": self.layout.sp, "tp": self.layout.tp},
            "seats": list(self.seats),
            "fits": None if self.lacking is None else self.fits,
            "peak_bytes": max(self.plan.peaks),
            "seconds": self.cost.seconds if self.cost else None,
            "terms": self.cost.terms if self.cost else None,
            "exchange": asdict(self.plan.exchange),
            "overlapped": self.cost.overlapped if self.cost else None,
            "exchanges": [way.as_dict() for way in self.ways],
        }


@dataclass(frozen=True)
class Weigher:
    """Makes options of a run, of which `base` is any plan, on a machine.

    `open` are the exchanges to choose from, the plainest first; none: that of `base` is given.
    """

    base: Plan
    machine: Machine
    table: Rates
    open: tuple[ExchangePlan, ...] = ()

    @cached_property
    def rates(self) -> DeviceRates | None:
        """Of the machine's devices; None where the table has none, or none for this run's kind of work."""
        return None if self.unpriced else self.machine.rates(self.table)

    @cached_property
    def unpriced(self) -> str | None:
        """Why no time can be predicted on this machine; None where it can."""
        if not self.machine.known:
            return "no GPU is known (name one with --gpu)"
        found = self.machine.rates(self.table)
        if found is None and self.machine.gpus[0].name == NAMELESS:
            return "these GPUs have no name (say one with --gpu)"
        if found is None:
            return f"the table of rates has no {self.machine.gpus[0].name} (h3dist bench measures it)"
        lacks = missing_rate(self.base, found)
        return f"the table of rates has no {lacks} for {found.name}" if lacks else None

    def option(self, layout: Layout) -> Option:
        """A layout on the GPUs that suit it best. Raises PlanError where the model cannot be cut so."""
        seats = self._seats(layout)
        ways = self._ways(layout, seats)
        best = _plainest([way for way in ways if way.exchange in self._asked])
        plan = self._plan(layout, best.exchange if best else self._asked[0])
        return Option(plan, seats, self._lacking(plan, seats), best.cost if best else None, ways)

    def of_count(self, count: int) -> tuple[Option, ...]:
        """All legal layouts of `count` ranks, the smallest tp first."""
        dims = self.base.dims
        if count > dims.heads:
            return ()
        tps = [tp for tp in range(1, count + 1) if count % tp == 0 and _holds(dims.ffn, tp)]
        return tuple(self.option(Layout(sp=count // tp, tp=tp)) for tp in tps)

    def _seats(self, layout: Layout) -> tuple[int, ...]:
        gpus = self.machine.gpus
        if not gpus or not self.machine.links:
            return self.machine.seats(layout.world)
        rates = self.rates
        costs = {}
        for a, b in combinations(range(len(gpus)), 2):
            link = self.machine.link(a, b)
            costs[a, b] = 1 / self.table.link(link, rates).bandwidth if rates else 1.0 + link.distance
        return arrange(layout, len(gpus), costs)

    def _lacking(self, plan: Plan, seats: Sequence[int]) -> int | None:
        if not self.machine.known:
            return None
        free = self.machine.free(seats)
        return max(0, *(need - have for need, have in zip(plan.peaks, free, strict=True)))

    def _plan(self, layout: Layout, exchange: ExchangePlan) -> Plan:
        return relayout(replace(self.base, exchange=exchange), layout)

    @property
    def _asked(self) -> tuple[ExchangePlan, ...]:
        return self.open or (self.base.exchange,)

    def _ways(self, layout: Layout, seats: Sequence[int]) -> tuple[Way, ...]:
        """The exchanges of a layout with their cost; none where nothing is known of rates or links."""
        ways: list[Way] = []
        for (variant, transport), same in groupby(
            self._weighed(layout), key=lambda each: (each.variant, each.transport)
        ):
            one = replace(self._asked[0], variant=variant, transport=transport, groups=1)  # as large in any groups
            plan = self._plan(layout, one)
            pricing, lacking = self._pricing(plan, seats), self._lacking(plan, seats)
            ways += [Way(each, pricing.cost(each.groups), lacking) for each in same if pricing]
        return tuple(ways)

    def _weighed(self, layout: Layout) -> tuple[ExchangePlan, ...]:
        """What is asked for and, to compare, all that "auto" would leave open.

        One alone where sp is 1, and on the processor: what copies there takes the cores of attention.
        """
        if layout.sp == 1 or self.machine.device == "cpu":
            return self._asked[:1]
        fewest = self.base.dims.heads // layout.ranks
        transports = dict.fromkeys(each.transport for each in self._asked)
        others = (
            replace(self._asked[0], transport=t, variant=v, groups=g)
            for t, v, g in product(transports, VARIANTS, GROUPS)
        )
        every = dict.fromkeys((*self._asked, *others))
        return tuple(each for each in every if each.groups <= fewest or each == self._asked[0])

    def _pricing(self, plan: Plan, seats: Sequence[int]) -> Pricing | None:
        """None where there are no rates, ranks share a GPU, or their links are not known: nobody measured that."""
        rates, world = self.rates, len(seats)
        alone = not self.machine.gpus or world == 1
        if rates is None or not (alone or (self.machine.links and len(set(seats)) == world)):
            return None
        share = rates if self.machine.gpus else rates.part(1 / world)
        return Pricing(plan, share, self.machine.wires(seats, rates, self.table))


@dataclass(frozen=True)
class Choice:
    """The option taken, the others that were weighed, and the machine they were weighed for.

    `rivals` are the other layouts of as many ranks; `counts` the best layout of every other number of ranks looked
    at, more than the machine has never among them. `given`: the user fixed the layout; `free_count`: not the number.
    """

    taken: Option
    rivals: tuple[Option, ...]
    counts: tuple[Option, ...]
    machine: Machine
    rates: DeviceRates | None
    unpriced: str | None
    given: bool
    free_count: bool

    @property
    def one(self) -> Option | None:
        """A single rank, to compare with."""
        every = (self.taken, *self.counts)
        return next((option for option in every if option.layout.world == 1), None)

    @property
    def speedup(self) -> float | None:
        """Against a single rank, as predicted."""
        one = self.one
        return one.cost.seconds / self.taken.cost.seconds if one and one.cost and self.taken.cost else None


def choose(weigher: Weigher, counts: Sequence[int], fixed: Layout | None) -> Choice:
    """The option for one of `counts` ranks; `fixed` is the layout if the user named it.

    Where none fits: the last count's, with the least lacking. Raises PlanError where no layout is legal.
    """
    most = max(counts)
    by_count = {count: weigher.of_count(count) for count in sorted({*WEIGHED, *counts}) if count <= most}
    best = {count: _smallest_tp(options) for count, options in by_count.items() if options}
    if fixed is not None:
        taken = weigher.option(fixed)
    elif not (legal := [best[count] for count in counts if count in best]):
        raise PlanError(f"{most} ranks: the model has {weigher.base.dims.heads} heads, so at most that many")
    else:
        taken = _fewest(legal)
    world = taken.layout.world
    rivals = tuple(option for option in by_count.get(world, ()) if option.layout != taken.layout)
    others = tuple(option for count, option in best.items() if count != world)
    return Choice(
        taken=taken,
        rivals=rivals,
        counts=others,
        machine=weigher.machine,
        rates=weigher.rates,
        unpriced=weigher.unpriced,
        given=fixed is not None,
        free_count=len(counts) > 1,
    )


def _plainest(ways: Sequence[Way]) -> Way | None:
    """The first of `ways` that fits and is about as fast as any that does; None where there are none."""
    fitting = [way for way in ways if not way.lacking] or ways
    fastest = min((way.cost.seconds for way in fitting), default=0.0)
    return next((way for way in fitting if way.cost.seconds <= fastest * (1 + NEAR)), None)


def _smallest_tp(options: Sequence[Option]) -> Option:
    return next((option for option in options if option.fits), min(options, key=lambda option: option.lacking or 0))


def _fewest(options: Sequence[Option]) -> Option:
    """The fewest ranks that are about as fast as any number; the most where nothing is predicted."""
    fitting = [option for option in options if option.fits] or [options[-1]]
    if any(option.cost is None for option in fitting):
        return fitting[-1]
    fastest = min(option.seconds for option in fitting)
    return next(option for option in fitting if option.seconds <= fastest * (1 + MARGIN))


def _holds(ffn: int, tp: int) -> bool:
    try:
        return bool(ffn_unit(ffn, tp))
    except PlanError:
        return False
