"""One block's exchange alone: ours in its variants, by NCCL and by copies, torch's all-to-all, fast-ulysses.

    torchrun --standalone --nproc-per-node 2 benchmarks/exchange.py --shape 1344x768x124 --json FILE

q, k and v go to the ranks of their heads and the output comes back, with no attention between. torch's rows move the
same bytes without packing: as ragged as rows and heads are, or in even pieces of the mean size. Rank 0 adds a point a
way to the JSON, which `h3dist report` reads; a package that is not there is said to be so.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from points import keep

from h3dist.bench.spec import SMALL, Clip, parse_shape
from h3dist.bench.timing import Clock
from h3dist.comm import Comm
from h3dist.matrix.config import exchange_of
from h3dist.plan import ExchangePlan, Layout, Plan, make_plan, released_dims
from h3dist.topology import read_ranks

WAYS = ("heads/1", "heads/4", "heads/7", "hidden/1", "hidden/4")
COPIED = tuple(f"{way}+copy" for way in WAYS)  # on GPUs alone
Run = Callable[[], object]


def main() -> None:
    """One rank: every way in turn, all ranks together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1344x768x124")
    parser.add_argument("--text-rows", type=int, default=400)
    parser.add_argument("--size", choices=("released", "small"), default="released")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, required=True)
    args, ranks = parser.parse_args(), read_ranks()
    device = torch.device(args.device, ranks.local_rank) if args.device == "cuda" else torch.device("cpu")
    dims = replace(released_dims(), **SMALL) if args.size == "small" else released_dims()
    options = {"dtype": args.dtype, "attention": "sdpa", "steps": 1}
    plan = make_plan(Clip(parse_shape(args.shape)), dims, args.text_rows, Layout(sp=ranks.world), **options)
    clock = Clock(device, args.repeats)
    transport = "copy" if args.device == "cuda" else "collective"
    with Comm.connect(ranks, plan.layout, device, transport=transport) as comm:
        for name, run in (*ours(comm, plan), *plain(comm, plan), *fast_ulysses(comm, plan)):
            comm.agree(f"before {name}")
            every = comm.collect("seconds", json.dumps(clock.time(run).median))
            if ranks.rank == 0:
                tell(args, plan, device, name, max(map(float, every)))


def ours(comm: Comm, plan: Plan) -> Iterator[tuple[str, Run]]:
    """What a run does, in every variant: packing included, the projection of hidden rows left out."""
    for way in (*WAYS, *COPIED) if comm.device.type == "cuda" else WAYS:
        said = exchange_of(way)
        cut = make_same(plan, ExchangePlan(said.variant, int(said.groups), transport=said.transport))
        share, D = cut.shares[comm.rank], cut.dims.head_dim
        rows, heads = (b - a for a, b in (share.projected_rows, share.projected_heads))
        own = share.rows[1] - share.rows[0]
        qkv = torch.randn((3, rows, heads, D), device=comm.device, dtype=getattr(torch, plan.dtype)).unbind(0)
        x_sC = qkv[0].new_zeros(own, cut.dims.hidden)
        exchange = comm.exchange(cut)

        def run(exchange: object = exchange, x_sC: torch.Tensor = x_sC, qkv: tuple[torch.Tensor, ...] = qkv) -> None:
            exchange.gather_projected(x_sC)
            exchange.attend(*qkv, lambda q, k, v: q)

        yield f"h3dist {way}", run


def make_same(plan: Plan, exchange: ExchangePlan) -> Plan:
    """The plan with another exchange."""
    options = {"dtype": plan.dtype, "attention": plan.attention, "steps": plan.steps, "exchange": exchange}
    return make_plan(Clip(plan.geometry), plan.dims, plan.text_rows, plan.layout, **options)


def plain(comm: Comm, plan: Plan) -> Iterator[tuple[str, Run]]:
    """torch's all-to-all there and back, in uneven and in even pieces; equal pieces need no sizes."""
    group, D = comm._tensors["sp"].group, plan.dims.head_dim
    rows = [share.rows[1] - share.rows[0] for share in plan.shares]
    heads = [share.heads[1] - share.heads[0] for share in plan.shares]
    g, h, world = rows[group.index], heads[group.index], group.size
    there = [3 * g * n * D for n in heads], [3 * r * h * D for r in rows]
    back = [r * h * D for r in rows], [g * n * D for n in heads]
    whole = plan.rows * plan.dims.heads * D // world**2  # elements of a mean piece of one of q, k, v

    def move(out: list[int] | int, into: list[int] | int) -> Run:
        sizes = (into, out) if isinstance(out, list) else ()
        counts = [sum(x) if isinstance(x, list) else x * world for x in (out, into)]
        sent, came = (torch.empty(n, device=comm.device, dtype=getattr(torch, plan.dtype)) for n in counts)
        if comm.device.type == "cpu":  # gloo knows no bfloat16 there
            sent, came = sent.float(), came.float()
        return lambda: dist.all_to_all_single(came, sent, *sizes, group=group.handle)

    uneven, even = (move(*there), move(*back)), (move(3 * whole, 3 * whole), move(whole, whole))
    yield "torch, uneven pieces", lambda: [run() for run in uneven]
    yield "torch, even pieces", lambda: [run() for run in even]


def fast_ulysses(comm: Comm, plan: Plan) -> Iterator[tuple[str, Run]]:
    """The same by the copy engines, with ragged rows and heads, into buffers of its own."""
    if find_spec("fast_ulysses") is None or comm.device.type != "cuda":
        if comm.rank == 0:
            print("fast-ulysses: not installed, or no GPU", flush=True)
        return
    from fast_ulysses import UlyssesGroup

    group = comm._tensors["sp"].group
    ulysses = UlyssesGroup(group.handle, comm.device)
    splits = {
        "seq_splits": [share.rows[1] - share.rows[0] for share in plan.shares],
        "head_splits": [share.heads[1] - share.heads[0] for share in plan.shares],
    }
    x = torch.randn(
        (1, splits["seq_splits"][group.index], plan.dims.heads, plan.dims.head_dim),
        device=comm.device, dtype=getattr(torch, plan.dtype),
    )  # fmt: skip
    out = [ulysses.empty_output(x, mode=0, **splits) for _ in range(3)]
    rows = ulysses.empty_output(out[0], mode=1, **splits)

    def run() -> None:
        for each in out:
            ulysses.all_to_all_4d(x, mode=0, out=each, **splits)
        ulysses.all_to_all_4d(out[0], mode=1, out=rows, **splits)

    yield "fast-ulysses", run
    ulysses.destroy()


def tell(args: argparse.Namespace, plan: Plan, device: torch.device, name: str, seconds: float) -> None:
    """Adds the point; torch's rows on a CPU are of float32."""
    point = {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "ranks": plan.layout.world,
        "layout": name,
        "shape": args.shape,
        "total_seconds": seconds,
        "note": f"{1e3 * seconds:.3f} ms a block, {args.dtype}",
    }
    installed = "installed" if find_spec("fast_ulysses") else "not installed"
    keep(args.json, "The exchange of one block alone", point, torch=torch.__version__, fast_ulysses=installed)
    print(f"exchange {plan.layout.world} ranks, {args.shape}, {name}: {point['note']}", flush=True)


if __name__ == "__main__":
    main()
