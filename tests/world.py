"""Real processes for tests of what several ranks do together, over gloo on this machine.

    with World(8) as world:
        results = world.run(function, 1, 2, ranks=3)   # [function(seat, 1, 2) on rank 0, 1, 2]

Processes start once, from a fork server that has imported torch, and without CUDA what whole runs take long to import,
and that nothing else has touched. They serve many cases; each case gets a rendezvous of its own. `function` is a
top-level function of an importable module. It is handed its `Seat`, by which it connects. A process whose case failed
is replaced before the next.
"""

import faulthandler
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed", "pytest", "h3dist.comm", "h3dist.plan", "world"]
WHOLE_RUNS = [  # which might ask a GPU's driver something, and then no child could use it
    "h3dist.pipeline",
    "av",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "diffusers.models.autoencoders.autoencoder_kl_minimax_h3",
    "diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio",
    "diffusers.modular_pipelines.minimax_h3",
]
HOST = "127.0.0.1"
CONTEXT = multiprocessing.get_context("forkserver")


@dataclass
class Seat:
    """One rank's place in a case. What it connects is closed when the case ends."""

    rank: int
    world: int
    store: Any  # torch.distributed.Store, of this case alone
    stack: ExitStack = field(default_factory=ExitStack)

    def connect(
        self,
        layout: Any,
        *,
        device: str = "cpu",
        backend: str = "gloo",
        timeout: float = 20,
        stage_timeout: float = 20,
        transport: str = "collective",
    ) -> Any:
        """This rank's Comm, for a layout of as many ranks as the case has."""
        import torch

        from h3dist.comm import Comm
        from h3dist.topology import Ranks

        comm = Comm.connect(
            Ranks(self.rank, self.rank, self.world, self.world),
            layout,
            torch.device(device),
            backend=backend,
            timeout=timeout,
            stage_timeout=stage_timeout,
            store=self.store,
            transport=transport,
        )
        return self.stack.enter_context(comm)


@dataclass(frozen=True)
class Outcome:
    """How a case ended on one rank: with a value, an error, or the end of its process."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit: int | None = None  # exit code of the process, negative for a signal, if it ended
    seconds: float = 0.0


class World:
    """Up to `size` ranks for any number of cases."""

    def __init__(self, size: int) -> None:
        import torch
        import torch.distributed as dist

        more = WHOLE_RUNS if torch.version.cuda is None else []
        CONTEXT.set_forkserver_preload(PRELOAD + more)  # no effect once the fork server runs
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="h3dist-world-")
        self._cases = itertools.count()
        self._seats: list[Worker | None] = [None] * size

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None, limit: float = 60) -> list[Any]:
        """`function(seat, *args)` on each of `ranks` ranks (all of them by default): its values in rank
        order.

        Raises AssertionError with rank and traceback for the first rank that failed, TimeoutError past
        `limit` s.
        """
        outcomes = self.outcomes(function, *args, ranks=ranks, limit=limit)
        for outcome in outcomes:
            if outcome.exit is not None:
                raise AssertionError(f"rank {outcome.rank} ended with exit code {outcome.exit}")
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            told = "\n".join(f"rank {outcome.rank}:\n{outcome.trace}" for outcome in failed)
            raise AssertionError(f"{len(failed)} of {len(outcomes)} ranks failed\n{told}") from failed[0].error
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, limit: float = 60
    ) -> list[Outcome]:
        """The same for cases that fail on purpose: how each rank ended."""
        count = len(self._seats) if ranks is None else ranks
        workers = [self._worker(rank) for rank in range(count)]
        case = f"case-{next(self._cases)}"
        for worker in workers:
            worker.pipe.send((case, count, pickle.dumps((function, args))))
        outcomes = self._collect(workers, limit)
        if any(outcome.error is not None or outcome.exit is not None for outcome in outcomes):
            self._retire(count)
        return outcomes

    def close(self) -> None:
        """Ends the processes."""
        self._retire(len(self._seats))
        self._folder.cleanup()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _worker(self, rank: int) -> "Worker":
        worker = self._seats[rank]
        if worker is None:
            self._seats[rank] = worker = Worker.start(rank, self._store.port, Path(self._folder.name))
        return worker

    def _retire(self, count: int) -> None:
        for rank, worker in enumerate(self._seats[:count]):
            if worker is not None:
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()
                self._seats[rank] = None

    def _collect(self, workers: list["Worker"], limit: float) -> list[Outcome]:
        """Every rank's outcome; past the limit the stacks of those that are not done, and the end of all."""
        deadline = time.monotonic() + limit
        done: dict[int, Outcome] = {}
        while len(done) < len(workers):
            waiting = [worker for worker in workers if worker.rank not in done]
            ready = wait([worker.pipe for worker in waiting], max(0.0, deadline - time.monotonic()))
            done |= {worker.rank: worker.outcome() for worker in waiting if worker.pipe in ready}
            if not ready:
                stacks = "\n".join(worker.stacks() for worker in waiting)
                self._retire(len(workers))
                raise TimeoutError(f"ranks {[w.rank for w in waiting]} not done in {limit} s\n{stacks}")
        return [done[worker.rank] for worker in workers]


@dataclass
class Worker:
    """The parent's end of one process."""

    rank: int
    process: Any
    pipe: Connection
    dump: Path  # where its stacks go

    @classmethod
    def start(cls, rank: int, port: int, folder: Path) -> "Worker":
        ours, theirs = CONTEXT.Pipe()
        dump = folder / f"stacks-{rank}"
        process = CONTEXT.Process(target=serve, args=(rank, port, theirs, str(dump)), daemon=True)
        process.start()
        theirs.close()
        return cls(rank, process, ours, dump)

    def outcome(self) -> Outcome:
        """What the process sent, or how it ended."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            return Outcome(self.rank, exit=self.process.exitcode)

    def stacks(self) -> str:
        """Where all threads of the process are now."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return f"rank {self.rank}:\n{self.dump.read_text() if self.dump.exists() else '(no stack)'}"


def serve(rank: int, port: int, pipe: Connection, dump: str) -> None:
    """The life of one process: cases come in by the pipe, outcomes go out."""
    import torch
    import torch.distributed as dist

    stream = open(dump, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=30))
    while True:
        try:
            case, world, work = pipe.recv()
        except EOFError:
            return
        seat = Seat(rank, world, dist.PrefixStore(case, store))
        pipe.send(attempt(seat, work))


def attempt(seat: Seat, work: bytes) -> Outcome:
    """One case on one rank."""
    start = time.monotonic()
    value, error, trace = None, None, ""
    try:
        function, args = pickle.loads(work)
        with seat.stack:
            value = function(seat, *args)
    except BaseException as caught:
        trace = traceback.format_exc()
        error = caught if _travels(caught) else RuntimeError(f"{type(caught).__name__}: {caught}")
    return Outcome(seat.rank, value, error, trace, seconds=time.monotonic() - start)


def _travels(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False
