"""Every way that heads move between ranks against one process that holds all: what comes out, what is sent, what is
copied, what is kept. Real ranks over gloo.

Shape letters: S all rows, s own rows, g rows of the tp group, H all heads, h own heads, D head size, C hidden.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_comm import DIMS, nan_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from world import World

import h3dist.comm.exchange as exchange_module
from h3dist.comm.codec import Int8
from h3dist.comm.forms import PLAIN as PLAIN_FORMS
from h3dist.comm.forms import as_they_are
from h3dist.comm.pieces import Place
from h3dist.comm.rounding import Rounding
from h3dist.errors import ConfigError, RankError
from h3dist.geometry import Geometry
from h3dist.plan import LABELS, ExchangePlan, Layout, Plan, Share, choose_exchange, make_plan

LAYOUTS = [
    *(Layout(sp=ranks) for ranks in range(2, 9)),
    *(Layout(sp=sp, tp=tp) for sp, tp in ((2, 2), (2, 3), (3, 2), (4, 2), (2, 4))),
]
ROWS = (37, 5)  # odd, and fewer than ranks
GROUPS = (1, 2, 3, 7, 15)  # of at most 7 heads a rank: also more than anybody has
PLAIN = ExchangePlan()


@pytest.fixture(scope="module")
def world():
    with World(8) as world:
        yield world


def plan_of(layout: Layout, rows: int, exchange: ExchangePlan, dtype: str = "float32") -> Plan:
    cut = {"latent_t": 2, "latent_h": 2, "latent_w": 2}
    clip = SimpleNamespace(audio_rows=0, video_rows=rows - 1, width=32, height=32, **cut)
    asked = SimpleNamespace(geometry=clip, notes=())
    options = {"dtype": dtype, "attention": "sdpa", "steps": 1, "exchange": exchange}
    return make_plan(asked, replace(DIMS, layers=1), 1, layout, **options)


class Whole:
    """What one process would hold: hidden rows, and the weights that make q, k and v of them."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(100 * seed + rows)
        self.x_SC = torch.randn(rows, DIMS.hidden, generator=draw).to(device, dtype)
        weight = torch.randn(3, DIMS.heads, DIMS.head_dim, DIMS.hidden, generator=draw)
        self.qkv_3HDC = (weight / DIMS.hidden**0.5).to(device, dtype)

    def project(self, x_pC: Tensor, heads: slice) -> list[Tensor]:
        """q, k and v [p, j, D] of some rows and heads, as views of one tensor."""
        weight_NC = self.qkv_3HDC[:, heads].flatten(0, 2)
        return list(F.linear(x_pC, weight_NC).unflatten(1, (3, -1, DIMS.head_dim)).unbind(1))

    def output(self, share: Share) -> Tensor:
        """o_gHD of one share, of attention over all rows."""
        return attention(*self.project(self.x_SC, slice(*share.tp_heads)))[slice(*share.group_rows)]


def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
    q_hSD, k_hSD, v_hSD = (x.transpose(0, 1)[None] for x in (q_ShD, k_ShD, v_ShD))
    return F.scaled_dot_product_attention(q_hSD, k_hSD, v_hSD)[0].transpose(0, 1).contiguous()


def attended(moves, share: Share, whole: Whole, attend: Callable[..., Tensor] = attention) -> Tensor:
    """What the model does around an exchange's attention, for one share."""
    x_pC = moves.gather_projected(whole.x_SC[slice(*share.rows)])
    assert torch.equal(x_pC, whole.x_SC[slice(*share.projected_rows)])
    return moves.attend(*whole.project(x_pC, slice(*share.projected_heads)), attend)


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def every_variant(seat, layout: Layout, device: str = "cpu", backend: str = "gloo") -> dict[str, float]:
    """All variants and groups for odd and few rows; the errors against one process by variant."""
    comm, found = seat.connect(layout, device=device, backend=backend), {"heads": 0.0, "hidden": 0.0}
    for rows in ROWS:
        whole, first = Whole(rows, device=device), {}
        for variant, groups in ((v, g) for v in found for g in GROUPS):
            plan = plan_of(layout, rows, ExchangePlan(variant, groups))
            share = plan.shares[seat.rank]
            comm.counted.update(dict.fromkeys(LABELS, 0))
            with mock.patch.object(exchange_module, "_pad_rows", nan_rows):
                got = attended(comm.exchange(plan), share, whole)
            # On a CPU attention works on each head alone, so that groups change nothing.
            assert device != "cpu" or torch.equal(got, first.setdefault(variant, got)), (rows, variant, groups)
            found[variant] = max(found[variant], error(got, whole.output(share)))
            assert comm.counted == attention_part(plan, share), (rows, variant, groups)
    return found


