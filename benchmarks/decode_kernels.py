"""What a layer of the fast decoder takes on a GPU, part by part: products, attention, and each kernel between them.

    python benchmarks/decode_kernels.py [--batches 1,4,7,8,14] [--json FILE]

At the released size, on random numbers: milliseconds a tile of all 36 layers, and TFLOP/s or GB/s. The norm's kernel
in several cuts, of which `h3dist/vae/triton_forms.py` has one. Medians of 20 by events, after 5.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent.parent))

from h3dist.attention.sdpa import KERNELS
from h3dist.provenance import commit, versions_of
from h3dist.vae.forms import Turns

LAYERS, C, HEADS, D, R, FFN = 36, 2048, 32, 64, 24, 8192
TOKENS = 7 * 16 * 16 + 5  # of a tile, with four registers and a zero
PRODUCTS = {"qkv": (3 * C, C), "out": (C, C), "up and gate": (2 * FFN, C), "down": (C, FFN)}
CUTS = list(product((1, 2, 4), (4, 8)))  # rows of a program, its warps


@dataclass(frozen=True)
class Row:
    """A part, by the tiles of a call."""

    part: str
    batch: int
    milliseconds: float  # a tile, all layers
    rate: float  # TFLOP/s or GB/s
    unit: str


def main() -> int:
    """All parts of all batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,4,7,8,14")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("| part | tiles a call | ms a tile, 36 layers | rate |\n|---|---|---|---|", flush=True)
    rows = []
    for batch in map(int, args.batches.split(",")):
        for row in parts(batch):
            rows.append(row)
            print(f"| {row.part} | {batch} | {row.milliseconds:.2f} | {row.rate:.0f} {row.unit} |", flush=True)
    if args.json:
        made = {"device": torch.cuda.get_device_name(), "date": str(date.today()), "commit": commit()}
        told = {"rows": [asdict(row) for row in rows], **made, **versions_of(("torch", "triton"))}
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def parts(batch: int) -> Iterator[Row]:
    """Every part at a batch."""
    N = batch * TOKENS
    for name, (columns, width) in PRODUCTS.items():
        x, weight, bias = half(N, width), half(columns, width) * 0.02, half(columns)
        yield flops(name, batch, partial(F.linear, x, weight, bias), 2 * N * columns * width)
    qkv = half(N, 3, HEADS, D)
    q, k, v = qkv.unflatten(0, (batch, TOKENS)).permute(2, 0, 3, 1, 4)
    for name in ("cudnn", "flash"):
        with sdpa_kernel(KERNELS[name]):
            work = partial(F.scaled_dot_product_attention, q, k, v)
            row = flops(f"attention, {name}", batch, work, 4 * batch * TOKENS**2 * C)
        yield row
    yield from elementwise(batch, N, qkv)


def elementwise(batch: int, N: int, qkv: Tensor) -> Iterator[Row]:
    """The kernels between products; a layer has the norm twice."""
    from h3dist.vae import triton_forms as kernels

    x, y, h = half(N, C).float(), half(N, C), half(N, C)
    scale, weight = half(C).float(), half(C).float()
    for rows, warps in CUTS:
        options = {"ADD": True, "ROWS": rows, "WIDTH": C, "num_warps": warps}
        launch = partial(kernels._add_normed[(-(-N // rows),)], x, y, scale, weight, h, N, C, 1e-5, **options)
        yield bytes_moved(f"norm, {rows} rows, {warps} warps", batch, launch, N * C * 12, times=2)
    turns = Turns(half(N, R), half(N, R))
    yield bytes_moved("rotation", batch, partial(kernels.turn, qkv, turns, 1e-5), 2 * N * C * 4)
    yield bytes_moved("gate", batch, partial(kernels.gate, half(N, 2 * FFN)), 3 * N * FFN * 2)


def half(*shape: int) -> Tensor:
    """Random numbers, float16."""
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def flops(part: str, batch: int, work: Callable[[], Any], count: int) -> Row:
    """A part that computes, once a layer."""
    taken = milliseconds(work)
    return Row(part, batch, LAYERS * taken / batch, count / taken / 1e9, "TFLOP/s")


def bytes_moved(part: str, batch: int, work: Callable[[], Any], count: int, times: int = 1) -> Row:
    """A part that moves bytes, `times` a layer."""
    taken = milliseconds(work)
    return Row(part, batch, times * LAYERS * taken / batch, count / taken / 1e6, "GB/s")


def milliseconds(work: Callable[[], Any]) -> float:
    """Of one call, by events."""
    for _ in range(5):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return median(begun.elapsed_time(ended) for begun, ended in pairwise(marks))


if __name__ == "__main__":
    sys.exit(main())
