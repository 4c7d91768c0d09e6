"""The same moves on CUDA: ranks that share a device over gloo, and NCCL where there are devices enough."""

import time

import pytest
import torch
import torch.distributed as dist
from test_comm import block_fails, moves, sleeps
from world import World

from h3dist.comm.board import Board
from h3dist.comm.wire import Group, NcclWire
from h3dist.errors import NumericsError, RankError
from h3dist.plan import Layout

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


def on_own_device(seat, function, *args) -> None:
    """`function` with this rank's own device and NCCL."""
    function(seat, *args, f"cuda:{seat.rank}", "nccl")


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
    assert torch.equal(wire.all_to_all("x", x.flatten(), [24], [24]), x.flatten())
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


def test_nccl_calls_are_right_and_bounded(world):
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


@two_devices
def test_a_rank_that_sleeps_is_named_over_nccl(world):
    outcomes = world.outcomes(on_own_device, sleeps, Layout(sp=2), 1, ranks=2)
    assert all("rank 1 is missing" in str(outcome.error) for outcome in outcomes)
