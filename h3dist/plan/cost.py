"""Seconds of one evaluation of a plan on a class of devices and its links, term by term. Pure; imports no torch.

Ranks work in step, so a term is the slowest rank's:

    products      2 g N K of the four linears of every block, at the rate of their number format
    attention     4 S S h D of every block, at the backend's rate
    dequantise    bytes read and written to make the blocks' weights dense, where no FP4 product takes them as they are
    elementwise   bytes of norms, modulation, rotation, activation and gates
    packing       bytes of laying together what the exchange over sp sends and brings
    exchange      rows for heads and back over sp: bytes over what they share (`wires`), but for what moves while
                  attention works on another group of heads, or the product on a rank's own rows (`overlap`)
    reduce        gather and reduce over tp, likewise
    outputs       the gather of both heads' outputs
    latency       of all these messages, those of the exchange once a group, and of the agreements on activation scales
    host          what is left of the time that the host takes to start all this, if the device is faster

S rows in all, s own, g of the tp group; h heads attended to, D their size, N and K of a rank's cut of a linear.
The exchange alone overlaps with others, and attention is slower beside what comes meanwhile. Under its variant "hidden"
the QKV product takes all S rows to a rank's own h heads, whose weights alone are held and made dense, and what comes
there needs no packing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from h3dist.plan.gemm import NARROW
from h3dist.plan.layout import length
from h3dist.plan.overlap import GROUP_LAUNCH, exposed, group_sizes, wave_loss
from h3dist.plan.traffic import ELEMENT_BYTES
from h3dist.plan.weights import NVFP4_BYTES, linear_shapes
from h3dist.plan.wires import Wires, moves

if TYPE_CHECKING:
    from h3dist.plan.plan import Plan, Share
    from h3dist.plan.rates import DeviceRates

QKV = "attn.qkv_proj"
TALK = ("packing", "exchange", "reduce", "outputs", "latency")
THERE, BACK = ("heads.to", "hidden.gather"), "heads.from"
WIDTHS_OWN = 14  # C wide tensors read and written for an own row: two halves of norm 2, modulation 2, gate 3
WIDTHS_HELD = 10  # H D wide ones for a group's row: norms of q and k 4, rotation 4, v's copy 2
WIDTHS_FFN = 5  # f wide ones: silu reads 1 writes 1, product reads 2 writes 1
WIDTHS_THERE, WIDTHS_BACK = 2, 5  # H D wide ones for the exchange, as measured: q, k and v together, the output apart
CODED_THERE, CODED_BACK = 6, 2  # and with a codec: into codes before, out of them after


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of one evaluation, by term; `overlapped` is what of the exchange is hidden, and no term."""

    products: float
    attention: float
    dequantise: float
    elementwise: float
    packing: float
    exchange: float
    reduce: float
    outputs: float
    latency: float
    host: float = 0.0
    overlapped: float = 0.0

    @property
    def terms(self) -> dict[str, float]:
        """The terms by name."""
        return {name: value for name, value in vars(self).items() if name != "overlapped"}

    @property
    def seconds(self) -> float:
        """All terms together."""
        return sum(self.terms.values())

    @property
    def talking(self) -> float:
        """Seconds between ranks: what a single rank does not have."""
        return sum(getattr(self, name) for name in TALK)

    @property
    def dominant(self) -> str:
        """The largest term."""
        return max(self.terms, key=self.terms.__getitem__)


