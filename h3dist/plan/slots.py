"""Where heads and hidden rows arrive when GPUs copy them to each other: slots in every rank's memory, a ring a way.

All ranks have the same slots, as large as the most that any rank gets at a time. A rank writes into its peers' slots
without asking. That is safe because each exchange ends with a meeting of all ranks, and a rank comes to it only after
what its device was given before: so whoever has met the others in one exchange may write, in the next, over what they
used up before they began that one. q, k and v of a group are attended to before its output leaves, and the group after
the next one comes after that: two slots do, one where nothing comes meanwhile. An output is taken to its rows once the
next one has left, and with hidden rows nothing else moves between: three slots do, two where there is one group.
Hidden rows are multiplied before attention begins, and an output leaves before the next block's come: one slot does.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from h3dist.plan.layout import split_heads
from h3dist.plan.traffic import ELEMENT_BYTES, Work

if TYPE_CHECKING:
    from h3dist.plan.plan import Plan

SLOT_BYTES = 1024  # a slot begins, and ends, at a multiple of it


@dataclass(frozen=True)
class Ring:
    """Slots of one size, one after the other, in the order of their use. All in bytes but their number."""

    start: int
    size: int
    slots: int

    @property
    def stop(self) -> int:
        return self.start + self.size * self.slots


def slots_of(plan: "Plan") -> dict[str, Ring]:
    """The rings of a plan's run, as `slots`."""
    sizes = plan.dims, plan.layout, plan.rows, plan.text_rows, plan.steps, ELEMENT_BYTES[plan.dtype], plan.amax
    return slots(Work(*sizes, exchange=plan.exchange))


def slots(work: Work) -> dict[str, Ring]:
    """The rings of a run that moves heads by copies, by label, one behind the other; none where sp is 1."""
    if work.layout.sp == 1:
        return {}
    groups, start, rings = work.exchange.groups, 0, {}
    numbers = {"heads.to": 0 if work.hidden else min(groups, 2), "heads.from": min(groups + 1, 3), "hidden.gather": 1}
    for label, size in _largest(work).items():
        rings[label] = Ring(start, -(-size // SLOT_BYTES) * SLOT_BYTES, numbers[label])
        start = rings[label].stop
    return rings


def slot_bytes(work: Work) -> int:
    """What the slots take of every rank's memory, if heads are to move by copies."""
    return max((ring.stop for ring in slots(work).values()), default=0) if work.exchange.copies_on(work.layout) else 0


def _largest(work: Work) -> dict[str, int]:
    """The most bytes that a rank gets at a time: of the first group of heads, which is the largest."""
    dims, exchange = work.dims, work.exchange
    one_head = [exchange.head_bytes(rows, dims.head_dim, work.element) for rows in work.group_rows]
    to, back, coded = 0, 0, exchange.codec != "none"  # coded, what stays on a rank is not moved
    for _, spans in split_heads(dims.heads, work.layout.sp, work.layout.tp):
        heads = [stop - start for start, stop in spans]
        first = [-(-count // min(exchange.groups, max(heads))) for count in heads]
        each = list(zip(first, one_head, strict=True))
        to = max(to, *(3 * count * (sum(one_head) - mine * coded) for count, mine in each))
        back = max(back, *(mine * (sum(first) - count * coded) for count, mine in each))
    return {"heads.to": to, "heads.from": back, "hidden.gather": _hidden_bytes(work)}


def _hidden_bytes(work: Work) -> int:
    """Of all ranks' rows, in even pieces; 0 where they do not come by copies: over tp, or packed."""
    copied = work.hidden and work.layout.tp == 1 and work.exchange.rows == "plain"
    return work.chunk * work.layout.ranks * work.dims.hidden * work.element if copied else 0
