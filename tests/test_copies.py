"""Heads that move by copies: the same bits and bytes as by collectives, from slots that are used again and again, or
not at all on any rank. Real ranks, with mapped files in the place of GPUs' memory.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from unittest import mock

import pytest
import torch
from mapped import MappedTransport
from test_comm import DIMS, check_heads
from test_comm import Whole as Numbers
from test_exchange_variants import Whole, attended, attention, attention_part, plan_of
from torch import Tensor
from world import World

from h3dist.comm.codec import Plain
from h3dist.comm.forms import PLAIN as PLAIN_FORMS
from h3dist.comm.heads import HeadMoves
from h3dist.comm.peers import NO_MULTICAST, Reach, forbid_multicast, multicast_asked, why_not_copy
from h3dist.comm.pieces import Pieces
from h3dist.errors import ConfigError
from h3dist.plan import LABELS, ExchangePlan, Layout, choose_exchange
from h3dist.plan.slots import slots_of

COPY = {"transport": "copy"}
WAYS = [
    *(ExchangePlan(variant, groups, **COPY) for variant in ("heads", "hidden") for groups in (1, 2, 3, 5)),
    ExchangePlan("heads", 3, "int8", **COPY),
]


@pytest.fixture(scope="module")
def world():
    with World(6) as world:
        yield world


def copying(seat, layout: Layout, folder: str, **faults: str):
    """This rank's Comm, whose heads go by mapped memory where they are asked to."""
    comm = seat.connect(layout)
    comm.transport = MappedTransport(comm, folder, **faults)
    return comm


