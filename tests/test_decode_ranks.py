"""All ranks decode: the frames of rank 0 alone to the last byte, the planned bytes, nobody far ahead, nobody stuck."""

import pytest
import torch
from painters import Painter, Shape, decode, decode_all, decode_on_gpus, serial
from world import World

from h3dist.errors import H3Error, NumericsError, RankError
from h3dist.plan import schedule_decode

SHAPES = [
    Shape(288, 288, 39),  # 2 x 2 tiles, two chunks
    Shape(288, 32, 124),  # 1 x 2 tiles, seven chunks
    Shape(64, 64, 5),  # one tile of two latents: fewer jobs than ranks
    Shape(32, 32, 362),  # one tile a chunk, 21 chunks
    Shape(864, 32, 39, batch=2),  # two chunks of five tiles, in calls of 2, 2 and 1
    Shape(288, 288, 39, batch=7),  # all four of a chunk in a call
]
LONG = Shape(288, 32, 124)
pytestmark = pytest.mark.limit(200)


@pytest.fixture(scope="module")
def world():
    with World(8) as world:
        yield world


@pytest.fixture(scope="module")
def expected():
    torch.set_num_threads(1)
    return {shape: serial(shape) for shape in SHAPES}


@pytest.mark.parametrize("ranks", range(2, 9))
def test_frames_and_sound_are_those_of_one_rank_and_bytes_those_of_the_plan(world, expected, ranks):
    of_ranks = world.run(decode_all, SHAPES, ranks=ranks)
    for shape, *seen in zip(SHAPES, *of_ranks, strict=True):
        plan = shape.plan(ranks)
        assert (seen[0].frames, seen[0].sound) == expected[shape], shape
        for rank, saw in enumerate(seen):
            assert saw.sent == saw.planned, shape
            assert len(saw.begun) == sum(saw.calls) == plan.decode.tiles[rank]
        calls = sorted(call for saw in seen for call in saw.calls)
        batch, chunks = plan.decode.batch, shape.frames // 17 or 1
        rest = sum(calls) // chunks % batch
        assert calls == [rest] * (chunks if rest else 0) + [batch] * (sum(calls) // chunks // batch * chunks), shape
        assert not any(seen[0].sent.values()), "rank 0 sends nothing"
        assert seen[-1].sent["decode.sound"] == 2 * 800 * plan.geometry.audio_latents * 4
        jobs = len(list(schedule_decode(plan.geometry, 1, "cpu")[0].jobs()))
        assert sum(plan.decode.tiles) == jobs
        tile = 3 * 22 * min(256, shape.width) * min(256, shape.height) * 4
        assert sum(saw.sent["decode.tiles"] for saw in seen) == (jobs - plan.decode.tiles[0]) * tile


def test_rank_0_has_frames_while_others_decode_and_nobody_runs_away(world):
    """Rank 0 takes its time over each chunk: the others wait, so that no memory fills up with their tiles."""
    first, other = world.run(decode, LONG, {}, 0.15, ranks=2)
    assert len(first.had) == 7
    assert first.had[0] < other.begun[-1][1], "rank 0 had frames before the other began its last tile"
    for latents, time in other.begun:
        chunk = latents[0] // 5
        if chunk > 3:
            assert time > first.had[chunk - 4], f"chunk {chunk} was begun before rank 0 had chunk {chunk - 4}"


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_nan_on_any_rank_is_told_by_its_frames_everywhere(world, bad):
    outcomes = world.outcomes(decode, LONG, {bad: "nan"}, ranks=3)
    assert all(isinstance(outcome.error, NumericsError) for outcome in outcomes), outcomes
    assert "the video VAE gave NaN or infinity in frames" in str(outcomes[0].error)
    assert str(outcomes[0].error) in str(outcomes[1].error)


def test_an_error_on_a_helper_is_everybodys(world):
    first, second, third = world.outcomes(decode, LONG, {1: "raise"}, ranks=3)
    assert isinstance(second.error, MemoryError)
    for outcome in (first, third):
        assert isinstance(outcome.error, H3Error)
        assert "rank 1, decode: MemoryError: no memory for a tile" in str(outcome.error)


def test_a_helper_that_dies_is_named_soon(world):
    first, second, third = world.outcomes(decode, LONG, {1: "die"}, ranks=3)
    assert second.exit == -9
    for outcome in (first, third):
        assert isinstance(outcome.error, RankError) and outcome.seconds < 10, outcome
        assert "no answer from rank 1" in str(outcome.error)


def test_a_helper_that_sleeps_is_named_with_the_label(world):
    first, _, third = world.outcomes(decode, LONG, {1: "sleep"}, 0.0, 1.5, ranks=3)
    for outcome in (first, third):
        assert isinstance(outcome.error, RankError), outcome
        assert "decode.tiles: not done within 1.5 s" in str(outcome.error)
        assert "rank 1 is missing" in str(outcome.error)


def test_a_rank_without_tiles_reads_no_vae():
    from painters import painted

    from h3dist.decoding import decode_tiles
    from h3dist.spread import Schedule

    class Silent:
        rank, device = 1, torch.device("cpu")
        layout = Shape(64, 64, 5).plan(3).layout

        @staticmethod
        def hand_in(label, mine, counts):
            return lambda: mine.new_empty(0)

    shape = Shape(64, 64, 5)
    cuts, _ = schedule_decode(shape.plan(3).geometry, 3, "cpu")
    clean = painted(shape, 1)
    object.__setattr__(clean, "painter", None)  # reading it would fail
    assert list(decode_tiles(clean, Silent, Schedule(3, ((0,),)), cuts)) == [[]]
    assert isinstance(painted(shape, 1).video_vae(), Painter)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_on_gpus_frames_are_those_of_one(world, backend):
    """float16 tiles, over gloo by way of the host on one GPU, over NCCL on two."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    for shape in SHAPES:
        seen = world.run(decode_on_gpus, shape, backend, ranks=2)
        assert (seen[0].frames, seen[0].sound) == serial(shape, "cuda:0")
        assert all(saw.sent == saw.planned for saw in seen)
        assert seen[1].sent["decode.tiles"] % 2 == 0