def attention_part(plan: Plan, share: Share) -> dict[str, int]:
    """What the plan counts up to the output projection: not the MLP's gather and the reductions."""
    before = 0 if plan.exchange.hidden_on(plan.layout) else share.sent["rows.gather"] // 2
    return share.sent | dict.fromkeys(("text", "rows.reduce", "outputs"), 0) | {"rows.gather": before}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_variants_and_groups_give_what_one_process_gives(world, layout):
    for found in world.run(every_variant, layout, ranks=layout.world):
        assert max(found.values()) < 1e-6, found


def test_a_single_sequence_rank_has_nothing_to_choose(world):
    """Hidden over sp 1 is the gather over tp, as ever: same shares, same bytes, same groups or none."""
    asked = ExchangePlan("hidden", 7)
    for layout in (Layout(), Layout(tp=3)):
        plan = plan_of(layout, 37, asked)
        assert plan.shares == plan_of(layout, 37, PLAIN).shares
        assert plan.exchange == asked, "kept for the next layout"
        world.run(single_sequence_rank, plan, ranks=layout.world)


def single_sequence_rank(seat, plan: Plan) -> None:
    comm, whole = seat.connect(plan.layout), Whole(37)
    share = plan.shares[seat.rank]
    assert error(attended(comm.exchange(plan), share, whole), whole.output(share)) < 1e-6


def summed(seat, layout: Layout) -> None:
    """Partial results summed by runs of columns, more than there are too: the bits and bytes of the whole."""
    comm, width = seat.connect(layout), 333
    for rows, chunks in ((37, 2), (37, 5), (5, 99)):
        plan = plan_of(layout, rows, ExchangePlan(chunks=chunks))
        share, moves = plan.shares[seat.rank], comm.exchange(plan)
        group = share.group_rows[1] - share.group_rows[0]
        partial_gN = torch.randn(group, width, generator=torch.Generator().manual_seed(seat.rank))
        comm.counted.update(dict.fromkeys(LABELS, 0))
        want, spans = moves.reduce_rows(partial_gN), moves.column_spans(width)
        sent = comm.counted["rows.reduce"]
        assert len(spans) == min(chunks, 21) and {start % (16 if chunks > 5 else 32) for start, _ in spans} == {0}
        assert torch.equal(moves.reduce_columns(partial_gN[:, a:b] for a, b in spans), want)
        assert comm.counted["rows.reduce"] == 2 * sent


@pytest.mark.parametrize("layout", [Layout(tp=3), Layout(sp=2, tp=3)], ids=str)
def test_sums_by_runs_of_columns_are_those_of_the_whole(world, layout):
    world.run(summed, layout, ranks=layout.world)


def coded(seat, layout: Layout) -> list[tuple[tuple[float, float], dict[str, tuple[float, float]]]]:
    """Of each run with codes, the sums of squares of the output's error and of it, and what it says of rounding."""
    comm, found = seat.connect(layout), []
    for rows, variant, groups, dtype in ((37, "heads", 1, "float32"), (5, "hidden", 3, "float32"),
                                         (37, "heads", 7, "bfloat16"), (37, "hidden", 2, "bfloat16")):  # fmt: skip
        plan = plan_of(layout, rows, ExchangePlan(variant, groups, "int8"), dtype)
        share, whole = plan.shares[seat.rank], Whole(rows, getattr(torch, dtype))
        comm.counted.update(dict.fromkeys(LABELS, 0))
        moves = comm.exchange(plan)
        got = attended(moves, share, whole)
        assert got.dtype == whole.x_SC.dtype and comm.counted == attention_part(plan, share)
        sums = moves.rounding.sums()
        attended(moves, share, whole)
        assert moves.rounding.sums() == sums, "measured once"
        if variant == "heads":
            stays_as_it_is(moves, share, whole)
        want = whole.output(share).double()
        found.append((((got.double() - want).square().sum().item(), want.square().sum().item()), sums))
    return found


