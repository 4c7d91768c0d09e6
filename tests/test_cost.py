"""The cost model against what was measured and published, and each of its terms against arithmetic by hand."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest

from h3dist.errors import ConfigError
from h3dist.geometry import Geometry
from h3dist.plan import DECODE_LABELS, ENCODE_LABELS, Layout, Plan, make_plan, released_dims
from h3dist.plan.choose import Weigher
from h3dist.plan.cost import TALK, Cost, missing_rate, step_cost
from h3dist.plan.exchange import PLAIN, ExchangePlan, open_exchanges
from h3dist.plan.machine import Machine
from h3dist.plan.overlap import exposed, group_sizes
from h3dist.plan.rates import load_rates
from h3dist.plan.wires import Move, Wires, moves
from h3dist.topology import Link

RATES = load_rates()
SHAPES = [(864, 480, 141), (1344, 768, 124), (1344, 768, 243)]
KINDS = {"measured", "published", "fitted", "estimated"}


def plan_of(shape=SHAPES[0], layout=Layout(), *, fp4: bool = False, **options) -> Plan:  # noqa: B008
    clip = SimpleNamespace(geometry=Geometry(*shape), notes=())
    options = {"dtype": "bfloat16", "attention": "sdpa", "steps": 12, "fp4": 200 * fp4, "amax": 200 * fp4} | options
    return make_plan(clip, released_dims(), 400, layout, **options)


def link(a: int, b: int, kind: str = "SYS", *, p2p: bool = True, **facts) -> Link:
    facts = {"nvlinks": int(kind[2:]) if kind.startswith("NV") else 0, "pcie_gen": 5, "pcie_width": 16} | facts
    return Link(a, b, kind, p2p, p2p, **facts)


def wires_of(device: str, world: int, kind: str = "SYS", sockets: int = 1, **facts) -> Wires:
    def between(a: int, b: int) -> Link:
        return link(a, b, kind, numa_a=a * sockets // world, numa_b=b * sockets // world, **facts)

    links = {(a, b): between(a, b) for a, b in combinations(range(world), 2)}
    return Wires.of(links, RATES.named(device), RATES)


def cost_of(device: str, plan: Plan, kind: str = "SYS", **facts) -> Cost:
    return step_cost(plan, RATES.named(device), wires_of(device, plan.layout.world, kind, **facts))


WIRES = wires_of("H200", 2, "NV18")


def two_of(exchange: ExchangePlan) -> Plan:
    return plan_of(SHAPES[1], Layout(sp=2), exchange=exchange)


def near(found: float, wanted: float, part: float) -> bool:
    return abs(found / wanted - 1) <= part


@pytest.mark.parametrize(("shape", "measured"), list(zip(SHAPES, (1.7772, 5.4484, 16.4205), strict=True)))
def test_one_h200_takes_what_was_measured(shape, measured):
    """By the fused path and flash-attn-4; the last from 10 of the 50 blocks."""
    assert near(cost_of("H200", plan_of(shape, attention="flash4")).seconds, measured, 0.02)


MEASURED = [  # milliseconds of a block in two rounds, the slower rank
    ("heads/1", 57.54), ("heads/4", 58.49), ("hidden/1", 57.39), ("hidden/4", 56.76), ("heads/1+copy", 57.09),
    ("heads/4+copy", 56.46), ("heads/4+copy", 57.09), ("hidden/1+copy", 56.58), ("hidden/4+copy", 56.38),
    ("heads/8+copy", 58.45),
]  # fmt: skip


def block_of(brief: str) -> float:
    """Predicted milliseconds of a block on two H200 over NVLink."""
    said, _, transport = brief.partition("+")
    variant, groups = said.split("/")
    exchange = ExchangePlan(variant, int(groups), transport=transport or "collective")
    plan = plan_of(SHAPES[1], Layout(sp=2), attention="flash4", exchange=exchange)
    return 1000 * cost_of("H200", plan, "NV18").seconds / 50


@pytest.mark.parametrize(("brief", "block"), MEASURED)
def test_two_h200_take_what_was_measured(brief, block):
    """By NCCL and by copies over NVLink, within 2 %."""
    assert near(block_of(brief), block, 0.02)


def test_what_was_measured_faster_is_predicted_faster():
    """Of the ways over NCCL, and of those by copies, whose two figures of heads/4 are taken as their mean."""
    means = {}
    for brief, block in MEASURED:
        means.setdefault(brief, []).append(block)
    for copied in (False, True):
        ways = [brief for brief in means if brief.endswith("+copy") == copied]
        measured = sorted(ways, key=lambda brief: sum(means[brief]) / len(means[brief]))
        assert sorted(ways, key=block_of) == measured


@pytest.mark.parametrize(
    ("words", "brief"),
    [
        (("auto", "auto", "none"), "hidden/4"),
        (("auto", "auto", "none", "plain", 1, "copy"), "hidden/4+copy"),
        (("auto", "auto", "none", "plain", 1, "auto"), "hidden/4+auto"),
        (("heads", "1", "none", "plain", 1, "auto"), "heads/1+auto"),
        (("heads", "auto", "none"), "heads/1"),
    ],
)
def test_on_two_h200_what_was_measured_fastest_is_chosen(words, brief):
    machine = Machine.imagined(2, RATES.named("H200"), 139 << 30)
    base = plan_of(SHAPES[1], Layout(sp=2), attention="flash4")
    found = Weigher(base, machine, RATES, open_exchanges(*words)).option(base.layout)
    assert found.plan.exchange.brief == brief


@pytest.mark.parametrize(("device", "seconds"), [("RTX PRO 6000", 28.50 / 12), ("GB10", 126.66 / 12)])
def test_one_blackwell_takes_what_was_published(device, seconds):
    assert near(cost_of(device, plan_of(fp4=True)).seconds, seconds, 0.02)


@pytest.mark.parametrize("kind", ["NODE", "SYS"])
@pytest.mark.parametrize(("shape", "speedup"), list(zip(SHAPES, (1.21, 1.55, 1.72), strict=True)))
def test_two_gpus_without_nvlink_are_as_fast_as_published(shape, speedup, kind):
    """Ulysses on 2 RTX PRO 6000, with one bandwidth and one latency for that kind of link, within a tenth.

    What keeps them from 2 x is the exchange's bandwidth: its latency is nothing beside it.
    """
    one = cost_of("RTX PRO 6000", plan_of(shape, fp4=True))
    two = cost_of("RTX PRO 6000", plan_of(shape, Layout(sp=2), fp4=True), kind, sockets=1 + (kind == "SYS"))
    assert near(one.seconds / two.seconds, speedup, 0.1)
    lost = two.seconds - one.seconds / 2
    assert two.exchange > 0.85 * lost and two.latency < 0.01 * lost
    assert max(TALK, key=lambda term: getattr(two, term)) == "exchange"
    assert two.dominant == "attention"


@pytest.mark.parametrize(
    ("layout", "seconds"), [(Layout(tp=2), 5.6847), (Layout(sp=2, tp=2), 3.4435), (Layout(sp=4, tp=2), 1.7939)], ids=str
)
def test_another_runner_without_nvlink_takes_about_what_it_published(layout, seconds):
    """vLLM-Omni with dense bfloat16 weights; its kind of link is not known, and that of PCIe switches explains it."""
    plan = plan_of(SHAPES[1], layout, attention="sdpa_cudnn")
    dense = replace(plan, stored=replace(plan.stored, bytes_per_weight=2))
    assert near(cost_of("RTX PRO 6000", dense, "PIX").seconds, seconds, 0.1)


def test_the_exchange_alone_takes_what_was_measured_over_nvlink():
    two = cost_of("H200", plan_of(SHAPES[1], Layout(sp=2)), "NV18")
    assert near(two.exchange / 50, 1.8e-3, 0.05)


PACKED = ExchangePlan("hidden", 7, rows="packed")


@pytest.mark.parametrize(
    "exchange", [PLAIN, ExchangePlan("heads", 4, "int8"), ExchangePlan("hidden", 7), PACKED], ids=str
)
@pytest.mark.parametrize("layout", [Layout(), Layout(sp=2), Layout(sp=6), Layout(tp=4), Layout(sp=2, tp=3)], ids=str)
def test_what_moves_is_what_the_plan_says_is_sent(layout, exchange):
    plan = plan_of((96, 64, 124), layout, fp4=200, amax=37, exchange=exchange)
    for move in moves(plan):
        for share in plan.shares:
            assert plan.steps * move.sent_by(share.rank) == share.sent[move.label], (move.label, share.rank)
    assert {move.label for move in moves(plan)} == plan.shares[0].sent.keys() - {
        "text",
        "conditions",
        *ENCODE_LABELS,
        *DECODE_LABELS,
    }


# Groups of heads, and hidden rows in the place of q, k and v


def test_what_stays_in_the_open_is_by_hand():
    """A way there of 8 s and one back of 4 s beside 6 s of attention, in 1, 2 and 4 groups of 8 heads."""
    assert exposed(8, 4, 6, 1, 1) == 12
    assert exposed(8, 4, 6, 1 / 2, 1 / 2) == 6  # 4 before, 2 after, and 6 that just fit beside attention
    assert exposed(8, 4, 6, 1 / 4, 1 / 4) == 3 + (9 - 6)  # 2 before, 1 after; 3 s more than attention lasts
    assert exposed(8, 4, 60, 1 / 4, 1 / 4) == 3
    assert exposed(8, 4, 60, 1, 1 / 4) == 9  # nothing of the way there is hidden
    assert group_sizes(9, 4) == (3, 2, 2, 2) and group_sizes(3, 7) == (1, 1, 1)


def test_groups_hide_the_exchange_up_to_its_ends_and_cost_latency():
    """28 heads a rank in 7 groups on 2 H200: a seventh of each way stays, attention being far longer."""
    plain, cut = (cost_of("H200", two_of(ExchangePlan(groups=groups)), "NV18") for groups in (1, 7))
    assert plain.overlapped == 0 and cut.exchange == pytest.approx(plain.exchange / 7)
    assert cut.exchange + cut.overlapped == pytest.approx(plain.exchange)
    there = sum(WIRES.seconds(move) for move in moves(two_of(PLAIN)) if move.label == "heads.to")
    assert cut.latency - plain.latency == pytest.approx(6 * 2 * 50 * 5e-6)
    tiles = -(-two_of(PLAIN).rows // 128)
    waves = 7 * -(-4 * tiles // 132) / -(-28 * tiles // 132)
    slowed = 2.0 * there * 6 / 7  # by what comes beside it over NCCL, as rates.json says of NVLink
    assert cut.attention == pytest.approx(waves * plain.attention + slowed) and 1 < waves < 1.1
    same = ("products", "dequantise", "elementwise", "packing", "reduce", "outputs")
    assert all(getattr(cut, name) == getattr(plain, name) for name in same)
    halves = cost_of("H200", two_of(ExchangePlan(groups=2)), "NV18")  # 14 heads fill their last wave, 4 do not
    assert halves.attention == pytest.approx(plain.attention + 2.0 * there / 2) and halves.seconds < cut.seconds


def test_copies_have_a_bandwidth_and_meetings_of_their_own_and_slow_attention_less():
    """28 heads a rank in 2 groups: half of each way in the open; 0.3 s of attention for one that comes beside it."""
    plain, cut = (cost_of("H200", two_of(ExchangePlan(groups=g, transport="copy")), "NV18") for g in (1, 2))
    sent = {move.label: 50 * move.sent[0, 1] for move in moves(two_of(PLAIN)) if move.label.startswith("heads.")}
    bandwidth = 18 * 2.5e10 * 0.73
    assert plain.exchange == pytest.approx(sum(sent.values()) / bandwidth, rel=1e-3)
    assert cut.exchange == pytest.approx(plain.exchange / 2)
    assert cut.attention - plain.attention == pytest.approx(0.3 * sent["heads.to"] / bandwidth / 2, rel=1e-3)
    assert cut.latency - plain.latency == pytest.approx(50 * 2 * 2e-5) and cut.seconds < plain.seconds
    tried = cost_of("H200", two_of(ExchangePlan(groups=2, transport="auto")), "NV18")
    assert tried == cut, "what is tried is priced as what it is tried for"
    slow = [cost_of("RTX PRO 6000", two_of(ExchangePlan(groups=2, transport=way))) for way in ("copy", "collective")]
    assert slow[0] == slow[1], "nothing was measured of copies over PCIe"


def test_a_gather_is_hidden_by_the_product_of_own_rows_as_far_as_that_lasts():
    """All of it by copies on two ranks, a quarter over NCCL; on eight the product of an eighth is the shorter."""
    for ranks, way, part in ((2, "copy", 1.0), (2, "collective", 0.25), (8, "copy", 1.0)):
        plan = plan_of(SHAPES[1], Layout(sp=ranks), exchange=ExchangePlan("hidden", transport=way))
        (gather,) = (move for move in moves(plan) if move.label == "hidden.gather")
        there = wires_of("H200", ranks, "NV18").seconds(gather)
        rows = min(share.rows[1] - share.rows[0] for share in plan.shares)
        own = 2 * 50 * rows * 5376 * 3 * 7168 // ranks / RATES.named("H200").product["bfloat16"]
        assert (own < there) == (ranks == 8)
        assert cost_of("H200", plan, "NV18").overlapped == pytest.approx(min(part * there, own), rel=1e-6)


def test_an_exchange_longer_than_attention_stays_by_what_it_is_longer():
    """Two ranks that only the host joins: 7 groups hide as much as attention lasts, no more."""
    slow = wires_of("H200", 2, p2p=False)
    plan = two_of(ExchangePlan(groups=7))
    moved = sum(slow.seconds(move) for move in moves(plan) if move.label.startswith("heads."))
    cost = step_cost(plan, RATES.named("H200"), slow)
    assert moved > cost.attention
    assert cost.exchange == pytest.approx(max(moved / 7, moved - cost.attention))


def test_hidden_rows_take_fewer_bytes_on_two_ranks_and_more_on_eight():
    """X_H (P - 1) / P + X_I (P - 1) / P^2 against 4 X_I (P - 1) / P^2 a block, X = rows x width x 2 bytes."""
    for ranks in (2, 8):
        plans = [
            plan_of(SHAPES[1], Layout(sp=ranks), exchange=ExchangePlan(variant)) for variant in ("heads", "hidden")
        ]
        costs = [cost_of("H200", plan, "NV18") for plan in plans]
        S, (heads, hidden) = plans[0].rows, (cost.exchange + cost.overlapped for cost in costs)
        inner, rows = S * 7168 * 2 * (ranks - 1) / ranks**2, S * 5376 * 2 * (ranks - 1) / ranks
        assert hidden / heads == pytest.approx((rows + inner) / (4 * inner), rel=1e-3)
        assert (hidden < heads) == (ranks == 2)


def test_hidden_rows_are_projected_by_all_to_their_own_heads():
    heads, hidden = (plan_of(layout=Layout(sp=6), exchange=ExchangePlan(variant)) for variant in ("heads", "hidden"))
    S, qkv, h200 = heads.rows, 50 * 5376 * 3 * 7168, RATES.named("H200")
    less, more = 2 * -(-S // 6) * qkv, 2 * S * qkv * 10 / 56  # the slowest rank: a chunk of rows, 10 of 56 heads
    costs = [cost_of("H200", plan, "NV18") for plan in (heads, hidden)]
    assert costs[1].products - costs[0].products == pytest.approx((more - less) / h200.product["bfloat16"])
    saved = qkv * (1 - 10 / 56) * (9 / 16 + 2) / h200.dequantise
    assert costs[0].dequantise - costs[1].dequantise == pytest.approx(saved)
    assert costs[1].packing == pytest.approx(costs[0].packing * 5 / 7)


def test_codes_halve_what_is_sent_and_cost_their_making():
    plain, coded = (cost_of("RTX PRO 6000", two_of(ExchangePlan(codec=codec))) for codec in ("none", "int8"))
    assert coded.exchange / plain.exchange == pytest.approx(0.5 + 4 / 16 / 256, rel=1e-3)
    assert coded.packing == pytest.approx(plain.packing * 38 / 14)  # 7 widths of 2 bytes, and 8 of 1 + 2


def test_alone_there_is_no_exchange_to_choose():
    for exchange in (PLAIN, ExchangePlan("hidden", 7)):
        assert cost_of("H200", plan_of(exchange=exchange)) == cost_of("H200", plan_of())


def test_products_and_attention_are_the_slowest_ranks():
    """56 heads over 6 are 10 or 9; rows are ceil(S / 6). One rank's FLOP follow from the sizes alone."""
    one, six = plan_of(), plan_of(layout=Layout(sp=6))
    h200 = RATES.named("H200")
    weights = 50 * 5376 * (4 * 7168 + 3 * 14336)
    S = one.rows
    assert cost_of("H200", one).products == pytest.approx(2 * S * weights / h200.product["bfloat16"])
    assert cost_of("H200", six).products == pytest.approx(2 * -(-S // 6) * weights / h200.product["bfloat16"])
    whole = 50 * 4 * S * S * 56 * 128 / h200.attention["sdpa"]
    assert cost_of("H200", one).attention == pytest.approx(whole)
    assert cost_of("H200", six, "NV18").attention == pytest.approx(whole * 10 / 56)


def test_weights_are_made_dense_by_every_rank_that_holds_them():
    one, two, tensor = (cost_of("H200", plan_of(layout=layout)) for layout in (Layout(), Layout(sp=2), Layout(tp=2)))
    weights = 50 * 5376 * (4 * 7168 + 3 * 14336)
    assert one.dequantise == pytest.approx(weights * (9 / 16 + 2) / RATES.named("H200").dequantise)
    assert two.dequantise == one.dequantise and tensor.dequantise == pytest.approx(one.dequantise / 2)


def test_fp4_products_take_weights_as_they_are():
    quick, dense = cost_of("B200", plan_of(fp4=True)), cost_of("B200", plan_of())
    assert quick.dequantise == 0 < dense.dequantise
    b200 = RATES.named("B200")
    assert quick.products / dense.products == pytest.approx(b200.product["bfloat16"] / b200.product["nvfp4"])
    half = cost_of("B200", replace(plan_of(), fp4=100))
    assert half.products == pytest.approx((quick.products + dense.products) / 2)


def test_float32_is_slower_and_plain_weights_need_no_making():
    full, half = cost_of("H200", plan_of(dtype="float32")), cost_of("H200", plan_of())
    assert full.attention > 5 * half.attention and full.products > 5 * half.products
    plan = plan_of()
    plain = replace(plan, stored=replace(plan.stored, bytes_per_weight=2))
    assert cost_of("H200", plain).dequantise == 0


def test_single_ranks_do_not_talk():
    assert cost_of("H200", plan_of()).talking == 0


def test_agreements_cost_latency_alone():
    quiet = plan_of(layout=Layout(sp=4), fp4=True, amax=0)
    talking = replace(quiet, amax=200)
    less, more = (cost_of("RTX PRO 6000", plan) for plan in (quiet, talking))
    assert more.latency - less.latency == pytest.approx(200 * 2 * 8e-6)  # a tree of 4 is 2 deep
    assert more.exchange == less.exchange and more.outputs == less.outputs


def test_a_tiny_clip_is_bound_by_the_host():
    four, eight = (cost_of("H200", plan_of((96, 64, 5), Layout(sp=ranks)), "NV18") for ranks in (4, 8))
    assert eight.host > four.host > 0
    assert four.seconds == pytest.approx(50 * RATES.named("H200").launch) == pytest.approx(eight.seconds)
    assert cost_of("H200", plan_of()).host == 0


def test_ports_and_bridges_are_shared():
    """A port is busy with all that it sends; 12 pairs of a socket share its bridges, and 16 the way between two."""
    sent = {(a, b): 1_000_000_000 for a in range(8) for b in range(8) if a != b}
    rates = {kind: RATES.link_class(kind) for kind in ("NODE", "SYS")}
    whole = Move("heads.to", 1, 8, sent)
    apart = wires_of("RTX PRO 6000", 8, "SYS", sockets=2)
    assert apart.seconds(whole) == pytest.approx(max(7e9 / rates["SYS"].bandwidth, 16e9 / rates["SYS"].pool))
    together = wires_of("RTX PRO 6000", 8, "NODE")
    assert together.seconds(whole) == pytest.approx(max(7e9 / rates["NODE"].bandwidth, 56e9 / rates["NODE"].pool))
    pair = Move("heads.to", 3, 2, {(0, 7): 1_000_000_000, (7, 0): 500_000_000})
    assert apart.seconds(pair) == pytest.approx(3e9 / rates["SYS"].bandwidth)


def test_nvlink_and_pcie_are_two_ports():
    """A GPU with one NVLink neighbour and one over PCIe sends to both at once."""
    links = {(0, 1): link(0, 1, "NV4"), (0, 2): link(0, 2, "PHB"), (1, 2): link(1, 2, "PHB")}
    wires = Wires.of(links, RATES.named("RTX 3090"), RATES)
    both = {(0, 1): 10**9, (0, 2): 10**9}
    alone = [wires.seconds(Move("x", 1, 2, {pair: 10**9})) for pair in both]
    assert wires.seconds(Move("x", 1, 3, both)) == max(alone) and alone[1] > alone[0]


def test_a_link_is_no_faster_than_its_lanes_and_without_p2p_goes_through_the_host():
    device = RATES.named("RTX PRO 6000")
    full, narrow = (RATES.link(link(0, 1, "PIX", pcie_width=width), device).bandwidth for width in (16, 4))
    old = RATES.link(link(0, 1, "SYS", pcie_gen=3), device).bandwidth
    assert full == RATES.link_class("PIX").bandwidth and narrow < full / 2
    assert old < RATES.link_class("SYS").bandwidth
    assert RATES.link(link(0, 1, "PIX", p2p=False), device) == RATES.link_class("SHM")


def test_nvlink_counts_its_links():
    h200 = RATES.named("H200")
    eighteen, four = (RATES.link(link(0, 1, kind), h200).bandwidth for kind in ("NV18", "NV4"))
    assert eighteen == pytest.approx(4.5 * four)
    unknown = RATES.link(link(0, 1, "NV18", nvlinks=0), h200).bandwidth
    assert unknown == eighteen


def test_links_between_one_kind_of_ranks_have_one_latency_and_one_bandwidth():
    assert RATES.link_class("NODE").bandwidth == RATES.link_class("SYS").bandwidth
    assert RATES.link_class("NODE").latency == RATES.link_class("SYS").latency


def test_every_row_says_where_it_comes_from():
    for row in RATES.rows:
        assert row["kind"] in KINDS and row["source"].strip() and row["value"] > 0 and "unit" in row, row
        assert (row["kind"] == "measured") == ("date" in row), row
    twice = [key for key, count in Counter((row["of"], row["what"]) for row in RATES.rows).items() if count > 1]
    assert not twice


def test_every_class_can_price_its_own_work():
    for entry in RATES.classes:
        device = RATES.named(entry["name"])
        native = "float32" if device.name == "CPU" else "bfloat16"
        assert missing_rate(plan_of(dtype=native), device) is None
        assert missing_rate(plan_of(attention="flash9"), device) == "attention.flash9"
        if device.capability and device.capability >= (10, 0):
            assert device.product["nvfp4"] > device.product["bfloat16"]
        kind = device.link
        assert RATES.link(link(0, 1, kind, p2p=kind != "HOST"), device).bandwidth > 0


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H200 NVL", "H200"), ("h100", "H100"), ("NVIDIA H100 80GB HBM3", "H100"),
        ("RTX PRO 6000", "RTX PRO 6000 Server"), ("rtx pro 6000 workstation", "RTX PRO 6000 Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Workstation"),
        ("DGX Spark", "GB10"), ("NVIDIA H200 MIG 3g.71gb", "H200"),
    ],
)  # fmt: skip
def test_devices_are_found_by_words_of_their_names(asked, name):
    assert RATES.named(asked).name == name


@pytest.mark.parametrize("asked", ["NVIDIA A100-SXM4-80GB", "", "NVIDIA"])
def test_a_device_without_rates_has_none(asked):
    assert RATES.device(asked) is None


def test_a_name_typed_wrong_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"--gpu H20: no rates for it; known are H200, .*did you mean 'H200'"):
        RATES.named("H20")


def test_a_slice_has_its_share():
    whole = RATES.named("H200")
    half = whole.part(0.5)
    assert half.attention["sdpa"] == whole.attention["sdpa"] / 2 and half.copy == whole.copy / 2
    assert half.launch == whole.launch and half.memory == whole.memory


def test_costs_need_no_torch():
    code = "import sys, h3dist.plan.cost, h3dist.plan.choose, h3dist.plan.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