class Pricing:
    """What an evaluation of a plan costs on devices of a class, each rank on its own, joined by `wires`.

    The plan's exchange is priced in any number of groups: the bytes are the same. Raises KeyError where the table
    has no rate for the number format or the attention backend (`missing_rate`).
    """

    def __init__(self, plan: "Plan", device: "DeviceRates", wires: Wires) -> None:
        self._plan, self._device = plan, device
        found = moves(plan)
        self._seconds = {move.label: wires.seconds(move) for move in found}
        self._latency = {move.label: wires.latency(move) for move in found}
        self._beside = max(wires.beside(move) for move in found if move.label == "heads.to")
        self._ahead = sum(
            wires.hides(move) * self._seconds[move.label] for move in found if move.label == "hidden.gather"
        )
        shares = plan.shares
        self._base = Cost(
            products=max(_products(plan, share, device) for share in shares),
            attention=max(_attention(plan, share, device) for share in shares),
            dequantise=max(dequantised_bytes(plan, share) for share in shares) / device.dequantise,
            elementwise=max(elementwise_bytes(plan, share) for share in shares) / device.elementwise,
            packing=max(packed_bytes(plan, share) for share in shares) / device.copy,
            exchange=sum(self._seconds.get(label, 0.0) for label in (*THERE, BACK)),
            reduce=self._seconds["rows.gather"] + self._seconds["rows.reduce"],
            outputs=self._seconds["outputs"],
            latency=0.0,
        )

    def cost(self, groups: int) -> Cost:
        """The cost with the exchange in so many groups of heads; where sp is 1 there are none."""
        if self._plan.layout.sp == 1:
            groups = 1
        cost = replace(self._base, latency=self._latencies(groups), **self._overlap(groups))
        launch = self._device.launch * (1 + GROUP_LAUNCH * (groups - 1))
        return replace(cost, host=max(0.0, launch * self._plan.dims.layers - cost.seconds))

    def _latencies(self, groups: int) -> float:
        times = {BACK: groups, "heads.to": groups}
        return sum(seconds * times.get(label, 1) for label, seconds in self._latency.items())

    def _overlap(self, groups: int) -> dict[str, float]:
        """Attention cut into groups, and the exchange in the open and hidden behind it."""
        plan, base = self._plan, self._base
        heads = [length(share.heads) for share in plan.shares]
        attention = base.attention * max(wave_loss(plan.rows, h, groups, self._device.units) for h in heads)
        first, last = (max(group_sizes(h, groups)[end] / h for h in heads) for end in (0, -1))
        there, back = (sum(self._seconds.get(label, 0.0) for label in labels) for labels in (THERE, (BACK,)))
        ahead = min(self._ahead, min(_own_product(plan, share, self._device) for share in plan.shares))
        first = 1.0 if plan.exchange.hidden_on(plan.layout) else first
        shown = exposed(there - ahead, back, attention, first, last)
        slowed = self._beside * min(attention, there * (1 - first))
        return {"attention": attention + slowed, "exchange": shown, "overlapped": there + back - shown}


def step_cost(plan: "Plan", device: "DeviceRates", wires: Wires) -> Cost:
    """What an evaluation of `plan` costs, its exchange as planned. Raises KeyError as `Pricing`."""
    return Pricing(plan, device, wires).cost(plan.exchange.groups)


def missing_rate(plan: "Plan", device: "DeviceRates") -> str | None:
    """What the table lacks to price a plan on a class of devices; None where nothing is missing."""
    names = ("product", plan.dtype), ("product", _product(plan)), ("attention", attention_rate(plan))
    for group, name in names:
        if name not in getattr(device, group):
            return f"{group}.{name}"
    return None


def product_flops(plan: "Plan", share: "Share") -> float:
    """FLOP of the blocks' linears in one evaluation."""
    return 2.0 * plan.dims.layers * sum(rows * weights for rows, weights in _linears(plan, share))


def _linears(plan: "Plan", share: "Share") -> Iterator[tuple[int, int]]:
    """Of each of a block's linears the rows that a rank puts through it, and the weights it puts them through."""
    cut = length(share.tp_heads), length(share.ffn), length(share.projected_heads)
    for name, shape in linear_shapes(plan.dims, *cut).items():
        yield length(share.projected_rows if name == QKV else share.group_rows), prod(shape)


