"""A choice in words and as JSON values: why this layout, what it costs, what lost and by how much."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from h3dist.plan.choose import MARGIN, NEAR, Choice, Option, Way
from h3dist.plan.cost import TALK, Cost, attention_rate
from h3dist.plan.decode import vae_bytes
from h3dist.plan.encode import text_bytes
from h3dist.plan.table import size
from h3dist.topology import Link

if TYPE_CHECKING:
    from h3dist.plan.plan import Plan

SHOWN = 0.005  # of a step; smaller terms are left out of sentences
ENCODER, VAES = "text_encoder", ("video_vae", "audio_vae")


def reasons(choice: Choice) -> tuple[str, ...]:
    """Why, in plain words, one sentence each."""
    return (
        _layout(choice),
        *count_words(choice),
        *_seats(choice),
        *_predicted(choice),
        *_exchange(choice),
        *(_lost(choice, option) for option in choice.rivals),
        *_attention(choice),
        _placement(choice),
        _residence(choice),
    )


def as_dict(choice: Choice) -> dict[str, Any]:
    """The choice as JSON values: predictions, seats, placement, and the options that lost."""
    stored = choice.taken.plan.stored
    return {
        "taken": choice.taken.as_dict(),
        "device_class": choice.rates.name if choice.rates else None,
        "gpus": [gpu.uuid for gpu in choice.machine.gpus],
        "speedup": choice.speedup,
        "rivals": [option.as_dict() for option in choice.rivals],
        "counts": [option.as_dict() for option in choice.counts],
        "placement": {
            "encode": list(range(choice.taken.layout.world)) if choice.taken.plan.encode.spread else 0,
            "decode": list(range(choice.taken.layout.world)) if choice.taken.plan.decode.parallel else 0,
            "resident_bytes": [
                {
                    "denoiser": share.weight_bytes,
                    "text_encoder": text_bytes(choice.taken.plan.encode, stored, share.rank),
                    "vaes": vae_bytes(choice.taken.plan.decode, stored, share.rank),
                }
                for share in choice.taken.plan.shares
            ],
        },
        "reasons": list(reasons(choice)),
    }


def terms(cost: Cost) -> str:
    """A step's terms by size, in parts of a hundred: "attention 60 %, products 29 %"."""
    parts = sorted(cost.terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value / cost.seconds:.0%}" for name, value in parts if value > SHOWN * cost.seconds)


