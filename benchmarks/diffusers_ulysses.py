"""diffusers' own transformer and Ulysses on random weights of the released size, timed as ours is.

    torchrun --standalone --nproc-per-node 2 benchmarks/diffusers_ulysses.py --shape 1344x768x124 --json FILE

Weights are random, bfloat16, equal on every rank. Ulysses takes rows and heads that divide among the ranks; where they
do not, its "ulysses_anything" is used, and said. Several ranks need GPUs: diffusers counts accelerators. Rank 0 adds a
point to the JSON, which `h3dist report` reads.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from points import keep

from h3dist.bench import rival
from h3dist.bench.spec import SMALL, parse_shape
from h3dist.packing import Packing, pack_t2va
from h3dist.plan import released_dims
from h3dist.topology import read_ranks

TEXT_TAG = 1


def main() -> None:
    """One rank: build, split, time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1344x768x124")
    parser.add_argument("--text-rows", type=int, default=400)
    parser.add_argument("--size", choices=("released", "small"), default="released")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, help="fewer than the model's, which are alike; a step is scaled to all")
    parser.add_argument("--steps", type=int, default=4, help="evaluations; the first warms up")
    parser.add_argument("--json", type=Path, required=True)
    args, ranks = parser.parse_args(), read_ranks()
    device = torch.device(args.device, ranks.local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif ranks.world > 1 and not torch.accelerator.device_count():
        print("diffusers: skipped, its context parallel needs GPUs", flush=True)
        return
    if ranks.world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    packing = pack_t2va(parse_shape(args.shape), (TEXT_TAG,) * args.text_rows)
    try:
        seconds, how = measure(args, packing, device, ranks.world)
        if ranks.rank == 0:
            tell(args, packing, device, ranks.world, seconds, how)
    finally:
        if ranks.world > 1:
            dist.destroy_process_group()


def measure(args: argparse.Namespace, packing: Packing, device: torch.device, world: int) -> tuple[float, str]:
    """Median seconds of a warm evaluation of the slowest rank, and in words how it is split."""
    from diffusers import ContextParallelConfig

    whole = replace(released_dims(), **SMALL) if args.size == "small" else released_dims()
    dims = replace(whole, layers=args.blocks or whole.layers)
    torch.manual_seed(0)
    model = rival.build(dims, device, getattr(torch, args.dtype), small=args.size == "small")
    attention = rival.choose_attention(model, device)
    uneven = bool(packing.rows % world or dims.heads % world)
    if world > 1:
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world, ulysses_anything=uneven))
    call, times = rival.step(model, dims, packing, device), []
    for _ in range(args.steps):
        begun = now(device, world)
        call()
        times.append(now(device, world) - begun)
    part = "" if dims == whole else f", {whole.layers} / {dims.layers} times what {dims.layers} blocks took"
    seconds = median(times[1:] or times) * whole.layers / dims.layers
    return seconds, f"{attention}{f', {_split(uneven)}' if world > 1 else ''}{part}"


def _split(uneven: bool) -> str:
    """The word for diffusers' way to split rows and heads."""
    return "ulysses_anything" if uneven else "ulysses_degree"


def now(device: torch.device, world: int) -> float:
    """Seconds, once every rank's device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if world > 1:
        dist.barrier()
    return time.perf_counter()


def tell(
    args: argparse.Namespace, packing: Packing, device: torch.device, world: int, seconds: float, how: str
) -> None:
    """Adds the point."""
    import diffusers

    cuda = device.type == "cuda"
    point = {
        "hardware": torch.cuda.get_device_name(device) if cuda else "CPU",
        "ranks": world,
        "layout": "single" if world == 1 else "ulysses",
        "shape": args.shape,
        "runner": f"diffusers {diffusers.__version__}",
        "step_seconds": seconds,
        "note": f"{how}, {packing.rows} rows, {args.dtype}",
    }
    if cuda:
        point["peak_memory"] = torch.cuda.max_memory_allocated(device)
    keep(args.json, "diffusers' transformer on random weights", point, torch=torch.__version__)
    print(f"diffusers {world}: {seconds:.4f} s a step, {point['note']}", flush=True)


if __name__ == "__main__":
    main()