def attention_flops(plan: "Plan", share: "Share") -> float:
    """FLOP of attention in one evaluation: two products of S x S x D a head and block."""
    return 4.0 * plan.rows**2 * length(share.heads) * plan.dims.head_dim * plan.dims.layers


def _products(plan: "Plan", share: "Share", device: "DeviceRates") -> float:
    return product_flops(plan, share) * _seconds_a_flop(plan, device)


def _own_product(plan: "Plan", share: "Share", device: "DeviceRates") -> float:
    """Seconds of the QKV products of a rank's own rows, beside which the others' come."""
    cut = length(share.tp_heads), length(share.ffn), length(share.projected_heads)
    flops = 2.0 * plan.dims.layers * length(share.rows) * prod(linear_shapes(plan.dims, *cut)[QKV])
    return flops * _seconds_a_flop(plan, device)


def _seconds_a_flop(plan: "Plan", device: "DeviceRates") -> float:
    dense = device.product[_product(plan)]
    quick = device.product.get("nvfp4", dense)
    part = _fp4_part(plan)
    return part / quick + (1 - part) / dense


def _attention(plan: "Plan", share: "Share", device: "DeviceRates") -> float:
    """Rates are of bfloat16; another format is slower as its products are."""
    slower = device.product["bfloat16"] / device.product[plan.dtype]
    return attention_flops(plan, share) / device.attention[attention_rate(plan)] * slower


def _product(plan: "Plan") -> str:
    """The rate of the products that are not FP4's: of the compute dtype, or of narrow operands."""
    return plan.gemm if plan.gemm in NARROW else plan.dtype


def attention_rate(plan: "Plan") -> str:
    """The name of the backend's rate: eight heads at a time, "+sliced", are taken to be as fast as all."""
    return plan.attention.removesuffix("+sliced")


def dequantised_bytes(plan: "Plan", share: "Share") -> float:
    """Read and written in one evaluation: weights as stored, and dense. Plain ones are used as they are."""
    element = ELEMENT_BYTES[plan.dtype]
    if plan.gemm in NARROW or plan.stored.bytes_per_weight == element:
        return 0.0
    weights = plan.dims.layers * sum(weights for _, weights in _linears(plan, share))
    return (1 - _fp4_part(plan)) * weights * (plan.stored.bytes_per_weight + element)


def elementwise_bytes(plan: "Plan", share: "Share") -> float:
    """Read and written in one evaluation by what is neither a product nor attention."""
    dims, fp4 = plan.dims, _fp4_part(plan)
    own, group, projected = length(share.rows), length(share.group_rows), length(share.projected_rows)
    inner, ffn = length(share.projected_heads) * dims.head_dim, length(share.ffn)
    widths = own * WIDTHS_OWN * dims.hidden + projected * WIDTHS_HELD * inner + group * WIDTHS_FFN * ffn
    again = fp4 * (projected - group) * dims.hidden  # rows of others, quantised here too
    return dims.layers * (ELEMENT_BYTES[plan.dtype] * (widths + again) + NVFP4_BYTES * again)


def packed_bytes(plan: "Plan", share: "Share") -> float:
    """Read and written in one evaluation to lay q, k, v and the output together for the exchange over sp."""
    if plan.layout.sp == 1:
        return 0.0
    hidden, element = plan.exchange.hidden_on(plan.layout), ELEMENT_BYTES[plan.dtype]
    there, back = (0, WIDTHS_BACK) if hidden else (WIDTHS_THERE, WIDTHS_BACK)
    inner = plan.dims.layers * length(share.group_rows) * length(share.tp_heads) * plan.dims.head_dim
    coded = (0 if hidden else CODED_THERE) + CODED_BACK if plan.exchange.codec != "none" else 0
    return inner * (element * (there + back) + (element + 1) * coded)


def _fp4_part(plan: "Plan") -> float:
    """The part of the linears that run as FP4 products; they are of one kind in all known files."""
    return plan.fp4 / (len(linear_shapes(plan.dims, 1, 1)) * plan.dims.layers)
