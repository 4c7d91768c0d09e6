"""Where a denoiser step's time goes: a profile of its kernels on random NVFP4 weights, on one rank or under torchrun.

    torchrun --standalone --nproc-per-node 2 benchmarks/trace.py --ways heads/1,heads/4,hidden/1 --json FILE

For each way to exchange: milliseconds a block by kind of kernel, what of the exchange nothing else runs beside, and
how long attention takes beside it; medians of evaluations without the profiler show what the profiler costs. A kernel
of NCCL also waits for the other ranks, so the rank where the exchange is shortest says most about the link.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import alone
from kernel_times import CATEGORIES, longest, summary
from profiled import events_of, kernels_of, mark, traced

from h3dist.attending import capability_of
from h3dist.bench.__main__ import save
from h3dist.bench.spec import Clip, Spec, parse_shape
from h3dist.bench.steps import denoiser_of, random_weights
from h3dist.bench.suite import environment
from h3dist.bench.timing import Clock
from h3dist.comm import Comm
from h3dist.errors import ConfigError, RankError, nearest
from h3dist.matrix.config import exchange_of
from h3dist.model.denoiser import Denoiser
from h3dist.plan import Layout, Plan, fp4_linears, make_plan, split_ragged
from h3dist.plan.exchange import open_exchanges
from h3dist.sampling.noise import draw
from h3dist.topology import read_ranks

WAYS = "heads/1,heads/4,hidden/1"
MORE = {"packed": {"rows": "packed"}, "copy": {"transport": "copy"}}  # by what follows a way's + sign
EVALUATIONS = 2  # that warm up, and that are profiled
UNPROFILED = 5
Chrome = Path | None
TOLD = {
    "idle": "idle",
    "wall": "wall",
    "unprofiled": "wall, not profiled",
    "exposed": "exchange with nothing beside it",
    "beside": "attention beside the exchange",
    "quiet": "attention in its groups, alone",
}


def main(words: list[str] | None = None) -> None:
    """One rank: every way in turn, all ranks together."""
    args, ranks = arguments(words), read_ranks()
    if args.device == "cuda":
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    spec = spec_of(args, ranks.world)
    if args.alone:
        run_alone(args, spec, device)
        return
    layout = spec.layout(ranks.world)
    transport = "copy" if "+copy" in (args.ways or WAYS) else "collective"
    with Comm.connect(ranks, layout, device, backend=args.backend, transport=transport) as comm:
        run(args, spec, comm, device)
        comm.agree("the end")


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1344x768x124")
    parser.add_argument("--blocks", type=int, help="fewer than the model's, which are alike")
    parser.add_argument("--ways", help="as a matrix's exchanges, and +packed rows or heads by +copy: heads/4+copy")
    parser.add_argument("--alone", help="the exchange's own kernels, for so many ranks of which one is here: 2,4,8")
    parser.add_argument("--chunks", type=int, default=1, help="runs of columns that a tp group sums")
    parser.add_argument("--mode", default="auto", help="ulysses where there are several ranks")
    parser.add_argument("--sp", type=int)
    parser.add_argument("--tp", type=int)
    parser.add_argument("--fused", action="store_true", help="as runtime.fused=on")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--size", choices=("released", "small"), default="released")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--chrome", type=Path, help="FILE.json.gz: one evaluation of rank 0 in the first way")
    return parser.parse_args(words)


def spec_of(args: argparse.Namespace, world: int) -> Spec:
    """The sizes, layout and devices, as `h3dist bench` takes them."""
    parallel = "ulysses" if args.mode == "auto" and world > 1 and not (args.sp or args.tp) else args.mode
    dtype = {"auto": "bfloat16" if args.device == "cuda" else "float32"}.get(args.dtype, args.dtype)
    taken = {"size": args.size, "attention": args.attention, "blocks": args.blocks, "device": args.device}
    return Spec((args.shape,), parallel, args.sp, args.tp, dtype=dtype, **taken)


def run(args: argparse.Namespace, spec: Spec, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Every way; rank 0 prints and writes each as it is done. A way that fails on any rank is told as failed."""
    record = {"form": "h3dist-trace", "spec": asdict(spec), "fused": args.fused, "layout": asdict(comm.layout)}
    record |= {"environment": environment(device), "ways": []}
    for way in (args.ways or WAYS).split(","):
        chrome = None if record["ways"] else args.chrome
        record["ways"].append(attempt(way, args, spec, comm, device, chrome))
        if comm.rank == 0:
            tell(record["ways"][-1])
            save(record, args.json)
    if comm.rank == 0:
        compare(record["ways"])
    return record


