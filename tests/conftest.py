"""A time limit for every test that also ends the ranks it started, the `gpu` marker, and a cloud for rented pods."""

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path

import pytest

LIMIT = 120.0  # seconds a test may take; `@pytest.mark.limit(300)` gives one test more
GRACE = 15.0  # seconds for a test to fail after its limit, before the whole run is ended
STDERR = pytest.StashKey[int]()


def pytest_configure(config):
    config.stash[STDERR] = os.dup(2)  # the real one: by the time a test hangs, 2 is being captured


def pytest_unconfigure(config):
    os.close(config.stash[STDERR])


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items[:] = _longest_first(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _longest_first(items):
    """Files with the longest limits first, then those of most tests: at the end no process works on while others rest.

    Those that wait for others more than they compute stand between the first ones, so that they run beside such.
    For `pytest -n N --dist loadfile --no-loadscope-reorder`.
    """
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    ordered = sorted(files.values(), key=lambda own: (-max(map(_limit_of, own)), -len(own)))
    waiting = [own for own in ordered if own[0].get_closest_marker("waits")]
    working = [own for own in ordered if not own[0].get_closest_marker("waits")]
    pairs = zip_longest(working, waiting, fillvalue=[])
    return [item for pair in pairs for own in pair for item in own]


def _limit_of(item):
    marker = item.get_closest_marker("limit")
    return float(marker.args[0]) if marker else LIMIT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    seconds = _limit_of(item)
    with _limited(seconds, item.config.stash[STDERR], item.nodeid):
        return (yield)


@contextmanager
def _limited(seconds: float, stderr: int, name: str) -> Iterator[None]:
    """Past `seconds`: every stack on stderr, every process below this one killed, the test failed.

    A main thread that is stuck outside Python cannot fail its test; then faulthandler ends the run.
    """

    def expire(_signal, _frame):
        os.write(stderr, f"\n{name}: over its limit of {seconds:g} s; the stacks:\n".encode())
        faulthandler.dump_traceback(stderr)
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail(f"over its limit of {seconds:g} s", pytrace=True)

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=stderr)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, nearest first, from /proc; none where there is no /proc."""
    parents = dict(filter(None, map(_parent, Path("/proc").glob("[0-9]*/stat"))))
    found = [pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]


def _parent(stat: Path) -> tuple[int, int] | None:
    """A process and its parent; the name before them may hold spaces and brackets."""
    try:
        return int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # it has just ended


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def one_thread():
    """Matrices as small as a test's are slower on many."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cloud(tmp_path):
    """A service that rents pods out, on this machine."""
    from fake_runpod import FakeRunpod

    with FakeRunpod(tmp_path / "cloud") as cloud:
        yield cloud


@pytest.fixture
def desk(cloud, tmp_path):
    """One of its users."""
    from runpod_desk import Desk

    return Desk(cloud, tmp_path)
