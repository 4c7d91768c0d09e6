"""The static schedule of VAE jobs over ranks: who does what, and how long that takes by unit costs."""

import pytest

from h3dist.spread import Extra, makespan, spread

TILES, CHUNKS = 28, 7  # of 1344 x 768, 124 frames
COSTS = [[1.0] * TILES] * CHUNKS


def length(ranks, extra, costs=COSTS):
    return makespan(spread(costs, ranks, extra), costs, extra)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("extra", [Extra(), Extra(chunk=1.4, sound=6.2), Extra(chunk=0.2, sound=0.5)], ids=str)
def test_eight_ranks_decode_a_clip_nearly_eight_times_as_fast(ranks, extra):
    assert length(1, extra) == pytest.approx(TILES * CHUNKS + CHUNKS * extra.chunk + extra.sound)
    assert length(1, extra) / length(ranks, extra) >= 0.9 * ranks


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("tiles", [1, 2, 3, 7, 28])
def test_every_job_has_one_rank_and_counts_add_up(ranks, tiles):
    schedule = spread([[1.0] * tiles] * 3, ranks, Extra(0.5, 1.0))
    for chunk in range(3):
        mine = [schedule.mine(rank, chunk) for rank in range(ranks)]
        assert sorted(place for places in mine for place in places) == list(range(tiles))
        assert [len(places) for places in mine] == schedule.counts(chunk)
    assert sum(schedule.total(rank) for rank in range(ranks)) == 3 * tiles
    assert schedule.sound == ranks - 1


def test_rank_0_and_the_rank_with_the_sound_have_fewer_jobs():
    schedule = spread(COSTS, 4, Extra(chunk=2.0, sound=20.0))
    first, second, third, last = (schedule.total(rank) for rank in range(4))
    assert first < second and last < third
    assert schedule.mine(3, 0) == [], "the sound comes first"


def test_dear_jobs_are_balanced_by_their_cost():
    schedule = spread([[5.0, 1.0, 1.0, 1.0, 1.0, 1.0]], 2, Extra())
    assert schedule.chunks == ((0, 1, 1, 1, 1, 1),)


def test_a_call_is_one_ranks_and_counts_as_much_as_its_jobs():
    schedule = spread([[1.0] * 5] * 2, 2, Extra(), 2)
    assert schedule.chunks == ((0, 0, 1, 1, 0), (1, 1, 0, 0, 1))
    assert schedule.calls(0, 0, 2) == [[0, 1], [4]] and schedule.calls(1, 0, 2) == [[2, 3]]
    assert spread(COSTS, 4, Extra(0.3, 2.0), 1) == spread(COSTS, 4, Extra(0.3, 2.0))


def test_fewer_jobs_than_ranks_leave_ranks_without_any():
    schedule = spread([[1.0, 1.0]], 8, Extra(chunk=0.1, sound=0.1))
    assert schedule.chunks == ((0, 1),)
    assert makespan(schedule, [[1.0, 1.0]], Extra(chunk=0.1, sound=0.1)) == pytest.approx(1.1)


def test_nobody_runs_further_ahead_than_a_chunk_that_waits():
    """Rank 0 is slow: the other waits for chunk 0 to be whole before it goes on to chunk 2."""
    schedule, costs = spread([[10.0, 1.0]] * 3, 2, Extra()), [[10.0, 1.0]] * 3
    assert schedule.chunks == ((0, 1), (1, 0), (0, 1))
    assert makespan(schedule, costs, Extra()) == 21.0
