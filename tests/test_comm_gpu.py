"""The same moves on CUDA: ranks that share a device over gloo, and NCCL where there are devices enough."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from test_comm import Whole, block_fails, check_heads, moves, plan_of
from test_exchange_variants import every_variant
from world import World

from h3dist.comm.board import Board
from h3dist.comm.pieces import Pieces
from h3dist.comm.wire import Group, NcclWire
from h3dist.errors import NumericsError, RankError
from h3dist.plan import ExchangePlan, Layout

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


def on_own_device(seat, function, *args):
    """`function` with this rank's own device and NCCL."""
    return function(seat, *args, f"cuda:{seat.rank}", "nccl")


@pytest.mark.parametrize("layout", [Layout(sp=2), Layout(tp=2), Layout(sp=2, tp=2)], ids=str)
def test_ranks_share_a_device_over_gloo(world, layout):
    world.run(moves, layout, "cuda:0", "gloo", ranks=layout.world)


def nccl_alone(seat) -> float:
    """A wire of one rank: every collective gives what it was given; a kernel that lasts is waited for."""
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=seat.store, rank=0, world_size=1)
    board = Board(dist.PrefixStore("board", seat.store), 0, 1)
    wire = NcclWire(Group("tp", (0,), 0, dist.new_group([0], backend="nccl"), board, 1.0), {"x": 0})
    x = torch.randn(6, 4, device=device)
    for got in (wire.all_gather("x", x), wire.reduce_scatter("x", x), wire.broadcast("x", x)):
        assert torch.equal(got, x)
    assert torch.equal(wire.all_to_all("x", x.flatten(), Pieces([24], [24])), x.flatten())
    wire.settle("x")
    assert wire.counted == {"x": 0}
    torch.cuda._sleep(12_000_000_000)  # cycles: some seconds, past the limit
    start = time.monotonic()
    wire.all_gather("x", x)
    with pytest.raises(RankError, match="x: not done within 1 s; no rank is behind the others"):
        wire.settle("x")
    seconds = time.monotonic() - start
    wire.group.handle.abort()
    wire.group.handle.abort()  # by whom it concerns: the board's thread and the end of the run
    board.close()
    return seconds


def test_nccl_calls_are_right_and_bounded():
    """In a world of its own: a process whose group was aborted is no use to later cases."""
    with World(1) as world:
        (seconds,) = world.run(nccl_alone, ranks=1)
    assert 0.9 < seconds < 4


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device a rank: 2 here")


@two_devices
@pytest.mark.parametrize("layout", [Layout(sp=2), Layout(tp=2)], ids=str)
def test_moves_over_nccl(world, layout):
    """Two terms make one sum in any order: bits are equal here too."""
    world.run(on_own_device, moves, layout, ranks=2)


@two_devices
def test_an_error_frees_ranks_that_wait_in_nccl(world):
    outcomes = world.outcomes(on_own_device, block_fails, ranks=2)
    assert {type(outcome.error) for outcome in outcomes} == {NumericsError}
    assert max(outcome.seconds for outcome in outcomes) < 15


def sleeps_once_connected(seat, device: str, backend: str) -> None:
    """Rank 1 does not come to the second exchange, and lives.

    NCCL connects devices in the first one, which takes seconds, and cannot be aborted while it waits for a rank to
    connect; so the limit is longer than that.
    """
    layout = Layout(sp=seat.world)
    comm, plan = seat.connect(layout, timeout=8, device=device, backend=backend), plan_of(layout, 37)
    share, moved, whole = plan.shares[seat.rank], comm.exchange(plan), Whole(plan, device)
    check_heads(moved, share, whole)
    with comm.stage("denoise"):
        if seat.rank == 1:
            time.sleep(12)
        check_heads(moved, share, whole)


@two_devices
def test_a_rank_that_sleeps_is_named_over_nccl(world):
    outcomes = world.outcomes(on_own_device, sleeps_once_connected, ranks=2)
    assert all("rank 1 is missing" in str(outcome.error) for outcome in outcomes), [str(o.error) for o in outcomes]


def test_heads_move_in_groups_between_ranks_that_share_a_device(world):
    for found in world.run(every_variant, Layout(sp=2, tp=2), "cuda:0", "gloo", ranks=4):
        assert max(found.values()) < 1e-5, found


@two_devices
def test_heads_move_in_groups_over_nccl(world):
    """Groups come and go on NCCL's stream, beside attention on the device's own."""
    for found in world.run(on_own_device, every_variant, Layout(sp=2), ranks=2):
        assert max(found.values()) < 1e-5, found


def many_rows(seat, device: str, backend: str) -> None:
    """Groups so large that they are on their way while the host goes on: none is read before it came."""
    layout, rows = Layout(sp=seat.world), 200_001
    comm = seat.connect(layout, device=device, backend=backend)
    plan = replace(plan_of(layout, rows), exchange=ExchangePlan("heads", 3))
    share, moved, whole = plan.shares[seat.rank], comm.exchange(plan), Whole(plan, device)
    q_gHD, k_gHD, v_gHD = (x_SHD[slice(*share.rows)] for x_SHD in whole.qkv)
    for _ in range(3):
        o_gHD = moved.attend(q_gHD, k_gHD, v_gHD, lambda q, k, v: q + 2 * k + 3 * v)
        assert torch.equal(o_gHD, q_gHD + 2 * k_gHD + 3 * v_gHD)


@two_devices
def test_large_groups_are_not_read_before_they_came(world):
    world.run(on_own_device, many_rows, ranks=2)
