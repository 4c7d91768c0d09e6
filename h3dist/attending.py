"""The attention of a run: one backend on every rank, and what is found out about it.

All ranks agree that each can use it before any weight is read; rank 0's probe chooses the kernel for all; the first
call of a backend that is not torch's own is compared with exact attention, and all take the same decision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from h3dist import errors
from h3dist.attention.backend import Attention, Backend, Task
from h3dist.attention.capture import Capturing, Place
from h3dist.attention.check import Checked
from h3dist.attention.registry import find, why_not
from h3dist.comm import Comm
from h3dist.plan import Plan
from h3dist.plan.overlap import group_sizes


def task_of(plan: Plan, rank: int, device: torch.device) -> Task:
    """What `plan` asks of attention on a rank."""
    first, end = plan.shares[rank].heads
    return Task(
        rows=plan.rows,
        heads=end - first,
        head_dim=plan.dims.head_dim,
        dtype=getattr(torch, plan.dtype),
        device=device,
        capability=capability_of(device),
        lead=plan.rows - plan.geometry.video_rows,
    )


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Of a device; None on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def agree_on_attention(comm: Comm, name: str, task: Task) -> Backend:
    """The backend called `name`, which every rank can use; all ranks call this.

    Raises on all of them ConfigError or MissingDependency for the first rank that cannot, which is named.
    """
    backend = find(name)
    error = why_not(backend, task)
    told = comm.collect("attention", json.dumps([type(error).__name__, str(error)] if error else None))
    for rank, refusal in enumerate(map(json.loads, told)):
        if refusal is not None:
            kind, text = refusal
            raise getattr(errors, kind)(text if len(told) == 1 else f"rank {rank}: {text}")
    return backend


def begin_attention(comm: Comm, backend: Backend, task: Task, *, fallback: bool) -> tuple[Attention, dict[str, Any]]:
    """The attention function of a run, and what is to be told of it afterwards; all ranks call this.

    The second fills in at the first call: see `Checked.report`. `fallback`: a backend past its bound gives way to exact
    attention, and does not end the run.
    """
    found = comm.share(backend.probe(task) if comm.rank == 0 else None)
    attention, told = backend.build(task, found), {"backend": backend.name, "exact": backend.exact, "kernel": found}
    if backend.bound is None:
        return attention, told
    return Checked(backend, attention, comm.collect, told, fallback=fallback), told


def capturing(attention: Attention, folder: str, plan: Plan, task: Task) -> Attention:
    """The attention of a rank that saves q, k and v of one head a layer to `folder`. Raises OutputError."""
    calls = len(group_sizes(task.heads, plan.exchange.groups)) if plan.layout.sp > 1 else 1
    return Capturing(attention, Path(folder), Place(calls, plan.dims.layers, plan.steps), task.lead)
