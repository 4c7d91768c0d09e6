"""What torch.compile and CUDA graphs would win on an evaluation of the denoiser: each way beside the plain one.

    python benchmarks/trials.py --shapes 448x256x22 [--ways "fused,fused: graph"] [--blocks 4] [--json FILE]
    python benchmarks/trials.py --device cpu --size small --compiler eager      # does it run: some seconds

Random NVFP4 weights of the released size with few blocks. A way that fails is told as such, the others go on, and it is
not tried at later shapes. After `--limit` seconds no further way is begun; a first call, in which a way is compiled or
captured, is given up after `--first` seconds. Rows come as they are done. Times are by CUDA events, so that gaps in
which the device waits for the host count: a graph, which has none, shows what the GPU itself takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.compiled_forms import compilable, compiled_between
from h3dist.attending import capability_of
from h3dist.bench.spec import Spec, default_shapes
from h3dist.bench.steps import denoiser_of, random_weights, relative_error
from h3dist.bench.suite import environment
from h3dist.bench.timing import Clock
from h3dist.comm import Comm
from h3dist.errors import ConfigError, nearest
from h3dist.model.block import View, run_block
from h3dist.model.denoiser import Denoiser
from h3dist.model.residual import Residual
from h3dist.model.weights import BlockWeights, DenoiserWeights
from h3dist.plan import Layout, Plan
from h3dist.sampling.noise import draw
from h3dist.topology import Ranks

Work = Callable[[], Tensor]
SHAPES = ("448x256x22", "864x480x141", "1344x768x124")
NEEDS_CUDA = "CUDA graphs are for CUDA devices"
HOST_REPEATS = 3  # of starting an evaluation with nothing before it
AGAIN = 2.0  # seconds between the signals that end a first call


@dataclass(frozen=True)
class Way:
    """How an evaluation is done. compiled: nothing, the functions "between" products each, the "block" in forms made
    for it, or the block "as it is". graph: the evaluation captured once and replayed."""

    name: str
    fused: bool = False
    reused: bool = False
    compiled: str = ""
    graph: bool = False


WAYS = (  # what takes seconds before what takes a compiler
    Way("plain"),
    Way("reused", reused=True),  # weights made dense in one memory
    Way("fused", fused=True, reused=True),  # what runtime.fused=on does
    Way("fused: graph", fused=True, reused=True, graph=True),
    Way("between compiled", compiled="between", reused=True),
    Way("block compiled", compiled="block"),
    Way("block compiled: graph", compiled="block", graph=True),
    Way("block compiled as it is", compiled="as it is"),
)


class Times(NamedTuple):
    """end: of `time.monotonic`, after which no way is begun. first: seconds that a way's first call may take."""

    end: float
    first: float


class TooLong(BaseException):
    """A first call that took longer than it may; no Exception, so that a compiler lets it through."""


@dataclass(frozen=True)
class Row:
    """What one way took at one shape: median seconds of an evaluation, what its host needed to start one, the first
    call with all that is made then, bytes at most. What is told against another way is against the first that ran; the
    error is relative, in the 2-norm."""

    shape: str
    way: str
    seconds: float | None = None
    to_first: float | None = None
    host_seconds: float | None = None
    first_seconds: float | None = None
    error: float | None = None
    peak_bytes: int | None = None
    graph_breaks: int | None = None
    failed: str | None = None