def run_alone(args: argparse.Namespace, spec: Spec, device: torch.device) -> dict[str, Any]:
    """One block of the first rank, which has the most rows, of each number of ranks and in each way."""
    record = {"form": "h3dist-trace-alone", "spec": asdict(spec), "fused": args.fused}
    record |= {"environment": environment(device), "alone": []}
    for ranks, way in product(map(int, args.alone.split(",")), (args.ways or alone.WAYS).split(",")):
        begun = time.perf_counter()
        try:
            plan = plan_of(way, args, replace(spec, blocks=1), Layout(sp=ranks), device)
            found = {"failed": None} | alone.measure(plan, 0, device, fused=args.fused)
        except Exception as error:  # whatever it is, the other ways are worth having
            found = {"failed": f"{type(error).__name__}: {error}"}
        record["alone"].append({"way": way} | found | {"seconds": time.perf_counter() - begun})
        alone.tell(record["alone"][-1])
        save(record, args.json)
    return record


def attempt(
    way: str, args: argparse.Namespace, spec: Spec, comm: Comm, device: torch.device, chrome: Chrome
) -> dict[str, Any]:
    """All ranks' figures of a way, or why there are none. All ranks fail together, as in a benchmark's part."""
    mine: dict[str, Any] = {}
    try:
        plan = plan_of(way, args, spec, comm.layout, device)
        mine = measure(plan, comm, device, fused=args.fused, chrome=chrome)
    except RankError:
        raise
    except Exception as error:  # whatever it is, the other ways are worth having
        mine = {"failed": f"{type(error).__name__}: {error}"}
    every = [json.loads(text) for text in comm.collect(way, json.dumps(mine))]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    failed = next((each["failed"] for each in every if "failed" in each), None)
    return {"way": way, "failed": failed} if failed else {"way": way, "failed": None, "ranks": every}


def plan_of(way: str, args: argparse.Namespace, spec: Spec, layout: Layout, device: torch.device) -> Plan:
    """The plan of a way such as heads/4/int8, heads/4+copy or hidden/1+packed. Raises ConfigError and PlanError."""
    said, *more = way.split("+")
    settings = vars(exchange_of(said)) | {"chunks": args.chunks}
    for word in more:
        if word not in MORE:
            raise ConfigError(f"--ways {way}: +{word} must be one of {', '.join(MORE)}{nearest(word, MORE)}")
        settings |= MORE[word]
    choices = open_exchanges(**settings)
    if len(choices) > 1:
        raise ConfigError(f"--ways {way}: a trace is of one exchange; write VARIANT/GROUPS/CODEC as in hidden/4")
    fp4, amax = fp4_linears(spec.dims, None, capability_of(device), spec.dtype)
    options = {"dtype": spec.dtype, "attention": spec.attention, "steps": EVALUATIONS, "fp4": fp4, "amax": amax}
    clip = Clip(parse_shape(spec.shapes[0]))
    return make_plan(clip, spec.dims, spec.text_rows, layout, exchange=choices[0], **options)


