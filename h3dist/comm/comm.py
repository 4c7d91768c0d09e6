"""One rank's ties to the others: the groups, the exchange of a run, agreement, and leaving together.

Tensors go over the layout's groups, NCCL or gloo, bounded by `timeout`. Metadata, agreement and waiting for
a rank that works alone go over a gloo group of all ranks, bounded by `stage_timeout`, so that nobody idles
inside NCCL.
"""

import ctypes
import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from h3dist.comm.board import Board
from h3dist.comm.encoding import RankEncoding
from h3dist.comm.exchange import RankExchange
from h3dist.comm.forms import PLAIN, Forms
from h3dist.comm.peers import forbid_multicast
from h3dist.comm.pieces import Pieces
from h3dist.comm.rounding import Rounding
from h3dist.comm.transport import Transport
from h3dist.comm.wire import BACKSTOP, GlooWire, Group, NcclWire, Wire, in_short, nccl_options
from h3dist.errors import ConfigError, RankError, nearest
from h3dist.plan import DECODE_LABELS, ENCODE_LABELS, LABELS, Layout, Plan
from h3dist.topology import Ranks

T = TypeVar("T")
BACKENDS = ("auto", "nccl", "gloo")
TEARDOWN = 5.0  # seconds that closing may take before the rest is left to the end of the process