def main(words: list[str] | None = None) -> int:
    """All ways at all shapes, as a table and as JSON."""
    args = arguments(words)
    device, begun = torch.device(args.device), time.monotonic()
    common = {"size": args.size, "device": args.device, "attention": args.attention}
    spec = Spec(shapes_of(args), **common, blocks=args.blocks, repeats=args.repeats)
    ways, times = chosen(args.ways), Times(begun + args.limit, args.first)
    told, rows = {"blocks": spec.dims.layers, "compiler": args.compiler, **environment(device)}, []
    told |= {"attention": args.attention}
    print("| shape | way | ms | to the first | host ms | first, s | error | GB at most | |\n" + "|---" * 9 + "|")
    with Comm.connect(Ranks(), Layout(), device, backend="auto") as comm:
        for row in trials(spec, device, comm, args.compiler, ways, times):
            rows.append(row)
            print(line(row), flush=True)
            if args.json:
                told["seconds"] = round(time.monotonic() - begun, 1)
                args.json.write_text(json.dumps(told | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


def arguments(words: list[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("released", "small"), default="released")
    parser.add_argument("--shapes", help=f"default {','.join(SHAPES)}")
    parser.add_argument("--ways", help=f"default all, in this order: {', '.join(repr(way.name) for way in WAYS)}")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--compiler", default="inductor", help="torch.compile's backend")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds after which no way is begun")
    parser.add_argument("--first", type=float, default=25.0, help="seconds that a way's first call may take")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def shapes_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Those asked for, or what fits the size."""
    if args.shapes:
        return tuple(args.shapes.split(","))
    return SHAPES if args.size == "released" else tuple(default_shapes(args.size))


def chosen(names: str | None) -> tuple[Way, ...]:
    """The ways of these names, commas between them, in their own order. Raises ConfigError."""
    if names is None:
        return WAYS
    by_name = {way.name: way for way in WAYS}
    for name in names.split(","):
        if name not in by_name:
            allowed = ", ".join(map(repr, by_name))
            raise ConfigError(f"--ways {name!r}: must be one of {allowed}{nearest(name, tuple(by_name))}")
    return tuple(by_name[name] for name in names.split(","))


def trials(
    spec: Spec, device: torch.device, comm: Comm, compiler: str, ways: Sequence[Way], times: Times
) -> Iterator[Row]:
    """Every way at every shape, on the same weights."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    plans = [
        spec.plan(shape, Layout(), dtype=dtype, capability=capability_of(device), steps=1) for shape in spec.shapes
    ]
    weights, lost = random_weights(plans[0], 0, device), set()
    for shape, plan in zip(spec.shapes, plans, strict=True):
        base: tuple[Tensor, float] | None = None
        for way in (way for way in ways if way.name not in lost):
            if time.monotonic() > times.end:
                yield Row(shape, way.name, failed="left out: the time was up")
                continue
            row, found = tried(way, weights, plan, comm, compiler, spec.repeats, times.first)
            if row.failed:
                lost.add(way.name)
            elif base is None:
                base = found, row.seconds
            if base and row.seconds:
                row = replace(row, to_first=row.seconds / base[1], error=relative_error(found, base[0]))
            yield replace(row, shape=shape)


def tried(
    way: Way, weights: DenoiserWeights, plan: Plan, comm: Comm, compiler: str, repeats: int, longest: float
) -> tuple[Row, Tensor | None]:
    """One way's row, without what is told against the first one, and its velocity."""
    device = weights.device
    clock = Clock(device, repeats)
    try:
        forget(device)
        begun = time.perf_counter()
        with limited(longest):
            work = made(way, weights, plan, comm, compiler)
            found = work().float().cpu()
        first = time.perf_counter() - begun
        seconds, host = clock.time(work, warm=1).median, Clock(device, HOST_REPEATS).host_time(work, warm=0).median
    except TooLong:
        return Row("", way.name, failed=f"given up: its first call took more than {longest:g} s"), None
    except Exception as error:  # no compiler, a graph that cannot be: the other ways still count
        text = " ".join(str(error).split("\n")[:2])  # a compiler's own error is in its second line
        return Row("", way.name, failed=f"{type(error).__name__}: {text[:160]}"), None
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values()) if way.compiled else None
    told = {"host_seconds": host, "first_seconds": first, "peak_bytes": peak, "graph_breaks": breaks}
    return Row("", way.name, seconds, **told), found


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooLong in what takes longer, once the interpreter is there: a kernel's compilation is waited for."""

    def give_up(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, give_up)
    old = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)  # once more, where somebody swallowed it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *old)
        signal.signal(signal.SIGALRM, before)


def forget(device: torch.device) -> None:
    """What the last way compiled and held."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def made(way: Way, weights: DenoiserWeights, plan: Plan, comm: Comm, compiler: str) -> Work:
    """An evaluation done this way, ready to be called. Raises whatever is not there."""
    device = weights.device
    denoiser = denoiser_of(weights, plan, comm, fused=way.fused, reused=way.reused)
    video, audio = (x.to(device) for x in draw("comfy", 0, plan.geometry))
    view, block = parts(way, denoiser, compiler)
    if way.compiled == "block" and plan.fp4:
        raise ConfigError("the forms for compilation have dense products alone")

    @torch.no_grad()
    def work() -> Tensor:
        return evaluation(denoiser, view, block, video, audio)

    return captured(work, device) if way.graph else work


def parts(way: Way, denoiser: Denoiser, compiler: str) -> tuple[View, Callable[..., None]]:
    """The view that blocks get, and what runs one."""
    view, rows, device = denoiser.view, denoiser.own_rows, denoiser.weights.device

    def whole(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=compiler)

    if way.compiled == "between":
        return compiled_between(view, rows, device, whole), run_block
    if way.compiled == "block":
        return compilable(view, rows, device), whole(settled_block)
    if way.compiled == "as it is":
        return view, torch.compile(run_block, dynamic=False, backend=compiler)
    return view, run_block


def settled_block(stream: Residual, weights: BlockWeights, table_R6C: Tensor, view: View) -> None:
    """A block that leaves nothing to be added by the next, so that all of them are one graph."""
    run_block(stream, weights, table_R6C, view)
    stream.whole()


def evaluation(denoiser: Denoiser, view: View, block: Callable[..., None], video: Tensor, audio: Tensor) -> Tensor:
    """As `Denoiser.__call__` on one rank, at the first step, with blocks run by `block`; both streams, flat."""
    stream = Residual(denoiser.embed(video, audio), view.runs, view.elementwise)
    for weights, tables in zip(denoiser.weights.blocks, denoiser.modulation.blocks, strict=True):
        block(stream, weights, tables[0], view)
    return torch.cat([part.flatten() for part in denoiser.split(denoiser.outputs(stream.whole(), 0))])


def captured(work: Work, device: torch.device) -> Work:
    """The work as a CUDA graph: what it reads and gives stays where it was. Raises ConfigError elsewhere."""
    if device.type != "cuda":
        raise ConfigError(NEEDS_CUDA)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # compilation, plans, workspaces and rows' indices, before anything is captured
        work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()

    def replay() -> Tensor:
        graph.replay()
        return found

    return replay


def line(row: Row) -> str:
    """A row of the table."""

    def number(value: float | None, form: str, unit: float = 1.0) -> str:
        return "" if value is None else format(value / unit, form)

    told = row.failed or (f"{row.graph_breaks} graph breaks" if row.graph_breaks else "")
    cells = (
        row.shape,
        row.way,
        number(row.seconds, ".2f", 1e-3),
        number(row.to_first, ".3f"),
        number(row.host_seconds, ".2f", 1e-3),
        number(row.first_seconds, ".1f"),
        number(row.error, ".1e"),
        number(row.peak_bytes, ".1f", 1e9),
        told,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
