"""The task of a child: one rank of an all-to-all, through the code that a run's attention uses.

Every number says which tensor, row, head and column it is of, so what arrives can be checked to the last byte.

Shape letters: S all rows, g this rank's rows, s the same here, H all heads, h this rank's heads, D head size.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from h3dist.comm import Comm, RankExchange
from h3dist.geometry import Geometry
from h3dist.plan import Layout, Plan, make_plan, released_dims
from h3dist.topology import read_ranks

SMALL = {"heads": 14, "head_dim": 32}
TEXT_ROWS = 33
TIMES = 3
OUTPUTS = 128  # columns that a rank hands out after the last block


@dataclass(frozen=True)
class Clip:
    """What a plan asks of a request where there is none."""

    geometry: Geometry
    notes: tuple[str, ...] = ()


def exchange(kind: str, seconds: str) -> Iterator[dict[str, Any]]:
    """Take part as the rank that the environment names; `kind` is "cuda" or "cpu". Yields what arrived wrong."""
    ranks = read_ranks()
    plan = probe_plan(ranks.world, kind)
    device = torch.device("cuda", ranks.local_rank) if kind == "cuda" else torch.device("cpu")
    with Comm.connect(ranks, plan.layout, device, timeout=float(seconds), stage_timeout=float(seconds)) as comm:
        wrong = 0
        for turn in range(TIMES):
            begun = time.perf_counter()
            wrong += moved_wrong(comm.exchange(plan), plan, ranks.rank, device, first=1 + turn)
        comm.agree("the exchange")
        yield {"wrong": wrong, "seconds": time.perf_counter() - begun, "bytes": sum(comm.counted.values()) // TIMES}


def probe_plan(world: int, kind: str) -> Plan:
    """A plan of `world` Ulysses ranks: tens of megabytes of the released heads on GPUs, little on a CPU."""
    dims, clip = released_dims(), Clip(Geometry(864, 480, 22))
    if kind == "cpu":
        dims, clip = replace(dims, **SMALL), Clip(Geometry(64, 64, 5))
    return make_plan(clip, dims, TEXT_ROWS, Layout(sp=world), dtype="float32", attention="sdpa", steps=1)


def moved_wrong(moves: RankExchange, plan: Plan, rank: int, device: torch.device, first: int) -> int:
    """Elements that are not what they must be after the ways to the heads, back, and out.

    `first` is the first number: another one each time, or memory that nobody wrote could pass for what arrived.
    """
    share = plan.shares[rank]
    whole = numbered(plan, device, first)  # [3, S, H, D]
    rows, heads = slice(*share.rows), slice(*share.heads)
    q_gHD, k_gHD, v_gHD = whole[:, rows]
    came = torch.stack(moves.to_heads(q_gHD, k_gHD, v_gHD))  # [3, S, h, D]
    back_gHD = moves.to_rows(whole[0, :, heads].contiguous())
    out_SO = torch.arange(first, first + plan.rows * OUTPUTS, device=device).float().view(plan.rows, OUTPUTS)
    gathered_SO = moves.gather_outputs(out_SO[rows].contiguous())  # the host waits here, under the time limit
    pairs = ((came, whole[:, :, heads]), (back_gHD, q_gHD), (gathered_SO, out_SO))
    return sum(int((found != wanted).sum()) for found, wanted in pairs)


def numbered(plan: Plan, device: torch.device, first: int) -> Tensor:
    """q, k and v of all rows and heads, int32 [3, S, H, D], each element its own place, counted from `first`."""
    shape = torch.Size((3, plan.rows, plan.dims.heads, plan.dims.head_dim))
    return torch.arange(first, first + shape.numel(), dtype=torch.int32, device=device).view(shape)
