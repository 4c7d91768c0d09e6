"""Reading by a few threads ahead of whoever takes what is read: a disk works while a bus carries the last tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

READERS = 2  # one checks and sends what it read while the other reads; more hold more memory

T = TypeVar("T")


def ahead(jobs: Iterable[Callable[[], T]], threads: int = READERS) -> Iterator[T]:
    """The results of `jobs` in their order, each begun by one of `threads` threads before it is asked for.

    No more than `threads` of them are begun beyond the one that is given out. Raises what a job raises, in its turn.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="h3dist-read") as pool:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