class Comm:
    """This rank among all. A run of one rank needs no process group, and every method is then a local one."""

    def __init__(self, rank: int, layout: Layout, device: torch.device) -> None:
        self.rank, self.layout, self.device = rank, layout, device
        labels = (*LABELS, *ENCODE_LABELS, *DECODE_LABELS)
        self.counted = dict.fromkeys(labels, 0)  # bytes sent to other ranks, by collective
        self.rounding = Rounding()  # of the codes of the last exchange, where it sends such
        self.transport = Transport(self.collect, layout, device)
        self._board: Board | None = None
        self._meta: Wire | None = None
        self._tensors: dict[str, Wire | None] = dict.fromkeys(("request", "sp", "tp"))

    @classmethod
    def connect(
        cls,
        ranks: Ranks,
        layout: Layout,
        device: torch.device,
        *,
        backend: str = "auto",
        timeout: float = 300,
        stage_timeout: float = 1800,
        store: dist.Store | None = None,
        transport: str = "collective",
    ) -> Self:
        """Joins this process to the others of `layout`; all of them call it.

        backend: "nccl", "gloo" (which also takes CUDA tensors, by way of the CPU, so that ranks may share a
        device), or "auto": NCCL for a CUDA device. `timeout` bounds a collective on tensors,
        `stage_timeout` an agreement, both in seconds. `store` is where the ranks meet; without it they meet
        as torchrun's variables say. `transport` is that of the exchanges to come: where heads may be copied this
        process is kept from NVLink multicast, while there is time. Raises RankError naming the ranks that did not
        come, and ConfigError.
        """
        assert ranks.world == layout.world, (ranks, layout)
        if transport != "collective":
            forbid_multicast(os.environ)
        comm = cls(ranks.rank, layout, device)
        backend = _backend(backend, device)
        if ranks.world > 1:
            try:
                store = dist.PrefixStore("h3dist", store or _meet(ranks, timeout))
                _roll_call(store, ranks, timeout)
                comm._join(store, backend, timeout, stage_timeout)
            except RuntimeError as error:  # what a backend raises where a rank dies while they connect
                comm.close(failed=True)
                raise RankError(f"start: rank {ranks.rank} cannot reach the others: {in_short(error)}") from None
        return comm

    def _join(self, store: dist.Store, backend: str, timeout: float, stage_timeout: float) -> None:
        """Makes the groups, the same ones in the same order on every rank; groups of one rank are left out.

        Groups are made one by one, not by a DeviceMesh: each has a time limit of its own, and sp x tp is
        one too.
        """
        world = self.layout.world
        if backend == "nccl":
            torch.cuda.set_device(self.device)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=world, timeout=_late(stage_timeout))
        self._board = Board(store, self.rank, world, self._abort_nccl)
        everyone = tuple(range(world))
        self._meta = GlooWire(
            Group("meta", everyone, self.rank, dist.group.WORLD, self._board, stage_timeout), Counter()
        )
        made: dict[tuple[int, ...], Wire] = {}
        for name, groups in self._groups():
            for ranks in groups:
                if len(ranks) > 1 and ranks not in made:
                    made[ranks] = self._wire(name, ranks, backend, timeout)
                if self.rank in ranks:
                    self._tensors[name] = made.get(ranks)
        for wire in self._wires():
            if isinstance(wire, NcclWire):
                wire.warm_up()

    def _groups(self) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
        layout = self.layout
        return (("request", layout.request_groups()), ("sp", layout.sp_groups()), ("tp", layout.tp_groups()))

    def _wire(self, name: str, ranks: tuple[int, ...], backend: str, timeout: float) -> Wire | None:
        """A tensor wire between `ranks`; None, once the group exists, for a rank that is not among them."""
        options = nccl_options() if backend == "nccl" else None
        told = {"backend": backend, "pg_options": options, "group_desc": f"h3dist {name}"}
        handle = dist.new_group(list(ranks), timeout=_late(timeout), **told)
        if self.rank not in ranks:
            return None
        group = Group(name, ranks, ranks.index(self.rank), handle, self._board, timeout)
        return (NcclWire if backend == "nccl" else GlooWire)(group, self.counted)

    def exchange(self, plan: Plan, forms: Forms = PLAIN) -> RankExchange:
        """What the model asks of the other ranks while it runs `plan`. All ranks call it.

        `forms`: how pieces are taken off the wire and coded, the same bits in every way.
        Raises ConfigError on all of them where heads are to move by copies and a rank cannot make them.
        """
        assert plan.layout == self.layout, (plan.layout, self.layout)
        sp = self._tensors["sp"]
        heads = self.transport.wire_for(sp, plan) if sp else None
        moves = RankExchange(plan, self.rank, self._tensors["tp"], heads, self._tensors["request"], forms)
        self.rounding = moves.rounding
        return moves

    def encoding(self) -> RankEncoding:
        """What encoders ask of the other ranks of the request, of which there are some."""
        wire = self._tensors["request"]
        assert wire is not None
        return RankEncoding(wire, self.device)

    def broadcast_text(self, text_LC: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """text_LC of the request's first rank, on all its ranks, as `dtype` on their device.

        `shape` is (L, C). The plan counts it in the run's compute dtype.
        """
        return self._broadcast("text", text_LC, shape, dtype)

    def broadcast_conditions(
        self, kept: Mapping[str, Tensor] | None, shapes: Mapping[str, tuple[int, int]]
    ) -> dict[str, Tensor]:
        """The conditions' rows of the request's first rank, float32 by kind, on all its ranks and their devices.

        `shapes` gives the kinds and [n, width] of each, the same on every rank.
        """
        assert kept is None or kept.keys() == shapes.keys(), (kept, shapes)
        float32 = torch.float32
        return {
            kind: self._broadcast("conditions", kept[kind] if kept is not None else None, shape, float32)
            for kind, shape in shapes.items()
        }

    def _broadcast(self, label: str, rows: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        wire = self._tensors["request"]
        if rows is None:
            assert wire is not None and wire.group.index > 0
            rows = torch.empty(shape, dtype=dtype, device=self.device)
        assert rows.shape == shape, (rows.shape, shape)
        rows = rows.to(self.device, dtype)
        if wire is None:
            return rows
        rows = wire.broadcast(label, rows)
        wire.settle(label)
        return rows

    def hand_in(self, label: str, mine: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        """Begins to send flat `mine`, on this rank's device, to the request's first rank, which sends nothing.

        All ranks of the request call it with one dtype and one `counts`, the elements of each. It returns at once;
        what it gives, once called, waits, and gives what was sent, end to end: to the first rank alone.
        """
        wire = self._tensors["request"]
        assert wire is not None and mine.numel() == counts[wire.group.index] and counts[0] == 0, (mine.shape, counts)
        nothing = [0] * wire.group.size
        into = counts if wire.group.index == 0 else nothing
        return wire.all_to_all_later(label, mine, Pieces([mine.numel(), *nothing[1:]], into))

    def share(self, value: T) -> T:
        """Rank 0's `value`, any Python value, on every rank; what the others pass does not matter."""
        if self._meta is None:
            return value
        data = bytearray(pickle.dumps(value) if self.rank == 0 else b"")
        length = int(self._meta.broadcast("share", torch.tensor([len(data)])))
        whole = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(length, dtype=torch.uint8)
        return pickle.loads(self._meta.broadcast("share", whole).numpy().tobytes())

    def same(self, name: str, value: Any) -> None:
        """Refuses the run, on every rank, where `value` (of JSON types) is not the same on all. Raises RankError."""
        texts = self.collect(name, json.dumps(value, sort_keys=True))
        odd = [rank for rank, text in enumerate(texts) if text != texts[0]]
        if odd:
            told = "; ".join(f"rank {rank} has {texts[rank]}" for rank in (0, *odd))
            raise RankError(f"the ranks differ in {name}: {told}")

    def collect(self, label: str, text: str) -> list[str]:
        """Every rank's text, in the order of the ranks, on every rank."""
        if self._meta is None:
            return [text]
        data = bytearray(text.encode())
        lengths = self._meta.all_gather(label, torch.tensor([len(data)])).tolist()
        padded = data.ljust(max(1, *lengths))  # no buffer is empty
        whole = self._meta.all_gather(label, torch.frombuffer(padded, dtype=torch.uint8)).numpy().tobytes()
        starts = range(0, len(whole), len(padded))
        return [whole[start : start + length].decode() for start, length in zip(starts, lengths, strict=True)]

    def agree(self, stage: str, error: BaseException | None = None) -> None:
        """Ends a stage together: every rank calls it, with its error if it has one.

        All return, or all raise the first failure that any rank had: that rank its own error, the others
        one of the same class, which names rank and stage. A rank that does not come within `stage_timeout`
        is named by a RankError, and one that died is, soon. A rank that fails elsewhere reaches the others
        here, and in any collective that they wait in.
        """
        if error is not None:
            raise error if self._board is None else self._board.fail(error, stage)
        if self._meta is not None:
            self._meta.all_gather(f"the end of {stage}", torch.zeros(1, dtype=torch.uint8))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of the run, ended by `agree`: an exception on any rank leaves it on all."""
        if self._board is not None:
            self._board.stage(name)
        try:
            yield
        except Exception as error:
            self.agree(name, error)
        self.agree(name)

    def close(self, *, failed: bool = False) -> None:
        """Leaves the groups. After a failure, known here or said by `failed`, nothing is waited for."""
        board, self._board = self._board, None
        if board is None:
            return
        board.close()
        leave = self._abandon if failed or board.failed else dist.destroy_process_group
        thread = Thread(target=leave, name="h3dist-close", daemon=True)
        thread.start()
        thread.join(TEARDOWN)

    def _abandon(self) -> None:
        """Gives up what still runs in the groups, and keeps them past the end of the interpreter.

        gloo cannot abort, and its groups' destructor waits for collectives that ranks which are gone or
        stuck will never join: the process would stay for minutes after its last line. So does the end of memory that
        peers reach, for the device.
        """
        self._abort_nccl()
        for kept in (self.transport, *(wire.group.handle for wire in self._wires())):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def _abort_nccl(self) -> None:
        """Ends NCCL's kernels: else a device, and a host behind it, waits for ranks that never join them."""
        for wire in self._wires():
            if isinstance(wire, NcclWire):
                wire.group.handle.abort()

    def _wires(self) -> list[Wire]:
        """Every wire, once: groups of the same ranks share one."""
        wires = (self._meta, *self._tensors.values())
        return list({id(wire): wire for wire in wires if wire is not None}.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._board is not None:
            self._board.fail(error)  # the others may wait for this rank
        self.close(failed=error is not None)


def _backend(name: str, device: torch.device) -> str:
    if name not in BACKENDS:
        raise ConfigError(f"runtime.backend={name!r}{nearest(name, BACKENDS)}; use {', '.join(BACKENDS)}")
    if name == "nccl" and device.type != "cuda":
        raise ConfigError(f"runtime.backend=nccl moves CUDA tensors, the device is {device}; use gloo or auto")
    return name if name != "auto" else "nccl" if device.type == "cuda" else "gloo"


def _late(limit: float) -> timedelta:
    """The backend's own time limit, behind ours."""
    return timedelta(seconds=limit + BACKSTOP)


def _meet(ranks: Ranks, timeout: float) -> dist.Store:
    """The store that torchrun's variables name."""
    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world, timeout=timedelta(seconds=timeout)))
    return store


def _roll_call(store: dist.Store, ranks: Ranks, timeout: float) -> None:
    """Waits for every rank to come; names those that did not. Raises RankError."""
    store.set(f"here/{ranks.rank}", "1")
    deadline = time.monotonic() + timeout
    missing = list(range(ranks.world))
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RankError(f"start: rank {names} of {ranks.world} did not come within {timeout:g} s")
        time.sleep(0.02)