def stays_as_it_is(moves, share: Share, whole: Whole) -> None:
    """What a rank keeps of its own rows and heads is not coded, either way; what came is."""
    heads = whole.project(whole.x_SC, slice(*share.tp_heads))
    own, mine = slice(*share.group_rows), slice(*(at - share.tp_heads[0] for at in share.heads))
    came = moves.to_heads(*(x[own] for x in heads))
    for x_ShD, found in zip(heads, came, strict=True):
        x_ShD = x_ShD[:, mine]
        assert torch.equal(found[own], x_ShD[own])
        if mine.stop > mine.start:
            others = torch.ones(len(found), dtype=torch.bool)
            others[own] = False
            assert 0 < error(found[others], x_ShD[others]) < 0.02
    back = moves.to_rows(came[0].contiguous())
    assert torch.equal(back[:, mine], came[0][own])


@pytest.mark.parametrize("layout", [Layout(sp=5), Layout(sp=3, tp=2)], ids=str)
def test_codes_are_near_and_say_how_near(world, layout):
    for ranks in zip(*world.run(coded, layout, ranks=layout.world), strict=True):
        errors, values = (sum(pair[i] for pair, _ in ranks) for i in range(2))
        assert 1e-4 < (errors / values) ** 0.5 < 0.03
        kinds = ranks[0][1].keys()
        assert kinds in ({"q", "k", "v", "output"}, {"output"})
        for kind in kinds:
            wrong, whole = (sum(sums[kind][i] for _, sums in ranks if kind in sums) for i in range(2))
            assert 1e-3 < (wrong / whole) ** 0.5 < 0.01, kind


def test_a_codes_scale_is_of_few_rows_of_one_head_and_hides_nothing_that_is_not_finite():
    codec, x_rnD = Int8(Rounding(), PLAIN_FORMS), torch.randn(40, 3, 4)
    x_rnD[20, 1] *= 1e6  # its block alone becomes coarse
    x_rnD[0, 0, 0], x_rnD[39, 2, 3] = torch.nan, -torch.inf
    x_rnD[16:32, 2] = 0
    shape = (40, 1, 3, 4)
    packet = codec.room(x_rnD, codec.count(shape) + 1)
    places = (Place(1, (0, 40), (0, 3)),)  # at an odd byte
    assert codec.count(shape) == 40 * 3 * 4 + 3 * 3 * 4
    codec.write(packet, places, (x_rnD,), as_they_are)
    got = torch.empty(shape)
    codec.read(packet, places, (got[:, 0],))
    lost_rnD, finite_rn = (got[:, 0] - x_rnD).abs(), torch.ones(40, 3, dtype=torch.bool)
    finite_rn[:16, 0] = finite_rn[32:, 2] = False
    assert torch.equal(got[:, 0].isfinite().any(-1), finite_rn), "the blocks of NaN and infinity, and no others"
    assert torch.equal(got[16:32, 0, 2], x_rnD[16:32, 2]), "zeros stay"
    assert lost_rnD[16:32, 1].max() > 100
    finite_rn[16:32, 1] = False
    assert lost_rnD[finite_rn].max() < 0.02


class Copies(TorchDispatchMode):
    """Bytes that copying operations write."""

    NAMES = ("copy_", "cat", "stack", "clone", "_to_copy", "index", "index_select")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in self.NAMES:
            self.bytes += result.nbytes
        return result


def copied(seat, layout: Layout) -> None:
    """One pack on the way there, one unpack on the way back; what arrives is attended to where it lies."""
    comm = seat.connect(layout)
    for variant, groups in (("heads", 1), ("heads", 3), ("hidden", 1), ("hidden", 3)):
        plan = plan_of(layout, 40, ExchangePlan(variant, groups))
        share, whole, moves = plan.shares[seat.rank], Whole(40), comm.exchange(plan)
        heads = whole.project(whole.x_SC[slice(*share.projected_rows)], slice(*share.projected_heads))
        one = 4 * (share.group_rows[1] - share.group_rows[0]) * (share.tp_heads[1] - share.tp_heads[0]) * DIMS.head_dim
        with Copies() as copies:
            moves.gather_projected(whole.x_SC[slice(*share.rows)])
            gathered = copies.bytes
            moves.attend(*heads, lambda q, k, v: torch.ones(q.shape))
        assert gathered == 0, "40 rows divide"
        assert copies.bytes == (4 if variant == "heads" else 1) * one, (variant, groups)


