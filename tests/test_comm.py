"""The moves between ranks and their agreement: real processes and gloo against one process."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import FileStore, HashStore, TCPStore
from world import World

import h3dist.comm.exchange as exchange_module
from h3dist.checkpoint.comfy import DenoiserDims
from h3dist.comm import Comm
from h3dist.comm.board import Board, Due
from h3dist.errors import CheckpointError, ConfigError, H3Error, NumericsError, OutputError, RankError
from h3dist.plan import LABELS, Layout, Plan, make_plan
from h3dist.topology import Ranks

# Heads that 4, 6 and 8 do not divide; hidden other than heads * head size.
DIMS = DenoiserDims(
    hidden=20, heads=14, head_dim=4, ffn=256, layers=2, refiner_layers=1, text_dim=12, video_channels=24,
    audio_channels=32, rope_freqs=1, form="curve", curve_grid=3, curve_rank=2, time_freq=0, time_hidden=0,
    time_dim=2,
)  # fmt: skip
# Rows divided by nothing, fewer than ranks, and so few that one rank alone has any.
RUNS = ((37, "float32"), (37, "bfloat16"), (5, "bfloat16"), (1, "float32"))
STEPS = 1
LAYOUTS = [
    Layout(),
    *(Layout(sp=ranks) for ranks in range(2, 9)),
    *(Layout(tp=ranks) for ranks in (2, 3, 4, 6, 8)),
    *(Layout(sp=sp, tp=tp) for sp, tp in ((2, 2), (2, 3), (3, 2), (4, 2), (2, 4))),
]


@pytest.fixture(scope="module")
def world():
    with World(8) as world:
        yield world


def plan_of(layout: Layout, rows: int, dtype: str = "float32") -> Plan:
    """A plan for a sequence of `rows` rows, one of them text."""
    cut = {"latent_t": 2, "latent_h": 2, "latent_w": 2}
    clip = SimpleNamespace(audio_rows=0, video_rows=rows - 1, width=32, height=32, **cut)
    asked = SimpleNamespace(geometry=clip, notes=())
    return make_plan(asked, DIMS, 1, layout, dtype=dtype, attention="sdpa", steps=STEPS, amax=4 * DIMS.layers)


class Whole:
    """What one process would hold: equal on every rank, since each draws it from one seed."""

    def __init__(self, plan: Plan, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(plan.rows)
        dtype = getattr(torch, plan.dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw).to(device, dtype)

        self.x_SC = normal(plan.rows, DIMS.hidden)
        self.qkv = [normal(plan.rows, DIMS.heads, DIMS.head_dim) for _ in range(3)]
        self.partials_tSC = normal(plan.layout.tp, plan.rows, DIMS.hidden)
        self.text_LC = normal(plan.text_rows, DIMS.hidden)
        self.out_SO = normal(plan.rows, 128).float()


def nan_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Padding that shows wherever it gets into a result."""
    return torch.cat([x, x.new_full((rows - x.shape[0], *x.shape[1:]), torch.nan)])


def moves(seat, layout: Layout, device: str = "cpu", backend: str = "gloo") -> None:
    """A whole run's moves in every size and dtype, each checked, and all of them counted."""
    exchange_module._pad_rows = nan_rows
    comm = seat.connect(layout, device=device, backend=backend)
    for rows, dtype in RUNS:
        comm.counted.update(dict.fromkeys(LABELS, 0))
        plan = plan_of(layout, rows, dtype)
        check_run(comm, plan, Whole(plan, device))
        assert comm.counted == plan.shares[seat.rank].sent, (rows, dtype)


def check_run(comm: Comm, plan: Plan, whole: Whole) -> None:
    share, moved = plan.shares[comm.rank], comm.exchange(plan)
    text = whole.text_LC if comm.rank == 0 else None
    assert same(comm.broadcast_text(text, whole.text_LC.shape, whole.text_LC.dtype), whole.text_LC)
    own, group = slice(*share.rows), slice(*share.group_rows)
    for _ in range(plan.steps):
        for _ in range(DIMS.layers):
            for _ in range(2):
                assert same(moved.gather_rows(whole.x_SC[own]), whole.x_SC[group])
                partial_gC = whole.partials_tSC[share.tp_index, group]
                assert same(moved.reduce_rows(partial_gC), in_rank_order(whole.partials_tSC)[own])
            check_heads(moved, share, whole)
            check_amax(moved, share, whole.x_SC)
        assert same(moved.gather_outputs(whole.out_SO[own]), whole.out_SO)