def measure(plan: Plan, comm: Comm, device: torch.device, *, fused: bool, chrome: Chrome) -> dict[str, Any]:
    """This rank's figures of a plan. Every rank must call it."""
    weights = random_weights(plan, comm.rank, device)
    denoiser = denoiser_of(weights, plan, comm, fused=fused, reused=fused)
    latents = tuple(x.to(device) for x in draw("comfy", 0, plan.geometry))
    clock, layers = Clock(device, UNPROFILED), plan.dims.layers
    for step in range(EVALUATIONS):
        denoiser(*latents, step)
    seconds = clock.time(lambda: denoiser(*latents, 0), warm=0).seconds
    quiet = clock.time(quiet_attention(plan, comm.rank, denoiser)).median
    mark(denoiser)

    def evaluate(turn: int) -> None:
        denoiser(*latents, turn % EVALUATIONS)

    kept = traced(evaluate, clock, 1)  # the profiler's own start is in the first one
    if chrome and comm.rank == 0:
        kept.export_chrome_trace(str(chrome))
    found = kernels_of(events_of(traced(evaluate, clock, 1 + EVALUATIONS)), device.type)
    done = layers * EVALUATIONS
    figures = summary(found, done) | {"unprofiled": 1000 * median(seconds) / layers, "quiet": 1000 * quiet}
    figures["transport"] = comm.transport.told
    return figures | ({"kernels": longest(found, done)} if comm.rank == 0 else {})


def quiet_attention(plan: Plan, rank: int, denoiser: Denoiser) -> Callable[[], None]:
    """A block's attention as it is called, in as many groups of heads, with nothing beside it."""
    (start, stop), groups = plan.shares[rank].heads, plan.exchange.on(plan.layout).groups
    weights, parts = denoiser.weights, split_ragged(stop - start, min(groups, max(1, stop - start)))
    shape = plan.rows, 3, stop - start, plan.dims.head_dim
    qkv = torch.randn(shape, device=weights.device, dtype=weights.dtype)
    pieces = [qkv[:, :, a:b].contiguous().unbind(1) for a, b in parts if b > a]

    def call() -> None:
        for piece in pieces:
            denoiser.view.attention(*piece)

    return call


def tell(way: Mapping[str, Any]) -> None:
    """Prints a way: a column a rank, then rank 0's kernels."""
    if way["failed"]:
        print(f"{way['way']}: failed: {way['failed']}", flush=True)
        return
    ranks = way["ranks"]
    print(f"\n{way['way']}, by {ranks[0]['transport']}: milliseconds a block, a column a rank")
    rows = {kind: [rank["categories"][kind] for rank in ranks] for kind in CATEGORIES}
    for name, told in TOLD.items():
        rows[told] = [rank[name] for rank in ranks]
    for name, values in rows.items():
        print(f"  {name:<34}" + "".join(f"{value:>10.3f}" for value in values))
    print(f"  {'exposed, of the step':<34}" + "".join(f"{rank['exposed_share']:>10.1%}" for rank in ranks))
    print("  rank 0's longest: calls a block, ms a block")
    for row in ranks[0]["kernels"]:
        print(f"  {row['calls']:>8.2f}{row['ms']:>10.3f}  {row['category']:<12}{row['name']}")
    sys.stdout.flush()


def compare(ways: Sequence[Mapping[str, Any]]) -> None:
    """Prints the ways side by side: the most of any rank, but of the exchange the least, in which others wait least.

    slowed: how much longer attention takes than in the same groups with nothing beside it.
    """
    names = ("wall", "attention", "alone", "slowed", "beside", "exchange", "exposed")
    print(f"\n{'way':<16}" + "".join(f"{name:>11}" for name in names))
    for way in (way for way in ways if not way["failed"]):
        ranks = way["ranks"]
        wall, quiet, beside = (max(rank[name] for rank in ranks) for name in ("unprofiled", "quiet", "beside"))
        attention = max(rank["categories"]["attention"] for rank in ranks)
        exchange, exposed = (min(rank["categories"]["exchange"] for rank in ranks), min(r["exposed"] for r in ranks))
        told = (f"{value:>11.3f}" for value in (wall, attention, quiet))
        print(f"{way['way']:<16}" + "".join(told), end=f"{attention / quiet - 1:>11.1%}")
        print("".join(f"{value:>11.3f}" for value in (beside, exchange, exposed)), flush=True)


if __name__ == "__main__":
    main()