@pytest.mark.parametrize("layout", [Layout(sp=4), Layout(sp=2, tp=2)], ids=str)
def test_a_move_copies_once_before_and_once_after(world, layout):
    world.run(copied, layout, ranks=layout.world)


def five_requests(seat, exchange: ExchangePlan) -> None:
    """Five shapes after each other, twice: every result stays what it was, and nothing else stays."""
    comm, kept = seat.connect(Layout(sp=seat.world)), []
    for turn in range(2):
        for rows in (37, 80, 5, 61, 12):
            plan, whole = plan_of(comm.layout, rows, exchange), Whole(rows, seed=turn)
            share = plan.shares[seat.rank]
            got = attended(comm.exchange(plan), share, whole)
            kept.append((got, got.clone(), whole.output(share)))
    for got, then, want in kept:
        assert torch.equal(got, then), "a later exchange wrote over it"
        assert error(got, want) < (1e-6 if exchange.codec == "none" else 0.05)
    assert len({got.untyped_storage().data_ptr() for got, _, _ in kept if got.numel()}) == sum(
        got.numel() > 0 for got, _, _ in kept
    )
    plan, whole = plan_of(comm.layout, 80, exchange), Whole(80)
    before = alive()
    for _ in range(3):
        attended(comm.exchange(plan), plan.shares[seat.rank], whole)
    assert alive() == before, "an exchange keeps buffers"


def alive() -> int:
    """Bytes of all tensors that the interpreter holds."""
    gc.collect()
    return sum(x.untyped_storage().nbytes() for x in gc.get_objects() if isinstance(x, Tensor))


@pytest.mark.parametrize("exchange", [ExchangePlan("heads", 3), ExchangePlan("hidden", 2, "int8")], ids=str)
def test_five_exchanges_keep_apart_and_leave_nothing_behind(world, exchange):
    world.run(five_requests, exchange, ranks=3)


def sleeps_in_a_part(seat, groups: int) -> None:
    """A rank sleeps past the limit while it attends to its second part."""
    comm = seat.connect(Layout(sp=seat.world), timeout=0.5)
    plan, whole, turns = plan_of(comm.layout, 37, ExchangePlan("heads", groups)), Whole(37), iter(range(groups))

    def sleepy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if next(turns) == 1 and seat.rank == 2:
            time.sleep(2)
        return attention(q, k, v)

    with comm.stage("denoise"):
        attended(comm.exchange(plan), plan.shares[seat.rank], whole, sleepy)


def test_a_rank_that_sleeps_in_a_grouped_move_is_named_with_its_label(world):
    outcomes = world.outcomes(sleeps_in_a_part, 3, ranks=3)
    for outcome in outcomes:
        assert type(outcome.error) is RankError
        assert "denoise, heads.from: not done within 0.5 s; rank 2 is missing (it is at denoise" in str(outcome.error)
        assert outcome.seconds < 6


def test_the_configuration_says_what_it_means():
    assert choose_exchange("auto", "auto", "none") == ExchangePlan("heads", 1, "none")
    assert choose_exchange("hidden", "3", "int8") == ExchangePlan("hidden", 3, "int8")
    with pytest.raises(ConfigError, match="did you mean 'hidden'"):
        ExchangePlan("hiden")
    with pytest.raises(ConfigError, match=r"exchange\.groups=0: the least is 1"):
        ExchangePlan(groups=0)
    plan = replace(plan_of(Layout(sp=2), 37, PLAIN), geometry=Geometry(32, 32, 5))
    others = [
        replace(plan, exchange=ExchangePlan(*other)) for other in (("hidden",), ("heads", 2), ("heads", 1, "int8"))
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 4, "ranks that differ in it do not start"
