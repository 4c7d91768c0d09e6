"""Time denoiser steps on random NVFP4 weights, on one rank or under torchrun, and compare layouts.

    python benchmarks/step.py --canvas 1344x768 --frames 124
    torchrun --standalone --nproc-per-node 2 benchmarks/step.py --mode ulysses --canvas 1344x768 --frames 124

Needs torch alone. Rank 0 prints one JSON line: seconds a step, peak memory, bytes sent, SHA-256 of the latents.
`--save F` keeps the latents, `--against F` says how far they are from those of another layout.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from h3dist.bench.spec import SMALL, Clip
from h3dist.bench.steps import Measured, measure_steps, relative_error
from h3dist.comm import Comm
from h3dist.geometry import Geometry
from h3dist.plan import Plan, make_layout, make_plan, released_dims
from h3dist.topology import read_ranks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--canvas", default="1344x768")
    parser.add_argument("--frames", type=int, default=124)
    parser.add_argument("--text-rows", type=int, default=400)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--sp", type=int)
    parser.add_argument("--tp", type=int)
    parser.add_argument("--steps", type=int, default=6, help="evaluations; the first warms up")
    parser.add_argument("--size", choices=("released", "small"), default="released")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    return parser.parse_args()


def main() -> None:
    """One layout: its steps timed, its latents hashed."""
    args, ranks = arguments(), read_ranks()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dims = released_dims()
    if args.size == "small":
        dims = replace(dims, **SMALL)
    layout = make_layout(args.mode, ranks.world, args.sp, args.tp, dims)
    width, height = map(int, args.canvas.split("x"))
    clip = Clip(Geometry(width, height, args.frames))
    plan = make_plan(clip, dims, args.text_rows, layout, dtype=args.dtype, attention=args.attention, steps=args.steps)
    with Comm.connect(ranks, layout, device, backend=args.backend) as comm:
        measured = measure_steps(plan, comm, device, seed=args.seed)
        if ranks.rank == 0:
            print(json.dumps(report(plan, measured, device) | compared(args, measured)), flush=True)
        comm.agree("the end")


def report(plan: Plan, measured: Measured, device: torch.device) -> dict[str, object]:
    """Rank 0's figures as JSON values."""
    return {
        "layout": str(plan.layout),
        "mode": plan.layout.mode,
        "ranks": plan.layout.world,
        "rows": plan.rows,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": plan.dtype,
        "attention": plan.attention,
        "step_seconds": [round(s, 5) for s in measured.seconds],
        "median_step_seconds": round(measured.warm, 5),
        "resident_bytes": measured.resident,
        "peak_bytes": measured.peak,
        "sent_as_planned": measured.sent == plan.shares[0].sent | {"text": 0},
        "sent": measured.sent,
        "sha256": measured.sha256,
    }


def compared(args: argparse.Namespace, measured: Measured) -> dict[str, object]:
    """Keeps the latents in `--save`; gives their distance from those in `--against`."""
    if args.save:
        torch.save(measured.latents, args.save)
    if args.against:
        return {"relative_error": relative_error(measured.latents, torch.load(args.against))}
    return {}


if __name__ == "__main__":
    main()