def check_heads(moved, share, whole: Whole) -> None:
    """To heads: all rows of my heads. Back: what was sent, to the last bit."""
    group, held, mine = slice(*share.group_rows), slice(*share.tp_heads), slice(*share.heads)
    q_gHD, k_gHD, v_gHD = (x[group, held] for x in whole.qkv)
    by_heads = moved.to_heads(q_gHD, k_gHD, v_gHD)
    for got, want in zip(by_heads, whole.qkv, strict=True):
        assert same(got, want[:, mine])
    assert same(moved.to_rows(by_heads[1]), k_gHD)


def check_amax(moved, share, x_SC: torch.Tensor) -> None:
    """The largest of all ranks' values, also negative, also where a rank has none; NaN is not lost."""
    own = slice(*share.rows)
    for x in (x_SC, -x_SC):
        assert same(moved.amax(x[own]), x_SC.abs().amax().float())
    assert same(moved.amax(x_SC[:0]), x_SC.new_zeros(()).float())
    assert moved.amax(torch.where(x_SC == x_SC[0, 0], torch.nan, x_SC)[own]).isnan()


def in_rank_order(partials_tSC: torch.Tensor) -> torch.Tensor:
    """The sum as the ranks make it: float32, first rank first."""
    total = partials_tSC[0].float()
    for partial in partials_tSC[1:]:
        total = total + partial.float()
    return total.to(partials_tSC.dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return (got.dtype, got.device) == (want.dtype, want.device) and torch.equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_move_of_a_run_is_right_and_sends_what_was_planned(world, layout):
    world.run(moves, layout, ranks=layout.world)


def test_a_reduction_is_near_the_dense_sum():
    whole = Whole(plan_of(Layout(tp=6), 37))
    dense = whole.partials_tSC.double().sum(0)
    assert torch.allclose(in_rank_order(whole.partials_tSC).double(), dense, rtol=0, atol=1e-5)


def test_one_rank_needs_no_process_group():
    plan = plan_of(Layout(), 37)
    with Comm.connect(Ranks(), Layout(), torch.device("cpu")) as comm:
        check_run(comm, plan, Whole(plan))
        comm.same("version", "1")
        assert comm.share({"seed": 7}) == {"seed": 7}
        assert comm.collect("report", "mine") == ["mine"]
        with pytest.raises(OutputError, match="full"), comm.stage("mux"):
            raise OutputError("the disk is full")
    assert not any(comm.counted.values())
    assert not torch.distributed.is_initialized()


def odd_types(seat) -> None:
    comm = seat.connect(Layout(tp=seat.world))
    wire = comm._tensors["tp"]
    mine = torch.full((2, 3), float(seat.rank)).to(torch.float8_e4m3fn)
    whole = wire.all_gather("rows.gather", mine)
    assert whole.dtype == torch.float8_e4m3fn
    assert whole.float().tolist() == [[float(rank)] * 3 for rank in range(seat.world) for _ in range(2)]
    assert comm.counted["rows.gather"] == 6 * (seat.world - 1)


def test_gloo_moves_float8(world):
    world.run(odd_types, ranks=3)


def talk(seat) -> tuple:
    comm = seat.connect(Layout(sp=seat.world))
    comm.same("configuration", {"steps": 12, "names": ["a", "ß"]})
    told = comm.share({"seed": 2**62, "by": seat.rank})
    reports = comm.collect("reports", "x" * seat.rank + "语")
    assert comm.collect("nothing", "") == [""] * seat.world
    with comm.stage("encode"):
        pass
    assert sum(comm.counted.values()) == 0, "metadata is no part of the traffic"
    return told, reports


def test_rank_0_tells_and_all_collect(world):
    for told, reports in world.run(talk, ranks=4):
        assert told == {"seed": 2**62, "by": 0}
        assert reports == ["语", "x语", "xx语", "xxx语"]


def differ(seat) -> None:
    comm = seat.connect(Layout(sp=seat.world))
    comm.same("library version", "1.0")
    comm.same("header hash", "abc" if seat.rank != 2 else "xyz")


def test_a_difference_is_refused_on_every_rank(world):
    for outcome in world.outcomes(differ, ranks=4):
        assert type(outcome.error) is RankError
        assert str(outcome.error) == 'the ranks differ in header hash: rank 0 has "abc"; rank 2 has "xyz"'


def encode_fails(seat, error: Exception, later: Exception | None = None) -> None:
    """Rank 2 fails while it works alone; with `later`, rank 1 fails too, after it."""
    comm = seat.connect(Layout(sp=seat.world))
    with comm.stage("encode"):
        if seat.rank == 2:
            raise error
        if seat.rank == 1 and later is not None:
            time.sleep(0.6)
            raise later


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (CheckpointError("bad scale"), CheckpointError, "rank 2, encode: bad scale"),
        (OutputError("the disk is full"), OutputError, "rank 2, encode: the disk is full"),
        (ValueError("no such thing"), H3Error, "rank 2, encode: ValueError: no such thing"),
    ],
)
def test_one_rank_fails_and_all_leave_with_its_error(world, error, kind, told):
    outcomes = world.outcomes(encode_fails, error, ranks=4)
    for outcome in outcomes:
        own = outcome.rank == 2
        assert type(outcome.error) is (type(error) if own else kind)
        assert str(outcome.error) == (str(error) if own else told)
        assert outcome.seconds < 5


