"""The harness that other tests stand on must itself fail where it should."""

import os
import time

import pytest
from world import World


@pytest.fixture(scope="module")
def world():
    with World(3) as world:
        yield world


def whoami(seat, word: str) -> tuple:
    return word, seat.rank, seat.world, os.getpid()


def test_processes_serve_many_cases_of_any_size(world):
    whole = world.run(whoami, "a")
    assert [value[:3] for value in whole] == [("a", rank, 3) for rank in range(3)]
    part = world.run(whoami, "b", ranks=2)
    assert [value[2] for value in part] == [2, 2]
    assert [value[3] for value in part] == [value[3] for value in whole[:2]], "processes were not kept"


def fails_on_one(seat) -> None:
    if seat.rank == 1:
        raise KeyError("a key that is not there")


def test_an_error_names_its_rank(world):
    with pytest.raises(AssertionError, match=r"1 of 3 ranks failed\nrank 1:\n(.|\n)*a key that is not there") as caught:
        world.run(fails_on_one)
    assert type(caught.value.__cause__) is KeyError


def ends(seat) -> None:
    if seat.rank == 2:
        os._exit(9)


def test_the_end_of_a_process_is_told_and_mended(world):
    assert [outcome.exit for outcome in world.outcomes(ends)] == [None, None, 9]
    with pytest.raises(AssertionError, match="rank 2 ended with exit code 9"):
        world.run(ends)
    assert len({value[3] for value in world.run(whoami, "c")}) == 3


def hangs_somewhere(seat) -> None:
    time.sleep(60 * seat.rank)


def test_past_the_limit_stacks_are_shown_and_processes_ended(world):
    pids = [value[3] for value in world.run(whoami, "d")]
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] not done in 1 s(.|\n)*hangs_somewhere"):
        world.run(hangs_somewhere, limit=1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
