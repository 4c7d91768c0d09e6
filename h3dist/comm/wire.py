"""The collectives of one group of ranks, over gloo or NCCL: labelled, counted, and bounded in time.

Every tensor that moves between ranks moves in one of the methods here. They give what the group's
ranks, in their order, would give if laid end to end, and they count what this rank sends to the others by
the label.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from h3dist.comm.board import Board, Due
from h3dist.comm.pieces import Pieces

# torch 2.13 renamed both; the old names still work there, with a warning.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SLICE = timedelta(seconds=0.2)  # between looks at the board while waiting
BACKSTOP = 30.0  # seconds that the backend's own time limit lies behind ours, which can name the missing


@dataclass(frozen=True)
class Group:
    """Ranks that share a wire, in the order of their pieces, and how long they wait for each other."""

    name: str
    ranks: tuple[int, ...]
    index: int  # mine among them
    handle: dist.ProcessGroup
    board: Board
    limit: float  # seconds

    @property
    def size(self) -> int:
        return len(self.ranks)


class Wire(ABC):
    """The collectives of a group. `counted` gathers, by label, the bytes that this rank sends."""

    def __init__(self, group: Group, counted: dict[str, int]) -> None:
        self.group, self.counted = group, counted

    def all_gather(self, label: str, x: Tensor) -> Tensor:
        """Every rank's `x`, all of one shape [r, ...], end to end: [size * r, ...]."""
        self._begin(label, x.nbytes * (self.group.size - 1))
        return self._gather(label, x.contiguous())

    def gather_others_later(self, label: str, x: Tensor) -> Callable[[], Tensor]:
        """As `all_gather`, but begun only, as `all_to_all_later` without `hold`; own rows need not be in it."""
        self._begin(label, x.nbytes * (self.group.size - 1))
        return self._start_gather(label, x.contiguous())

    def all_to_all(self, label: str, x: Tensor, pieces: Pieces) -> Tensor:
        """Flat `x` cut in `pieces`, one for each rank; gives theirs for me, end to end."""
        self._begin_pieces(label, x, pieces)
        return self._exchange(label, x.flatten(), pieces)

    def all_to_all_later(self, label: str, x: Tensor, pieces: Pieces, *, hold: bool = True) -> Callable[[], Tensor]:
        """As `all_to_all`, but begun only: what it gives waits for the others' pieces and gives them, once called.

        Every rank begins such exchanges in one order, and waits for all of them. Without `hold` a host whose device
        does the waiting goes on itself: what it gives the device next comes after the pieces, and `settle` bounds it.
        """
        self._begin_pieces(label, x, pieces)
        return self._start(label, x.flatten(), pieces, hold)

    def reduce_scatter(self, label: str, x: Tensor) -> Tensor:
        """The sum over ranks of x [size * r, ...], of which each rank gets its own r rows."""
        self._begin(label, x.nbytes // self.group.size * (self.group.size - 1))
        return self._reduce(label, x.contiguous())

    def reduce_scatter_later(self, label: str, x: Tensor) -> Callable[[], Tensor]:
        """As `reduce_scatter`, but begun only, as `all_to_all_later` without `hold`."""
        self._begin(label, x.nbytes // self.group.size * (self.group.size - 1))
        return self._start_reduce(label, x.contiguous())

    def broadcast(self, label: str, x: Tensor) -> Tensor:
        """The first rank's `x` on all; the others give a tensor of its shape and dtype, which may be overwritten."""
        self._begin(label, x.nbytes * (self.group.size - 1) if self.group.index == 0 else 0)
        return self._spread(label, x.contiguous())

    @abstractmethod
    def settle(self, label: str) -> None:
        """Returns once all that was begun is done on this rank's device, or raises what stopped it."""

    def _begin_pieces(self, label: str, x: Tensor, pieces: Pieces) -> None:
        own = self.group.index
        assert x.is_contiguous() and sum(pieces.out) == x.numel(), (pieces, x.shape)
        assert pieces.out[own] == pieces.into[own], pieces
        self._begin(label, (x.numel() - pieces.out[own]) * x.element_size())

    def _begin(self, label: str, count: int) -> None:
        self.group.board.begin(self.group.name, label)
        self.counted[label] += count

    def _lost(self, label: str, cause: str) -> BaseException:
        return self.group.board.lost(self.group.name, self.group.ranks, label, cause)

    def _late(self) -> str:
        return f"not done within {self.group.limit:g} s"

    def _wait(self, label: str, done: Callable[[], bool], pause: float = 0.0) -> None:
        """Asks `done`, `pause` seconds apart, until it holds, the run fails, or the time is up."""
        deadline = time.monotonic() + self.group.limit
        while not done():
            time.sleep(pause)
            self.group.board.check()
            if time.monotonic() > deadline:
                raise self._lost(label, self._late())

    @abstractmethod
    def _gather(self, label: str, x: Tensor) -> Tensor: ...
    @abstractmethod
    def _exchange(self, label: str, x: Tensor, pieces: Pieces) -> Tensor: ...
    @abstractmethod
    def _start(self, label: str, x: Tensor, pieces: Pieces, hold: bool) -> Callable[[], Tensor]: ...
    @abstractmethod
    def _start_gather(self, label: str, x: Tensor) -> Callable[[], Tensor]: ...
    @abstractmethod
    def _reduce(self, label: str, x: Tensor) -> Tensor: ...
    @abstractmethod
    def _start_reduce(self, label: str, x: Tensor) -> Callable[[], Tensor]: ...
    @abstractmethod
    def _spread(self, label: str, x: Tensor) -> Tensor: ...


class GlooWire(Wire):
    """Over gloo, by way of the CPU and as plain bytes: gloo knows neither float8 nor CUDA's streams."""

    def settle(self, label: str) -> None:
        """Nothing to wait for: each collective here returns when it is done."""

    def _gather(self, label: str, x: Tensor) -> Tensor:
        return self._start_gather(label, x)()

    def _start_gather(self, label: str, x: Tensor) -> Callable[[], Tensor]:
        mine = _to_bytes(x)
        all_of_it = mine.new_empty(self.group.size * mine.numel())
        work = _all_gather(all_of_it, mine, group=self.group.handle, async_op=True)

        def finish() -> Tensor:
            self._finish(label, work)
            return _from_bytes(all_of_it, x).view(self.group.size * x.shape[0], *x.shape[1:])

        return finish

    def _exchange(self, label: str, x: Tensor, pieces: Pieces) -> Tensor:
        return self._start(label, x, pieces, True)()

    def _start(self, label: str, x: Tensor, pieces: Pieces, hold: bool) -> Callable[[], Tensor]:
        mine, size = _to_bytes(x), x.element_size()
        theirs = mine.new_empty(sum(pieces.into) * size)
        cuts = [n * size for n in pieces.into], [n * size for n in pieces.out]
        work = dist.all_to_all_single(theirs, mine, *cuts, group=self.group.handle, async_op=True)

        def finish() -> Tensor:
            self._finish(label, work)
            return _from_bytes(theirs, x)

        return finish

    def _reduce(self, label: str, x: Tensor) -> Tensor:
        return self._start_reduce(label, x)()

    def _start_reduce(self, label: str, x: Tensor) -> Callable[[], Tensor]:
        """An all-to-all and a float32 sum in the order of the ranks: gloo's own reduce-scatter sends twice as much."""
        even = [x.numel() // self.group.size] * self.group.size
        came = self._start(label, x.flatten(), Pieces(even, even), False)

        def finish() -> Tensor:
            first, *others = came().view(self.group.size, -1).float()
            for part in others:
                first = first + part
            return first.to(x.dtype).view(x.shape[0] // self.group.size, *x.shape[1:])

        return finish

    def _spread(self, label: str, x: Tensor) -> Tensor:
        whole = _to_bytes(x)
        self._run(label, dist.broadcast, whole, self.group.ranks[0])
        return _from_bytes(whole, x).view(x.shape)

    def _run(self, label: str, collective: Callable[..., dist.Work], *arguments: Any) -> None:
        """Starts a collective and waits for it."""
        self._finish(label, collective(*arguments, group=self.group.handle, async_op=True))

    def _finish(self, label: str, work: dist.Work) -> None:
        """Waits for a collective that was started, looking at the board now and then."""

        def done() -> bool:
            try:
                return work.wait(SLICE)
            except RuntimeError:
                if not work.is_completed():
                    return False
            try:  # it ended, well or not, while we were told that it had not
                return work.wait()
            except RuntimeError as error:
                raise self._lost(label, in_short(error)) from None

        self._wait(label, done)


class NcclWire(Wire):
    """Over NCCL, on the device's streams: the host does not wait, except in `settle`.

    A host may also be held by a full launch queue, behind a collective that a rank does not join. So the
    board's thread keeps the time from the last collective begun; NCCL's own limit, which ends the process,
    is longer.
    """

    def warm_up(self) -> None:
        """Connects the devices, as NCCL does at the first use: a rank that fails before it would leave its peers there.

        All ranks call it.
        """
        self.group.board.begin(self.group.name, "start")
        self._run("start", dist.all_reduce, torch.zeros(1, device="cuda"))
        self.settle("start")

    def settle(self, label: str) -> None:
        """Waits on the host until the device has done all that was begun."""
        event = torch.cuda.Event()
        event.record()
        self._wait(label, event.query, pause=0.0005)
        self.group.board.expect(None)

    def _begin(self, label: str, count: int) -> None:
        super()._begin(label, count)
        limit = time.monotonic() + self.group.limit
        self.group.board.expect(Due(limit, self.group.name, self.group.ranks, label, self._late()))

    def _gather(self, label: str, x: Tensor) -> Tensor:
        all_of_it = x.new_empty(self.group.size * x.shape[0], *x.shape[1:])
        self._run(label, _all_gather, all_of_it, x)
        return all_of_it

    def _start_gather(self, label: str, x: Tensor) -> Callable[[], Tensor]:
        all_of_it = x.new_empty(self.group.size * x.shape[0], *x.shape[1:])
        work = self._run(label, partial(_all_gather, async_op=True), all_of_it, x)

        def finish() -> Tensor:
            work.wait()  # what is computed from now on comes after it
            return all_of_it

        return finish

    def _exchange(self, label: str, x: Tensor, pieces: Pieces) -> Tensor:
        theirs = x.new_empty(sum(pieces.into))
        self._run(label, dist.all_to_all_single, theirs, x, list(pieces.into), list(pieces.out))
        return theirs

    def _start(self, label: str, x: Tensor, pieces: Pieces, hold: bool) -> Callable[[], Tensor]:
        """On NCCL's own stream, beside what the device computes; `x` is kept until then."""
        theirs, cuts = x.new_empty(sum(pieces.into)), (list(pieces.into), list(pieces.out))
        work = self._run(label, partial(dist.all_to_all_single, async_op=True), theirs, x, *cuts)

        def finish() -> Tensor:
            if hold:
                self._wait(label, work.is_completed, pause=0.0005)
                self.group.board.expect(None)
            work.wait()  # what is computed from now on comes after it
            return theirs

        return finish

    def _reduce(self, label: str, x: Tensor) -> Tensor:
        mine = x.new_empty(x.shape[0] // self.group.size, *x.shape[1:])
        self._run(label, _reduce_scatter, mine, x)
        return mine

    def _start_reduce(self, label: str, x: Tensor) -> Callable[[], Tensor]:
        mine = x.new_empty(x.shape[0] // self.group.size, *x.shape[1:])
        work = self._run(label, partial(_reduce_scatter, async_op=True), mine, x)

        def finish() -> Tensor:
            work.wait()  # what is computed from now on comes after it
            return mine

        return finish

    def _spread(self, label: str, x: Tensor) -> Tensor:
        self._run(label, dist.broadcast, x, self.group.ranks[0])
        return x

    def _run(self, label: str, collective: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return collective(*arguments, group=self.group.handle)
        except (dist.DistBackendError, dist.DistNetworkError) as error:
            raise self._lost(label, in_short(error)) from None


def nccl_options() -> Any:
    """Of NCCL's groups: on a stream that comes first wherever a multiprocessor is free, or it would wait for the last
    wave of what it is to run beside.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def _to_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, on the CPU."""
    return x.flatten().view(torch.uint8).cpu()


def _from_bytes(data: Tensor, like: Tensor) -> Tensor:
    """Flat bytes as a tensor of `like`'s dtype, on its device."""
    return data.to(like.device).view(like.dtype)


def in_short(error: BaseException) -> str:
    """What a backend says of a broken connection, without its source line, its advice and the stack below."""
    lines = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0]
