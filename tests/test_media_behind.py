"""Writing behind: the same chunks in the same order, one thread for each side, and errors of either on both."""

import threading
import time

import pytest

from h3dist.media import write_behind


def test_all_chunks_arrive_in_order_on_another_thread():
    taken = []
    write_behind(lambda chunks: taken.extend((chunk, threading.get_ident()) for chunk in chunks), iter(range(9)))
    assert [chunk for chunk, _ in taken] == list(range(9))
    assert {thread for _, thread in taken}.isdisjoint({threading.get_ident()})


def test_a_chunk_is_made_while_the_one_before_is_written():
    begun, seen = threading.Event(), []

    def make():
        yield 0
        begun.set()
        yield 1

    def write(chunks):
        for _ in chunks:
            seen.append(begun.wait(10))  # of the first chunk: in vain where both take turns

    write_behind(write, make())
    assert seen == [True, True]


def test_at_most_one_chunk_waits():
    made, taken, ahead = [], [], []

    def make():
        for index in range(6):
            made.append(index)
            ahead.append(len(made) - len(taken))
            yield index

    def write(chunks):
        for chunk in chunks:
            time.sleep(0.02)
            taken.append(chunk)

    write_behind(write, make())
    assert max(ahead) <= 3, "one that is made, one that waits, one that is written"


def test_an_error_of_the_maker_reaches_the_writer_which_cleans_up():
    seen = []

    def make():
        yield 1
        raise ValueError("no more")

    def write(chunks):
        try:
            for chunk in chunks:
                seen.append(chunk)
        except ValueError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="no more"):
        write_behind(write, make())
    assert seen == [1, "no more"]


def test_an_error_of_the_writer_ends_the_making():
    made = []

    def make():
        for index in range(1000):
            made.append(index)
            yield index

    def write(chunks):
        next(chunks)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_behind(write, make())
    assert len(made) < 10


def test_a_writer_that_stops_early_without_an_error_is_no_error():
    write_behind(lambda chunks: next(chunks), iter(range(100)))
