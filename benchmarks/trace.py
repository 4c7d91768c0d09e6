"""Where a denoiser step's time goes: a profile of its kernels on random NVFP4 weights, on one rank or under torchrun.

    torchrun --standalone --nproc-per-node 2 benchmarks/trace.py --ways heads/1,heads/4,hidden/1 --json FILE

For each way to exchange: milliseconds a block by kind of kernel, what of the exchange nothing else runs beside, and
how long attention takes beside it; medians of evaluations without the profiler show what the profiler costs. A kernel
of NCCL also waits for the other ranks, so the rank where the exchange is shortest says most about the link.
"""

import argparse
import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from kernels import ATTENTION, CATEGORIES, EXCHANGE, Kernel, longest, summary

from h3dist.attending import capability_of
from h3dist.bench.__main__ import save
from h3dist.bench.spec import Clip, Spec, parse_shape
from h3dist.bench.steps import denoiser_of, random_weights
from h3dist.bench.suite import environment
from h3dist.bench.timing import Clock
from h3dist.comm import Comm
from h3dist.errors import ConfigError, RankError
from h3dist.matrix.config import exchange_of
from h3dist.model.denoiser import Denoiser
from h3dist.model.exchange import Exchange
from h3dist.plan import ExchangePlan, Layout, Plan, fp4_linears, make_plan, split_ragged
from h3dist.plan.exchange import open_exchanges
from h3dist.sampling.noise import draw
from h3dist.topology import read_ranks

EVALUATIONS = 2  # that warm up, and that are profiled
UNPROFILED = 5
EVALUATION = "trace.evaluation"
RANGES = (ATTENTION, EXCHANGE, EVALUATION)  # of the host, the innermost first
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
    layout = spec.layout(ranks.world)
    with Comm.connect(ranks, layout, device, backend=args.backend) as comm:
        run(args, spec, comm, device)
        comm.agree("the end")


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1344x768x124")
    parser.add_argument("--blocks", type=int, help="fewer than the model's, which are alike")
    parser.add_argument("--ways", default="heads/1,heads/4,hidden/1", help="as a matrix's exchanges")
    parser.add_argument("--rows", choices=("plain", "packed"), default="plain", help="how gathered rows move")
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
    for way in args.ways.split(","):
        chrome = None if record["ways"] else args.chrome
        record["ways"].append(attempt(way, args, spec, comm, device, chrome))
        if comm.rank == 0:
            tell(record["ways"][-1])
            save(record, args.json)
    if comm.rank == 0:
        compare(record["ways"])
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
    """The plan of a way such as heads/4/int8. Raises ConfigError and PlanError."""
    choices = open_exchanges(**vars(exchange_of(way)))
    if len(choices) > 1:
        raise ConfigError(f"--ways {way}: a trace is of one exchange; write VARIANT/GROUPS/CODEC as in hidden/4")
    exchange: ExchangePlan = replace(choices[0], rows=args.rows, chunks=args.chunks)
    fp4, amax = fp4_linears(spec.dims, None, capability_of(device), spec.dtype)
    options = {"dtype": spec.dtype, "attention": spec.attention, "steps": EVALUATIONS, "fp4": fp4, "amax": amax}
    return make_plan(Clip(parse_shape(spec.shapes[0])), spec.dims, spec.text_rows, layout, exchange=exchange, **options)


def measure(plan: Plan, comm: Comm, device: torch.device, *, fused: bool, chrome: Chrome) -> dict[str, Any]:
    """This rank's figures of a plan. Every rank must call it."""
    weights = random_weights(plan, comm.rank, device)
    denoiser = denoiser_of(weights, plan, comm, fused=fused, ahead=fused)
    latents = tuple(x.to(device) for x in draw("comfy", 0, plan.geometry))
    clock, layers = Clock(device, UNPROFILED), plan.dims.layers
    comm.agree("loaded")
    for step in range(EVALUATIONS):
        denoiser(*latents, step)
    seconds = clock.time(lambda: denoiser(*latents, 0), warm=0).seconds
    quiet = clock.time(quiet_attention(plan, comm.rank, denoiser)).median
    mark(denoiser)
    kept = traced(denoiser, latents, clock, 1)  # the profiler's own start is in the first one
    if chrome and comm.rank == 0:
        kept.export_chrome_trace(str(chrome))
    found = kernels_of(traced(denoiser, latents, clock, 1 + EVALUATIONS), device)
    done = layers * EVALUATIONS
    figures = summary(found, done) | {"unprofiled": 1000 * median(seconds) / layers, "quiet": 1000 * quiet}
    return figures | ({"kernels": longest(found, done)} if comm.rank == 0 else {})