def test_the_first_of_two_errors_is_everybodys(world):
    outcomes = world.outcomes(encode_fails, CheckpointError("first"), OutputError("second"), ranks=4)
    assert {type(outcome.error) for outcome in outcomes} == {CheckpointError}
    assert all(str(outcome.error).endswith("first") for outcome in outcomes)


def block_fails(seat, device: str = "cpu", backend: str = "gloo") -> None:
    """Rank 1 fails in the middle of a run, while the others wait for it in an exchange."""
    comm = seat.connect(Layout(sp=seat.world), device=device, backend=backend)
    plan = plan_of(comm.layout, 37)
    share, moved, whole = plan.shares[seat.rank], comm.exchange(plan), Whole(plan, device)
    with comm.stage("denoise"):
        for block in range(4):
            if seat.rank == 1 and block == 2:
                raise NumericsError("NaN in block 2")
            check_heads(moved, share, whole)


def test_an_error_reaches_ranks_that_wait_in_an_exchange(world):
    outcomes = world.outcomes(block_fails, ranks=3)
    assert {type(outcome.error) for outcome in outcomes} == {NumericsError}
    assert str(outcomes[0].error) == "rank 1, denoise: NaN in block 2"
    assert max(outcome.seconds for outcome in outcomes) < 5, "they waited for the timeout"


def escapes(seat) -> None:
    """Rank 0's error escapes outside of any stage."""
    comm = seat.connect(Layout(sp=seat.world))
    if seat.rank == 0:
        raise OutputError("cannot write")
    comm.agree("mux")


def test_an_error_outside_of_a_stage_reaches_all(world):
    outcomes = world.outcomes(escapes, ranks=3)
    assert {type(outcome.error) for outcome in outcomes} == {OutputError}


def sleeps(seat, layout: Layout, sleeper: int, device: str = "cpu", backend: str = "gloo") -> None:
    """A rank does not come to an exchange, and lives."""
    comm = seat.connect(layout, timeout=0.5, device=device, backend=backend)
    plan = plan_of(layout, 37)
    with comm.stage("denoise"):
        if seat.rank == sleeper:
            time.sleep(2)
        check_heads(comm.exchange(plan), plan.shares[seat.rank], Whole(plan, device))
        comm.agree("denoise")


@pytest.mark.parametrize(("layout", "sleeper"), [(Layout(sp=2, tp=2), 3)], ids=str)
def test_a_rank_that_sleeps_past_the_timeout_is_named_with_the_collective(world, layout, sleeper):
    outcomes = world.outcomes(sleeps, layout, sleeper, ranks=layout.world)
    for outcome in outcomes:
        assert type(outcome.error) is RankError
        missing = f"rank {sleeper} is missing (it is at denoise, after nothing)"
        assert str(outcome.error) == f"denoise, heads.to: not done within 0.5 s; {missing}"


def stage_sleeps(seat) -> None:
    comm = seat.connect(Layout(sp=seat.world), stage_timeout=0.5)
    with comm.stage("decode"):
        if seat.rank == 0:
            time.sleep(2)


def test_a_stage_that_takes_too_long_is_named_with_its_rank(world):
    for outcome in world.outcomes(stage_sleeps, ranks=3):
        assert type(outcome.error) is RankError
        assert "the end of decode: not done within 0.5 s; rank 0 is missing (it is at decode" in str(outcome.error)