def late(rank: int, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One rank in turn does its work later than the others by far: they could write over what it has not used."""
    turns = count()

    def wait(*args: Tensor) -> Tensor:
        if next(turns) % 2 == rank % 2:
            time.sleep(0.004)
        return work(*args)

    return wait


def equal_to_collectives(seat, layout: Layout, folder: str) -> None:
    """Several exchanges in a row of every way, odd rows and few: bits and bytes are those of the collectives."""
    comm = copying(seat, layout, folder)
    for rows in (37, 5):
        for way in WAYS:
            plan = plan_of(layout, rows, way)
            share, plain = plan.shares[seat.rank], replace(plan, exchange=replace(way, transport="collective"))
            wholes = [Whole(rows, seed=seed) for seed in range(3)]
            want = [attended(comm.exchange(plain), share, whole) for whole in wholes]
            assert comm.transport.told == "collective"
            moves, found = comm.exchange(plan), []
            assert comm.transport.told == "copy"
            comm.counted.update(dict.fromkeys(LABELS, 0))
            with mock.patch.object(Plain, "read", late(seat.rank + 1, Plain.read)):
                for whole in wholes:
                    found.append(attended(moves, share, whole, late(seat.rank, attention)))
            for got, wanted in zip(found, want, strict=True):
                assert torch.equal(got, wanted), (rows, way)
            sent = attention_part(plan, share)
            assert comm.counted == {label: 3 * sent[label] for label in sent}, (rows, way)
    assert comm.transport.made <= 3, "memory is taken again only where more is needed"


@pytest.mark.parametrize("layout", [Layout(sp=2), Layout(sp=3), Layout(sp=4), Layout(sp=3, tp=2)], ids=str)
def test_copies_give_what_collectives_give(world, layout, tmp_path):
    world.run(equal_to_collectives, layout, str(tmp_path), ranks=layout.world)


def hidden_rows(seat, folder: str) -> None:
    """Own rows multiplied while others' come by copies, block after block: what one process gives, and its bytes."""
    comm = copying(seat, Layout(sp=seat.world), folder)
    for rows in (37, 5):
        plan = plan_of(comm.layout, rows, ExchangePlan("hidden", 2, **COPY))
        share, moves = plan.shares[seat.rank], comm.exchange(plan)
        comm.counted.update(dict.fromkeys(LABELS, 0))
        for whole in (Whole(rows, seed=seed) for seed in range(4)):
            heads, width = slice(*share.projected_heads), whole.x_SC.shape[1]
            weight = whole.qkv_3HDC[:, heads].flatten(0, 2)
            product = late(seat.rank, lambda x, out, weight=weight: torch.mm(x, weight.T, out=out))
            qkv = moves.project(whole.x_SC[slice(*share.rows)], len(weight), product)
            torch.testing.assert_close(qkv, whole.x_SC @ weight.T, rtol=1e-5, atol=1e-5)
            moves.attend(*qkv.unflatten(1, (3, -1, DIMS.head_dim)).unbind(1), late(seat.rank, attention))
        sent = plan.chunk * width * 4 * (seat.world - 1)
        assert comm.counted["hidden.gather"] == 4 * sent, "padding of short ranks is sent too"


def test_hidden_rows_come_by_copies_while_own_ones_are_multiplied(world, tmp_path):
    world.run(hidden_rows, str(tmp_path), ranks=3)


def backs_alone(seat, folder: str) -> None:
    """Outputs go back again and again, and nothing else moves that would hold a fast rank up."""
    comm = copying(seat, Layout(sp=seat.world), folder)
    for groups in (1, 2, 3):
        plan = plan_of(comm.layout, 37, ExchangePlan("hidden", groups, **COPY))
        share, moves = plan.shares[seat.rank], comm.exchange(plan)
        with mock.patch.object(Plain, "read", late(seat.rank, Plain.read)):
            for whole in (Whole(37, seed=seed) for seed in range(6)):
                got = moves.attend(*whole.project(whole.x_SC, slice(*share.projected_heads)), attention)
                assert torch.allclose(got, whole.output(share), atol=1e-6), groups


def test_outputs_are_not_written_over_while_nothing_else_moves(world, tmp_path):
    world.run(backs_alone, str(tmp_path), ranks=3)


def kept_apart(seat, folder: str) -> None:
    """Five shapes after each other, twice: every result stays what it was."""
    comm, kept = copying(seat, Layout(sp=seat.world), folder), []
    for turn in range(2):
        for rows in (37, 80, 5, 61, 12):
            plan, whole = plan_of(comm.layout, rows, ExchangePlan("heads", 3, **COPY)), Whole(rows, seed=turn)
            share = plan.shares[seat.rank]
            got = attended(comm.exchange(plan), share, whole)
            kept.append((got, got.clone(), whole.output(share)))
    for got, then, want in kept:
        assert torch.equal(got, then), "a later exchange wrote over it"
        assert torch.allclose(got, want, atol=1e-6)
    assert comm.transport.made == 2, "for 37 rows, and for 80"


def test_five_exchanges_by_copies_keep_apart(world, tmp_path):
    world.run(kept_apart, str(tmp_path), ranks=3)


def alone_each_way(seat, folder: str) -> None:
    """The ways there and back, each alone: of one group by copies, of more as wholes by collectives."""
    comm = copying(seat, Layout(sp=seat.world), folder)
    for groups in (1, 3):
        plan = plan_of(comm.layout, 37, ExchangePlan("heads", groups, **COPY))
        check_heads(comm.exchange(plan), plan.shares[seat.rank], Numbers(plan))


def test_each_way_alone_is_right(world, tmp_path):
    world.run(alone_each_way, str(tmp_path), ranks=3)


def one_cannot(seat, folder: str, transport: str, fault: dict[str, str]) -> str:
    comm = copying(seat, Layout(sp=seat.world), folder, **(fault if seat.rank == 1 else {}))
    plan = plan_of(comm.layout, 37, ExchangePlan("heads", 2, transport=transport))
    share, whole = plan.shares[seat.rank], Whole(37)
    assert torch.allclose(attended(comm.exchange(plan), share, whole), whole.output(share), atol=1e-6)
    return comm.transport.told


FAULTS = {
    "rank 1: no such luck": {"lacks": "no such luck"},
    "rank 1: out of memory": {"broken": "take"},
    "rank 1: mapping failed": {"broken": "meet"},
}


@pytest.mark.parametrize("why", FAULTS)
def test_where_one_rank_cannot_none_does(world, why, tmp_path):
    assert world.run(one_cannot, str(tmp_path), "auto", FAULTS[why], ranks=3) == 3 * [f"collective: {why}"]
    for outcome in world.outcomes(one_cannot, str(tmp_path), "copy", FAULTS[why], ranks=3):
        assert isinstance(outcome.error, ConfigError)
        assert f"exchange.transport=copy: {why}; use exchange.transport=auto or collective" in str(outcome.error)


def over_gloo(seat, transport: str) -> str:
    comm = seat.connect(Layout(sp=seat.world))
    comm.exchange(plan_of(comm.layout, 5, ExchangePlan(transport=transport)))
    return comm.transport.told


def test_ranks_over_gloo_do_not_copy(world):
    told = world.run(over_gloo, "auto", ranks=2)
    assert set(told) == {
        "collective: copies are made between GPUs that have NCCL for all else, and these ranks have gloo"
    }
    for outcome in world.outcomes(over_gloo, "copy", ranks=2):
        assert isinstance(outcome.error, ConfigError) and "these ranks have gloo" in str(outcome.error)


def reaching(*ranks: str, machine: str = "one") -> list[Reach]:
    return [Reach(machine, rank, ranks) for rank in ranks]


def test_why_ranks_cannot_copy():
    here, there = reaching("a", "b"), reaching("c", "d", machine="two")
    every = [(0, 1), (2, 3)]
    assert why_not_copy([*here, *there], every) is None, "groups on a machine of their own"
    assert why_not_copy([*here, *there], [(0, 2), (1, 3)]) == "ranks 0 and 2 are on different machines"
    blind = replace(there[1], reaches=())
    assert why_not_copy([*here, there[0], blind], every) == "the GPU of rank 3 cannot reach that of rank 2"
    assert why_not_copy([here[0], here[0]], [(0, 1)]) is None and why_not_copy([], []) is None
    lacking = replace(there[1], lacks="it is old")
    assert why_not_copy([*here, there[0], lacking], every) == "rank 3: it is old"


def test_multicast_is_forbidden_and_who_asks_for_it_gets_no_copies():
    environ: dict[str, str] = {}
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST=" in multicast_asked(environ), "not set: torch would take it"
    forbid_multicast(environ)
    assert environ == NO_MULTICAST and multicast_asked(environ) is None
    for name, value in (
        ("NCCL_NVLS_ENABLE", "1"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0"),
        ("TORCH_SYMMMEM", "NVSHMEM"),
    ):
        asked = {name: value}
        forbid_multicast(asked)
        assert asked[name] == value and f"{name}={value}, and copies are made with {name}=" in multicast_asked(asked)


@pytest.mark.parametrize("layout", [Layout(sp=2), Layout(sp=5), Layout(sp=2, tp=3), Layout(sp=7)], ids=str)
def test_slots_hold_the_most_that_any_rank_gets(layout):
    for rows, way in ((rows, way) for rows in (5, 37, 1000) for way in WAYS):
        plan, most = plan_of(layout, rows, way), {"heads.to": 0, "heads.from": 0, "hidden.gather": 0}
        size = 4 if way.codec == "none" else 1
        for share in plan.shares:
            parts = head_moves(plan, share)._parts
            most["heads.to"] = max(most["heads.to"], *(size * sum(part.there.into) for part in parts))
            most["heads.from"] = max(most["heads.from"], *(size * sum(part.back.into) for part in parts))
        rings = slots_of(plan)
        if way.variant == "hidden" and layout.tp == 1:
            most["hidden.gather"] = plan.chunk * layout.sp * plan.dims.hidden * 4
        for label, ring in rings.items():
            assert ring.size == -(-most[label] // 1024) * 1024, (layout, rows, way, label)
        assert rings["heads.from"].start == rings["heads.to"].stop


def head_moves(plan, share) -> HeadMoves:
    ranks = next(group for group in plan.layout.sp_groups() if share.rank in group)
    wire = mock.Mock(group=mock.Mock(ranks=ranks, index=ranks.index(share.rank), size=len(ranks)))
    codec = Plain(PLAIN_FORMS)
    if plan.exchange.codec != "none":
        codec = mock.Mock(count=lambda shape: shape[1] * shape[2] * plan.exchange.head_bytes(shape[0], shape[3], 4))
    return HeadMoves(plan, share, wire, codec, PLAIN_FORMS)


def test_pieces_say_where_each_begins_at_its_receiver():
    sizes = [[3, 0, 2], [1, 4, 0], [5, 6, 7]]  # from, to
    pieces = [Pieces.among(lambda a, b: sizes[a][b], 3, index) for index in range(3)]
    for index, each in enumerate(pieces):
        assert each.out == tuple(sizes[index]) and each.into == tuple(row[index] for row in sizes)
        for peer in range(3):
            assert each.at[peer] == sum(pieces[peer].into[:index])
    assert pieces[0].unplaced == Pieces((3, 0, 2), (3, 1, 5))


def test_the_configuration_says_what_moves_heads():
    assert choose_exchange("heads", "4", "none", transport="copy").brief == "heads/4+copy"
    assert str(ExchangePlan(transport="copy")) == "heads in 1 group, by copies"
    assert ExchangePlan(transport="copy").on(Layout(tp=2)) == ExchangePlan()
    (note,) = ExchangePlan(transport="copy").idle_on(Layout(tp=2))
    assert note == "exchange.transport=copy changes nothing here: no heads move over sp 1"
    with pytest.raises(
        ConfigError, match=r"exchange\.transport=copies: use collective, copy or auto; did you mean 'copy'"
    ):
        ExchangePlan(transport="copies")
    ways = [plan_of(Layout(sp=2), 37, ExchangePlan(transport=way)) for way in ("collective", "copy")]
    plain, copied = (way.memory[0]["denoise"] for way in ways)
    assert plain < copied, "slots are held all the time"
    assert len({way.exchange for way in ways}) == 2, "and in the plan's digest, so that all ranks ask for the same"
