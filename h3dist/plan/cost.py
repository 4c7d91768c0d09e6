"""Seconds of one evaluation of a plan on a class of devices and its links, term by term. Pure; imports no torch.

Ranks work in step, so a term is the slowest rank's:

    products      2 g N K of the four linears of every block, at the rate of their number format
    attention     4 S S h D of every block, at the backend's rate
    dequantise    bytes read and written to make the blocks' weights dense, where no FP4 product takes them as they are
    elementwise   bytes of norms, modulation, rotation, activation and gates
    packing       bytes of laying together what the exchange over sp sends and brings
    exchange      rows for heads and back over sp: bytes over what they share (`wires`)
    reduce        gather and reduce over tp, likewise
    outputs       the gather of both heads' outputs
    latency       of all these messages, and of the agreements on activation scales
    host          what is left of the time that the host takes to start all this, if the device is faster

S rows in all, s own, g of the tp group; h heads attended to, D their size, N and K of a rank's cut of a linear.
Terms do not overlap, as in the run.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

from h3dist.plan.traffic import ELEMENT_BYTES
from h3dist.plan.weights import linear_shapes, linear_weights
from h3dist.plan.wires import Wires, moves

if TYPE_CHECKING:
    from h3dist.plan.plan import Plan, Share
    from h3dist.plan.rates import DeviceRates

TALK = ("packing", "exchange", "reduce", "outputs", "latency")
TERM_OF = {"heads.to": "exchange", "heads.from": "exchange", "rows.gather": "reduce", "rows.reduce": "reduce"}
WIDTHS_OWN = 14  # C wide tensors read and written for an own row: two halves of norm 2, modulation 2, gate 3
WIDTHS_HELD = 10  # H D wide ones for a group's row: norms of q and k 4, rotation 4, v's copy 2
WIDTHS_FFN = 5  # f wide ones: silu reads 1 writes 1, product reads 2 writes 1
WIDTHS_PACKED = 8  # H D wide ones for the exchange: q, k, v stacked 6, what comes back laid together 2


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of one evaluation, by term."""

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

    @property
    def seconds(self) -> float:
        """All terms together."""
        return sum(asdict(self).values())

    @property
    def talking(self) -> float:
        """Seconds between ranks: what a single rank does not have."""
        return sum(getattr(self, name) for name in TALK)

    @property
    def dominant(self) -> str:
        """The largest term."""
        return max((item.name for item in fields(self)), key=lambda name: getattr(self, name))


def step_cost(plan: "Plan", device: "DeviceRates", wires: Wires) -> Cost:
    """What an evaluation of `plan` costs on devices of a class, each rank on its own, joined by `wires`.

    Raises KeyError where the table has no rate for the number format or the attention backend (`missing_rate`).
    """
    talk = dict.fromkeys(TALK[1:], 0.0)
    for move in moves(plan):
        talk["latency"] += wires.latency(move)
        if move.label != "amax":  # single numbers: latency alone
            talk[TERM_OF.get(move.label, move.label)] += wires.seconds(move)
    cost = Cost(
        products=max(_products(plan, share, device) for share in plan.shares),
        attention=max(_attention(plan, share, device) for share in plan.shares),
        dequantise=max(dequantised_bytes(plan, share) for share in plan.shares) / device.dequantise,
        elementwise=max(elementwise_bytes(plan, share) for share in plan.shares) / device.elementwise,
        packing=max(packed_bytes(plan, share) for share in plan.shares) / device.copy,
        **talk,
    )
    return replace(cost, host=max(0.0, device.launch * plan.dims.layers - cost.seconds))


def missing_rate(plan: "Plan", device: "DeviceRates") -> str | None:
    """What the table lacks to price a plan on a class of devices; None where nothing is missing."""
    for group, name in (("product", plan.dtype), ("attention", plan.attention)):
        if name not in getattr(device, group):
            return f"{group}.{name}"
    return None


def product_flops(plan: "Plan", share: "Share") -> float:
    """FLOP of the blocks' linears in one evaluation."""
    return 2.0 * _length(share.group_rows) * linear_weights(plan.dims, _length(share.tp_heads), _length(share.ffn))


def attention_flops(plan: "Plan", share: "Share") -> float:
    """FLOP of attention in one evaluation: two products of S x S x D a head and block."""
    return 4.0 * plan.rows**2 * _length(share.heads) * plan.dims.head_dim * plan.dims.layers


def _products(plan: "Plan", share: "Share", device: "DeviceRates") -> float:
    dense = device.product[plan.dtype]
    quick = device.product.get("nvfp4", dense)
    part = _fp4_part(plan)
    return product_flops(plan, share) * (part / quick + (1 - part) / dense)


def _attention(plan: "Plan", share: "Share", device: "DeviceRates") -> float:
    """Rates are of bfloat16; another format is slower as its products are."""
    slower = device.product["bfloat16"] / device.product[plan.dtype]
    return attention_flops(plan, share) / device.attention[plan.attention] * slower


def dequantised_bytes(plan: "Plan", share: "Share") -> float:
    """Read and written in one evaluation: weights as stored, and dense. Plain ones are used as they are."""
    element = ELEMENT_BYTES[plan.dtype]
    if plan.stored.bytes_per_weight == element:
        return 0.0
    weights = linear_weights(plan.dims, _length(share.tp_heads), _length(share.ffn))
    return (1 - _fp4_part(plan)) * weights * (plan.stored.bytes_per_weight + element)


def elementwise_bytes(plan: "Plan", share: "Share") -> float:
    """Read and written in one evaluation by what is neither a product nor attention."""
    dims = plan.dims
    own, group = _length(share.rows), _length(share.group_rows)
    inner, ffn = _length(share.tp_heads) * dims.head_dim, _length(share.ffn)
    widths = own * WIDTHS_OWN * dims.hidden + group * (WIDTHS_HELD * inner + WIDTHS_FFN * ffn)
    return dims.layers * ELEMENT_BYTES[plan.dtype] * widths


def packed_bytes(plan: "Plan", share: "Share") -> float:
    """Read and written in one evaluation to lay q, k, v and the output together for the exchange over sp."""
    if plan.layout.sp == 1:
        return 0.0
    inner = _length(share.tp_heads) * plan.dims.head_dim
    return plan.dims.layers * ELEMENT_BYTES[plan.dtype] * WIDTHS_PACKED * _length(share.group_rows) * inner


def _fp4_part(plan: "Plan") -> float:
    """The part of the linears that run as FP4 products; they are of one kind in all known files."""
    return plan.fp4 / (len(linear_shapes(plan.dims, 1, 1)) * plan.dims.layers)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