def quiet_attention(plan: Plan, rank: int, denoiser: Denoiser) -> Callable[[], None]:
    """A block's attention as it is called, in as many groups of heads, with nothing beside it."""
    start, stop = plan.shares[rank].heads
    weights, parts = denoiser.weights, split_ragged(stop - start, min(plan.exchange.groups, stop - start))
    shape = plan.rows, 3, stop - start, plan.dims.head_dim
    qkv = torch.randn(shape, device=weights.device, dtype=weights.dtype)
    pieces = [qkv[:, :, a:b].contiguous().unbind(1) for a, b in parts]

    def call() -> None:
        for piece in pieces:
            denoiser.view.attention(*piece)

    return call


def mark(denoiser: Denoiser) -> None:
    """Puts the host's ranges around the exchange and, inside it, attention."""
    view = denoiser.view
    attention = ranged(ATTENTION, view.attention)
    denoiser.view = replace(view, attention=attention, exchange=Ranged(view.exchange))


class Ranged:
    """An exchange whose calls are ranges of the profiler."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return ranged(EXCHANGE, getattr(self._exchange, name))


def ranged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call inside a range."""

    def within(*arguments: Any) -> Any:
        with record_function(name):
            return call(*arguments)

    return within


def traced(denoiser: Denoiser, latents: Sequence[Tensor], clock: Clock, evaluations: int) -> profile:
    """The profile of some evaluations."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (clock.device.type == "cuda")
    clock.settle()
    with profile(activities=activities) as found:
        for evaluation in range(evaluations):
            with record_function(EVALUATION):
                denoiser(*latents, evaluation % EVALUATIONS)
        clock.settle()
    return found


def kernels_of(found: profile, device: torch.device) -> list[Kernel]:
    """The device's kernels and copies; on a CPU, the operators that no other one calls.

    The first evaluation is left out: ranks begin it one after the other, and end it together.
    """
    events = found.profiler.kineto_results.events()
    host = [event for event in events if event.device_type() == DeviceType.CPU]
    ranges = {name: sorted(_span(event) for event in host if event.name() == name) for name in RANGES}
    launched = outermost(host) if device.type == "cpu" else launches(events, host)
    begun = ranges[EVALUATION][1][0]
    return [
        Kernel(event.name(), *(time / 1000 for time in _span(event)), inside(at, ranges))
        for event, at in launched
        if at >= begun
    ]


def _span(event: Any) -> tuple[int, int]:
    """Nanoseconds."""
    return event.start_ns(), event.end_ns()


def outermost(host: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """Of the host's operators those that lie in no other one of their thread, each with its beginning."""
    ends: dict[int, int] = {}
    operators = (event for event in host if event.name() not in RANGES)
    for event in sorted(operators, key=lambda event: (event.start_ns(), -event.end_ns())):
        if event.start_ns() >= ends.get(event.start_thread_id(), 0):
            ends[event.start_thread_id()] = event.end_ns()
            yield event, event.start_ns()


def launches(events: Sequence[Any], host: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """The device's events that are work, each with the time at which the host launched it.

    A kernel shares its correlation id with the call that launched it; failing that, it names the operator around it,
    or its own beginning has to do.
    """
    calls = {event.correlation_id(): event.start_ns() for event in host if event.linked_correlation_id()}
    operators = {event.correlation_id(): event.start_ns() for event in host if not event.linked_correlation_id()}
    for event in events:
        drawn = event.is_user_annotation() or event.name() in RANGES or event.name().startswith("nccl:")
        if event.device_type() == DeviceType.CUDA and not drawn:
            around = operators.get(event.linked_correlation_id(), event.start_ns())
            yield event, calls.get(event.correlation_id(), around)


def inside(at: int, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> str | None:
    """The innermost range that a time lies in; ranges of one name do not overlap."""
    for name, spans in ranges.items():
        after = bisect_right(spans, (at, inf))
        if after and at <= spans[after - 1][1]:
            return name
    return None


def tell(way: Mapping[str, Any]) -> None:
    """Prints a way: a column a rank, then rank 0's kernels."""
    if way["failed"]:
        print(f"{way['way']}: failed: {way['failed']}", flush=True)
        return
    ranks = way["ranks"]
    print(f"\n{way['way']}: milliseconds a block, a column a rank")
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
