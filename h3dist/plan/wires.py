"""Seconds that a collective takes on a machine's links: who sends how much to whom, and what they share.

A byte keeps the sender's port and the receiver's busy for 1 / bandwidth of its link. NVLink and PCIe are two ports
of a GPU, and a GPU's NVLinks are one, as behind a switch. Bytes that cross the host bridges of one NUMA node, or one
way between two nodes, share a pool as well. What takes longest counts; then each message in turn adds its latency.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from h3dist.plan.exchange import ROWS
from h3dist.plan.layout import length
from h3dist.plan.plan import Plan
from h3dist.plan.rates import DeviceRates, LinkRates, Rates
from h3dist.plan.traffic import ELEMENT_BYTES, FLOAT, row_bytes
from h3dist.topology import Link

Bytes = dict[tuple[int, int], int]  # (from rank, to rank) -> bytes
BRIDGED = ("PHB", "NODE", "SHM")  # links through the host bridges of a NUMA node


@dataclass(frozen=True)
class Move:
    """One collective of a step: how often, among how many ranks at once, and who sends what to whom."""

    label: str
    times: int
    size: int  # ranks that take part together
    sent: Bytes
    copied: bool = False  # by the devices' copy engines

    def sent_by(self, rank: int) -> int:
        """Bytes of one rank in all of a step's repeats."""
        return self.times * sum(count for (source, _), count in self.sent.items() if source == rank)


@dataclass(frozen=True)
class Wires:
    """The links between ranks: by pair of ranks (a < b), with their rates for collectives and for copies."""

    links: Mapping[tuple[int, int], Link]
    rates: Mapping[tuple[int, int], LinkRates]
    copies: Mapping[tuple[int, int], LinkRates] = field(default_factory=dict)

    @classmethod
    def of(cls, links: Mapping[tuple[int, int], Link], device: DeviceRates, rates: Rates) -> "Wires":
        """The wires of ranks whose devices are of one class."""
        collective, copied = (
            {pair: of(link, device) for pair, link in links.items()} for of in (rates.link, rates.copies)
        )
        return cls(links, collective, copied)

    def _of(self, move: Move) -> list[LinkRates]:
        """The rates of the links that a move goes by."""
        by = self.copies if move.copied else self.rates
        return [by[min(pair), max(pair)] for pair in move.sent]

    def beside(self, move: Move) -> float:
        """See `LinkRates`: of the link that does most."""
        return max((rates.beside for rates in self._of(move)), default=0.0)

    def hides(self, move: Move) -> float:
        """See `LinkRates`: of the link that does least."""
        return min((rates.hides for rates in self._of(move)), default=0.0)

    def seconds(self, move: Move) -> float:
        """Of all repeats of a move, latency left out."""
        busy: dict[tuple[object, ...], float] = {}

        def add(resource: tuple[object, ...], seconds: float) -> None:
            busy[resource] = busy.get(resource, 0.0) + seconds

        for (source, target), count in move.sent.items():
            pair = min(source, target), max(source, target)
            link, rates = self.links[pair], (self.copies if move.copied else self.rates)[pair]
            for direction, rank in (("out", source), ("in", target)):
                add((direction, rank, link.nvlink), count / rates.bandwidth)
            if rates.pool:
                add(_bridge(link, source == pair[0]), count / rates.pool)
        return move.times * max(busy.values(), default=0.0)

    def latency(self, move: Move) -> float:
        """Seconds that the messages of all repeats wait for each other: a tree's depth of them, the slowest link's."""
        if move.size == 1 or not move.sent:
            return 0.0
        slowest = max(rates.latency for rates in self._of(move))
        return move.times * (move.size - 1).bit_length() * slowest


def _bridge(link: Link, forward: bool) -> tuple[object, ...]:
    """What the bytes of a link that has a pool share with others: a node's bridges, or one way between two nodes."""
    ends = (link.numa_a, link.numa_b) if forward else (link.numa_b, link.numa_a)
    return ("node", ends[0]) if link.kind in BRIDGED and ends[0] == ends[1] else ("between", *ends)


def moves(plan: Plan) -> tuple[Move, ...]:
    """The collectives of one evaluation, as `traffic` counts them."""
    dims, layout, e = plan.dims, plan.layout, ELEMENT_BYTES[plan.dtype]
    outputs = plan.chunk * (4 * dims.video_channels + dims.audio_channels) * FLOAT
    qkv, fc1 = (total // dims.layers for total in row_bytes(dims, e, plan.packed))
    group = [length(share.group_rows) for share in plan.shares]
    heads = [length(share.heads) for share in plan.shares]
    piece = [min(plan.chunk, rows) for rows in group]
    within, across, everyone = map(_pairs, (layout.tp_groups(), layout.sp_groups(), layout.request_groups()))
    hidden, copied = plan.exchange.hidden_on(layout), plan.exchange.copies_on(layout)
    plainly = layout.tp == 1 and plan.exchange.rows == ROWS[0]  # else hidden rows go by the collective
    gathered = dict.fromkeys(everyone, plan.chunk * qkv) if hidden else {}
    rows = {(a, b): piece[a] * dims.hidden * e for a, b in within}
    taken = (fc1,) if hidden else (qkv, fc1)  # of one kind in all known files
    gathers = {(a, b): piece[a] * sum(taken) // len(taken) for a, b in within}
    head = [plan.exchange.head_bytes(count, dims.head_dim, e) for count in group]
    to = {(a, b): 3 * head[a] * heads[b] for a, b in across}
    back = {(a, b): head[b] * heads[a] for a, b in across}
    return (
        Move("rows.gather", len(taken) * dims.layers, layout.tp, gathers),
        Move("rows.reduce", 2 * dims.layers, layout.tp, rows),
        Move("hidden.gather", dims.layers, layout.ranks, gathered, copied and plainly),
        Move("heads.to", dims.layers, layout.sp, {} if hidden else to, copied),
        Move("heads.from", dims.layers, layout.sp, back, copied),
        Move("amax", plan.amax, layout.ranks, dict.fromkeys(everyone, FLOAT)),
        Move("outputs", 1, layout.ranks, dict.fromkeys(everyone, outputs)),
    )


def _pairs(groups: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    return [(a, b) for group in groups for a in group for b in group if a != b]