def duration(seconds: float) -> str:
    """Seconds for people: three digits."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _layout(choice: Choice) -> str:
    plan, layout = choice.taken.plan, choice.taken.layout
    if choice.given:
        return f"{layout} was asked for"
    if choice.machine.device == "cpu":
        return f"{layout}: there is no GPU, and ranks on the processor share it"
    if layout.world == 1:
        return "one rank does everything"
    if not choice.machine.known:
        return f"{layout}: no memory is known, and tp 1 sends least"
    if layout.tp == 1:
        return f"{layout}: tp 1 fits with {_peak(plan)} at most, and a larger tp, which holds less, sends more"
    smaller = [option for option in choice.rivals if option.layout.tp < layout.tp]
    lacking = min((option.lacking or 0 for option in smaller), default=0)
    return f"{layout}: the smallest tp that fits; the next smaller lacks {size(lacking)}"


def count_words(choice: Choice) -> Iterator[str]:
    """Whether fewer GPUs, or more, would do."""
    taken, world = choice.taken, choice.taken.layout.world
    if taken.cost is None:
        return
    more = [option for option in choice.counts if option.layout.world > world and option.fits]
    if choice.free_count and more:
        best = min(more, key=lambda option: option.seconds)
        yield (
            f"{_gpus(world)} of {len(choice.machine.gpus)}: the best of more, {best.layout.world}, would take "
            f"{duration(best.seconds)} a step against {duration(taken.seconds)}, less than {MARGIN:.0%} won"
        )
    fewer = [option for option in choice.counts if option.layout.world < world and option.fits]
    enough = next((option for option in fewer if option.seconds <= taken.seconds * (1 + MARGIN)), None)
    if enough:
        yield (
            f"fewer GPUs would do: --gpus {enough.layout.world} takes {duration(enough.seconds)} a step, "
            f"these {world} {duration(taken.seconds)}"
        )


def _seats(choice: Choice) -> Iterator[str]:
    """Which GPU each rank takes, where that is not simply the next one; how the ranks are joined."""
    seats, layout = choice.taken.seats, choice.taken.layout
    if layout.world == 1 or not choice.machine.links or len(set(seats)) < layout.world:
        return
    groups = [seats[start : start + layout.tp] for start in range(0, layout.world, layout.tp)]
    everyone = [(min(pair), max(pair)) for pair in combinations(seats, 2)]
    inside = [(min(pair), max(pair)) for group in groups for pair in combinations(group, 2)]
    across = [pair for pair in everyone if pair not in inside]
    joined = [f"the ranks of a tp group by {_kinds(choice, inside)}"] if inside else []
    joined += [f"{'the groups' if inside else 'ranks'} by {_kinds(choice, across)}"] if across else []
    yield f"joined are {', '.join(joined)}"
    if seats != tuple(range(layout.world)):
        shown = " | ".join(", ".join(map(str, group)) for group in (groups if layout.tp > 1 else [seats]))
        yield f"ranks take GPUs {shown} in this order: the closest links"


def _kinds(choice: Choice, pairs: Sequence[tuple[int, int]]) -> str:
    links = [choice.machine.link(a, b) for a, b in pairs]
    return " and ".join(sorted({_kind(link) for link in links}))


def _kind(link: Link) -> str:
    return link.kind if link.nvlink or (link.p2p_read and link.p2p_write) else f"{link.kind} without P2P"


def _predicted(choice: Choice) -> Iterator[str]:
    cost = choice.taken.cost
    if cost is None:
        yield f"no time is predicted: {choice.unpriced or _unknown(choice)}"
        return
    name = choice.rates.name if choice.rates else ""
    yield f"{duration(cost.seconds)} a step predicted on {name}: {terms(cost)}"
    if choice.speedup and choice.taken.layout.world > 1:
        world = choice.taken.layout.world
        yield (
            f"{choice.speedup:.2f} times one rank, {choice.speedup / world:.0%} of ideal; between ranks "
            f"{cost.talking / cost.seconds:.0%} of a step, most of it {_most_talk(cost)}"
        )


def _most_talk(cost: Cost) -> str:
    return max(TALK, key=lambda name: getattr(cost, name))


def _exchange(choice: Choice) -> Iterator[str]:
    """How heads move, what of it attention hides, and what the other ways would take."""
    taken, cost = choice.taken, choice.taken.cost
    if taken.layout.sp == 1 or cost is None:
        return
    moved = cost.exchange + cost.overlapped
    hidden = f"attention hides {cost.overlapped / moved:.0%} of it" if moved else "nothing moves"
    yield f"exchange {taken.plan.exchange}: {hidden}, {duration(cost.exchange)} a step stay in the open"
    for way in _other_ways(taken):
        faster = way.cost.seconds < cost.seconds * (1 - NEAR)
        keys = f"exchange.variant={way.exchange.variant} exchange.groups={way.exchange.groups}"
        against = _against(way.cost.seconds, cost.seconds)
        told = f"is predicted faster ({keys})" if faster else "lost"
        yield f"exchange {way.exchange} {told}: {duration(way.cost.seconds)} a step, {against}"


def _other_ways(option: Option) -> list[Way]:
    """Of each variant the fastest, and the plain exchange, as far as they were not taken."""
    ways = sorted(option.ways, key=lambda way: way.cost.seconds)
    best = [next(way for way in ways if way.exchange.variant == variant) for variant in sorted(_variants(option))]
    plain = [way for way in option.ways if way.exchange.groups == 1 and way.exchange.variant == "heads"]
    return [way for way in dict.fromkeys((*plain, *best)) if way.exchange != option.plan.exchange]


def _variants(option: Option) -> set[str]:
    return {way.exchange.variant for way in option.ways}


def _unknown(choice: Choice) -> str:
    return "ranks share GPUs" if choice.machine.links else "the links between the GPUs are not known"


def _lost(choice: Choice, option: Option) -> str:
    """An option that was not taken, and by how much it lost."""
    taken = choice.taken
    if option.lacking:
        return f"{option.layout} lost: it lacks {size(option.lacking)}"
    if option.cost is None or taken.cost is None:
        return f"{option.layout} lost: {_peak(option.plan)} at most against {_peak(taken.plan)}"
    verdict = "is predicted faster" if option.seconds < taken.seconds * (1 - SHOWN) else "lost"
    return (
        f"{option.layout} {verdict}: {duration(option.seconds)} a step, {_against(option.seconds, taken.seconds)}, "
        f"{_peak(option.plan)} at most"
    )


def _against(seconds: float, taken: float) -> str:
    change = seconds / taken - 1
    if abs(change) < SHOWN:
        return "as long"
    return f"{abs(change):.0%} {'longer' if change > 0 else 'shorter'}"


def _attention(choice: Choice) -> Iterator[str]:
    """What the other attention backends with a known rate would take."""
    plan, cost, rates = choice.taken.plan, choice.taken.cost, choice.rates
    if cost is None or rates is None:
        return
    used = rates.attention[attention_rate(plan)]
    for name, rate in rates.attention.items():
        if rate == used:
            continue
        seconds = cost.seconds + cost.attention * (used / rate - 1)
        yield f"attention {name}: {duration(seconds)} a step, {_against(seconds, cost.seconds)}"


def _placement(choice: Choice) -> str:
    seat = f" on GPU {choice.taken.seats[0]}" if choice.machine.gpus else ""
    if choice.taken.plan.encode.spread:
        after = "all ranks decode" if choice.taken.plan.decode.parallel else f"rank 0{seat} decodes"
        return f"all ranks encode the text before all denoise, and {after} after"
    if choice.taken.plan.decode.parallel:
        return f"rank 0{seat} encodes the text before all denoise, and all ranks decode after"
    others = "; the other ranks wait" if choice.taken.layout.world > 1 else ""
    return f"rank 0{seat} encodes the text before all denoise, and decodes after{others}"


def _residence(choice: Choice) -> str:
    plan = choice.taken.plan
    weights = max(share.weight_bytes for share in plan.shares)
    parts = [f"every rank keeps {size(weights)} of the denoiser, quantised, until the end"]
    if plan.stored.text_encoder:
        most = max(text_bytes(plan.encode, plan.stored, rank) for rank in range(plan.layout.ranks))
        whose = "each of the text encoder at most" if plan.encode.spread else "rank 0 the text encoder's"
        parts.append(f"{whose} {size(most)} until the text is encoded")
    vaes = plan.stored.video_vae + plan.stored.audio_vae
    if vaes:
        parts.append(f"{'each' if plan.decode.parallel else 'rank 0'} the VAEs' {size(vaes)} while it decodes")
    return ", ".join(parts)


def _peak(plan: "Plan") -> str:
    return size(max(plan.peaks))


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"
