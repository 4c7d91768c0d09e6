"""Heads that GPUs copy to each other, against the same over NCCL: bits, slots used again, what carries them, and a rank
that does not come. Two GPUs of one machine.
"""

import time
from dataclasses import replace

import pytest
import torch
from test_comm import DIMS
from test_comm_gpu import two_devices
from test_exchange_variants import Whole, attended, attention, attention_part, plan_of
from torch.profiler import ProfilerActivity, profile
from world import World

from h3dist.comm.peers import GRACE, NO_MULTICAST
from h3dist.errors import RankError
from h3dist.plan import LABELS, ExchangePlan, Layout

pytestmark = [pytest.mark.gpu, two_devices]

WAYS = [ExchangePlan(variant, groups) for variant in ("heads", "hidden") for groups in (1, 2, 3, 5)]
WAYS.append(ExchangePlan("heads", 3, "int8"))
LIMIT = 8.0  # seconds: NCCL takes some to connect


@pytest.fixture(scope="module")
def world():
    with World(2) as world:
        yield world


def connect(seat, timeout: float = 60):
    return seat.connect(
        Layout(sp=seat.world), device=f"cuda:{seat.rank}", backend="nccl", timeout=timeout, transport="copy"
    )


def copied(exchange: ExchangePlan) -> ExchangePlan:
    return replace(exchange, transport="copy")


def equal_to_nccl(seat) -> None:
    """Several exchanges in a row of every way, odd rows and few: bits and bytes are NCCL's."""
    comm = connect(seat)
    for rows, dtype in ((37, "float32"), (5, "float32"), (1001, "bfloat16")):
        for way in WAYS:
            plan = plan_of(comm.layout, rows, way, dtype)
            wholes = [Whole(rows, getattr(torch, dtype), seed, str(comm.device)) for seed in range(4)]
            share = plan.shares[seat.rank]
            plain = comm.exchange(plan)
            assert comm.transport.told == "collective"
            want = [attended(plain, share, whole) for whole in wholes]
            moves = comm.exchange(replace(plan, exchange=copied(way)))
            assert comm.transport.told == "copy"
            comm.counted.update(dict.fromkeys(LABELS, 0))
            found = [attended(moves, share, whole) for whole in wholes]
            for got, wanted in zip(found, want, strict=True):
                assert torch.equal(got, wanted), (rows, way)
            sent = attention_part(plan, share)
            assert comm.counted == {label: 4 * sent[label] for label in sent}, (rows, way)


def test_copies_give_what_nccl_gives(world):
    world.run(equal_to_nccl)


def large(seat) -> None:
    """Groups so large that they are on their way while the host goes on, and one rank is late by far: what comes is
    neither read before it came nor written over before it is used up. Five results are kept, and stay.
    """
    comm, rows, kept = connect(seat), 200_001, []
    for groups in (1, 2, 4):
        plan = plan_of(comm.layout, rows, copied(ExchangePlan("heads", groups)))
        share, moves = plan.shares[seat.rank], comm.exchange(plan)
        own = share.rows[1] - share.rows[0]

        def lazy(q, k, v, groups: int = groups):
            if (groups + seat.rank) % 2:
                torch.cuda._sleep(20_000_000)  # cycles: some 10 ms
            return q + 2 * k + 3 * v

        for turn in range(5):
            draw = torch.Generator(comm.device).manual_seed(10 * turn + seat.rank)
            shape = (3, own, DIMS.heads, DIMS.head_dim)
            q, k, v = torch.randn(shape, generator=draw, device=comm.device).unbind(0)
            kept.append((moves.attend(q, k, v, lazy), q + 2 * k + 3 * v))
    for got, want in kept:
        assert torch.equal(got, want)


def test_large_groups_are_neither_read_too_early_nor_written_over(world):
    world.run(large)


def carried(seat) -> list[str]:
    """What runs on the device while heads move."""
    comm = connect(seat)
    plan = plan_of(comm.layout, 100_001, copied(ExchangePlan("heads", 3)))
    share, moves, whole = plan.shares[seat.rank], comm.exchange(plan), Whole(100_001, device=str(comm.device))
    heads = whole.project(whole.x_SC[slice(*share.rows)], slice(*share.projected_heads))
    moves.attend(*heads, lambda q, k, v: q + k + v)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        moves.attend(*heads, lambda q, k, v: q + k + v)
        torch.cuda.synchronize()
    return [event.name for event in found.events()]


def test_copy_engines_carry_heads_and_nccl_does_not(world):
    for names in world.run(carried):
        assert sum("Memcpy" in name for name in names) >= 2 * 3, sorted(set(names))
        assert not any("nccl" in name.lower() for name in names), sorted(set(names))


def without_multicast(seat) -> None:
    import os

    comm = connect(seat)
    comm.exchange(plan_of(comm.layout, 37, copied(ExchangePlan())))
    assert NO_MULTICAST.items() <= os.environ.items()
    assert comm.transport._memory._handle.multicast_ptr == 0


def test_memory_comes_without_multicast(world):
    world.run(without_multicast)


def no_growth(seat) -> None:
    """Shapes change; memory is taken again for a larger one alone."""
    comm, free, held = connect(seat), [], []
    for rows in (20_001, 80_001, 5, 80_001, 37, 80_001):
        plan, whole = plan_of(comm.layout, rows, copied(ExchangePlan("heads", 2))), Whole(rows, device=str(comm.device))
        share, few = plan.shares[seat.rank], lambda q, k, v: q + k + v
        heads = whole.project(whole.x_SC[slice(*share.rows)], slice(*share.projected_heads))
        comm.exchange(plan).attend(*heads, few)
        held.append(comm.transport._memory)
        torch.cuda.synchronize()
        del heads, whole
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(comm.device)[0])
    assert all(memory is held[1] for memory in held[1:]) and held[0] is not held[1]
    assert abs(free[3] - free[5]) < 4 * 2**20, free  # bytes


def test_memory_does_not_grow_over_requests(world):
    world.run(no_growth)


def sleeps(seat, launches: int) -> None:
    """Rank 1 does not come to the second exchange. Rank 0's host waits in the end, or before, for its launch queue."""
    comm, rows = connect(seat, LIMIT), 37
    plan, whole = plan_of(comm.layout, rows, copied(ExchangePlan("heads", 3))), Whole(rows, device=str(comm.device))
    share, moves = plan.shares[seat.rank], comm.exchange(plan)
    outputs = torch.zeros(share.rows[1] - share.rows[0], 128, device=comm.device)
    with comm.stage("denoise"):
        attended(moves, share, whole)
        moves.gather_outputs(outputs)  # NCCL connects
        if seat.rank == 1:
            time.sleep(LIMIT + 4)
        attended(moves, share, whole, attention)
        for _ in range(launches):
            outputs.add_(1)
        moves.gather_outputs(outputs)


@pytest.mark.parametrize("launches", [0, 20_000])
def test_a_rank_that_sleeps_is_named_and_all_leave(launches):
    """In a world of its own: a device that gave up waiting is no use to later cases."""
    with World(2) as world:
        outcomes = world.outcomes(sleeps, launches, limit=90)
    for outcome in outcomes:
        assert type(outcome.error) is RankError, (outcome.exit, outcome.trace)
        assert "rank 1 is missing" in str(outcome.error) and "denoise, " in str(outcome.error)
        assert outcome.seconds < 2 * LIMIT + GRACE + 15, outcome.seconds