def dies(seat, host_dies: bool) -> None:
    """Rank 0 ends without a word; with `host_dies` it is the one that keeps the store of the run."""
    if host_dies:
        seat.store = hosted_store(seat)
    comm = seat.connect(Layout(sp=seat.world))
    comm.agree("start")
    with comm.stage("denoise"):
        if seat.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def hosted_store(seat) -> TCPStore:
    """A store that rank 0 of the case keeps."""
    if seat.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        seat.store.set("port", str(store.port))
        return store
    return TCPStore("127.0.0.1", int(seat.store.get("port")), is_master=False)


@pytest.mark.parametrize("host_dies", [False, True])
def test_a_rank_that_dies_is_noticed_soon(world, host_dies):
    outcomes = world.outcomes(dies, host_dies, ranks=3)
    assert outcomes[0].exit == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert type(outcome.error) is RankError
        assert outcome.seconds < 8
        assert host_dies or "no answer from rank 0" in str(outcome.error)


def test_a_host_that_its_device_holds_is_freed_when_the_time_is_up():
    """Two ranks in one process: rank 0 began a collective that its device never ends, rank 1 did not join."""
    store, freed = HashStore(), [Event(), Event()]
    boards = [Board(store, rank, 2, freed[rank].set) for rank in range(2)]
    for board in boards:
        board.stage("denoise")
        board.begin("sp", "heads.to")
    boards[0].begin("sp", "heads.from")
    boards[0].expect(Due(time.monotonic(), "sp", (0, 1), "heads.from", "not done within 1 s"))
    for board, event in zip(boards, freed, strict=True):
        assert event.wait(10)
        with pytest.raises(RankError) as caught:
            board.check()
        missing = "rank 1 is missing (it is at denoise, after heads.to)"
        assert str(caught.value) == f"denoise, heads.from: not done within 1 s; {missing}"
        board.close()


def test_a_collective_that_was_settled_in_time_is_no_failure():
    store = HashStore()
    board = Board(store, 0, 1)
    board.begin("sp", "heads.to")
    board.expect(Due(time.monotonic() + 0.5, "sp", (0,), "heads.to", "not done"))
    board.expect(None)
    time.sleep(1)
    assert not board.failed
    board.close()


def comes_alone(seat) -> None:
    ranks = Ranks(seat.rank, seat.rank, 4, 4)
    Comm.connect(ranks, Layout(sp=4), torch.device("cpu"), timeout=0.5, store=seat.store)


def test_ranks_that_do_not_come_are_named(world):
    for outcome in world.outcomes(comes_alone, ranks=2):
        assert type(outcome.error) is RankError
        assert str(outcome.error) == "start: rank 2, 3 of 4 did not come within 0.5 s"


@pytest.mark.parametrize(("backend", "words"), [("ncll", "did you mean 'nccl'"), ("nccl", "use gloo or auto")])
def test_a_backend_that_cannot_be_is_refused(backend, words):
    with pytest.raises(ConfigError, match=words):
        Comm.connect(Ranks(), Layout(), torch.device("cpu"), backend=backend)


LEAVES = """
    import sys, time, torch, torch.distributed as dist
    from h3dist.comm import Comm
    from h3dist.errors import RankError
    from h3dist.plan import Layout
    from h3dist.topology import Ranks
    store = dist.FileStore(sys.argv[1], 2)
    ranks, cpu = Ranks(1, 1, 2, 2), torch.device("cpu")
    try:
        with Comm.connect(ranks, Layout(sp=2), cpu, stage_timeout=1, store=store) as comm:
            comm.agree("decode")
    except RankError as error:
        print(time.time(), error, flush=True)
        sys.exit(error.exit_code)
"""


def outlives(seat, path: str) -> tuple[float, str, int]:
    """Rank 0 stays in a stage until rank 1, an interpreter of its own, has given up and ended."""
    command = [sys.executable, "-c", textwrap.dedent(LEAVES), path]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with Comm.connect(Ranks(0, 0, 2, 2), Layout(sp=2), torch.device("cpu"), store=FileStore(path, 2)) as comm:
        said, _ = other.communicate(timeout=50)
        ended = time.time() - float(said.split()[0])
        with pytest.raises(RankError):
            comm.agree("decode")
    return ended, said, other.returncode


def test_a_process_ends_soon_after_its_last_line_whatever_the_others_do(world, tmp_path):
    """gloo's groups would wait in their destructor for the rank that does not come."""
    ((seconds, said, code),) = world.run(outlives, str(tmp_path / "store"), ranks=1)
    assert "rank 0 is missing" in said
    assert code == RankError.exit_code
    assert seconds < 5
