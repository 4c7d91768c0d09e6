"""Writing on a thread of its own, so that the next chunk is made while one is encoded."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Full, Queue
from typing import TypeVar

T = TypeVar("T")
LOOK = 0.1  # seconds between looks at a writer that takes nothing


class _End(Exception):
    """No more chunks."""


def write_behind(write: Callable[[Iterator[T]], None], chunks: Iterable[T]) -> None:
    """`write(chunks)`, one chunk behind those who make them, which stays in this thread.

    Whatever `chunks` raise is raised in `write` too, where it stands at its next chunk, and then here. What `write`
    raises is raised here, at the next chunk at the latest.
    """
    queue: Queue[T | BaseException] = Queue(maxsize=1)
    with ThreadPoolExecutor(1, thread_name_prefix="h3dist-write") as pool:
        writer = pool.submit(write, _taken(queue))
        try:
            for chunk in chunks:
                if not _put(queue, chunk, writer):
                    break
            _put(queue, _End(), writer)
        except BaseException as error:
            _put(queue, error, writer)
            raise
    writer.result()


def _taken(queue: "Queue[T | BaseException]") -> Iterator[T]:
    while True:
        item = queue.get()
        if isinstance(item, _End):
            return
        if isinstance(item, BaseException):
            raise item
        yield item


def _put(queue: "Queue[T | BaseException]", item: T | BaseException, writer: "Future[None]") -> bool:
    """Whether the item was put: not where the writer is done, and takes nothing any more."""
    while not writer.done():
        try:
            queue.put(item, timeout=LOOK)
        except Full:
            continue
        return True
    return False
