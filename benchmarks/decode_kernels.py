"""What a layer of the fast decoder takes on a GPU, part by part: products, attention, and each kernel between them.

    python benchmarks/decode_kernels.py [--batches 1,4,7,14] [--flash4] [--json FILE]

At the released size, on random numbers: milliseconds a tile of all 36 layers, and TFLOP/s or GB/s. Products as they are
and in ways that might be faster: without the bias in the product, rows filled up to a multiple of 128, by cuBLASLt,
with sums in float16 and in FP8 (both approximate); the gate behind its product by some rows at a time, so that what
lies between stays in the cache. The norm's kernel in several cuts, of which `h3dist/vae/triton_forms.py` has one.
Medians of 20 by events, after 5; a way that fails is told as such. --flash4: attention by flash-attn-4 too, which
compiles first.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
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

from h3dist.attention.flash4 import PACKAGE
from h3dist.attention.sdpa import KERNELS
from h3dist.provenance import commit, versions_of
from h3dist.vae.forms import Product, Turns
from h3dist.vae.narrow import narrowed, operand, scaled_linear

LAYERS, C, HEADS, D, R, FFN = 36, 2048, 32, 64, 24, 8192
TOKENS = 7 * 16 * 16 + 5  # of a tile, with four registers and a zero
PRODUCTS = {"qkv": (3 * C, C), "out": (C, C), "up and gate": (2 * FFN, C), "down": (C, FFN)}
PARTS = (2 * TOKENS, TOKENS, 900, 600)  # rows of the gate's product at a time
CUTS = list(product((1, 2, 4), (4, 8)))  # rows of a program, its warps


@dataclass(frozen=True)
class Row:
    """A part, by the tiles of a call."""

    part: str
    batch: int
    milliseconds: float  # a tile, all layers
    rate: float  # TFLOP/s or GB/s
    unit: str
    error: float | None = None  # of an approximation, relative, in the 2-norm


@dataclass(frozen=True)
class Way:
    """One way to multiply: `work` gives the product, within `around`."""

    name: str
    work: Callable[[], Tensor]
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    near: bool = False  # an approximation


def main() -> int:
    """All parts of all batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,4,7,14")
    parser.add_argument("--flash4", action="store_true", help="attention by flash-attn-4 too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("| part | tiles a call | ms a tile, 36 layers | rate | error |\n|---|---|---|---|---|", flush=True)
    made = {"device": torch.cuda.get_device_name(), "date": str(date.today()), "commit": commit()}
    told = {"rows": [], **made, **versions_of(("torch", "triton", "flash-attn-4"))}
    for batch in map(int, args.batches.split(",")):
        for row in parts(batch, flash4=args.flash4):
            told["rows"].append(asdict(row))
            error = "" if row.error is None else f"{row.error:.1e}"
            rate = f"{row.rate:.0f} {row.unit}"
            print(f"| {row.part} | {batch} | {row.milliseconds:.2f} | {rate} | {error} |", flush=True)
            if args.json:
                args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def parts(batch: int, *, flash4: bool) -> Iterator[Row]:
    """Every part at a batch."""
    N = batch * TOKENS
    for name, (columns, width) in PRODUCTS.items():
        x, product = half(N, width), Product(half(columns, width) * 0.02, half(columns))
        yield from multiplied(name, batch, ways(x, product) + narrow_ways(x, product), 2 * N * columns * width)
    yield from attended(batch, N, flash4=flash4)
    yield from gated(batch, N)
    yield from elementwise(batch, N, half(N, 3, HEADS, D))


def ways(x_NK: Tensor, product: Product) -> list[Way]:
    """Exact ones, of which the first is what the decoder does, and one with narrower sums."""
    weight, bias = product
    filled = F.pad(x_NK, (0, 0, 0, -len(x_NK) % 128))
    return [
        Way("", lambda: F.linear(x_NK, weight, bias)),
        Way("no bias", lambda: F.linear(x_NK, weight)),
        Way("no bias, by cuBLASLt", lambda: F.linear(x_NK, weight), cublaslt),
        Way("rows in 128s", lambda: F.linear(filled, weight, bias)[: len(x_NK)]),
        Way("float16 sums", lambda: F.linear(x_NK, weight, bias), float16_sums, near=True),
    ]


def narrow_ways(x_NK: Tensor, product: Product) -> list[Way]:
    """In FP8, with the rows rounded beforehand."""
    rows, rounded = operand(x_NK), narrowed(product)
    return [Way("FP8", lambda: scaled_linear(rows, rounded), near=True)]


@contextmanager
def cublaslt() -> Iterator[None]:
    """Products without a bias by cuBLASLt; those with one are already."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@contextmanager
def float16_sums() -> Iterator[None]:
    """Sums in float16 inside a product."""
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False


def multiplied(name: str, batch: int, ways: list[Way], count: int) -> Iterator[Row]:
    """A row for each way that works."""
    wanted = ways[0].work().float()
    for way in ways:
        called = f"{name}, {way.name}" if way.name else name
        try:
            with way.around():
                row = flops(called, batch, way.work, count)
                error = ((way.work().float() - wanted).norm() / wanted.norm()).item() if way.near else None
            yield replace(row, error=error)
        except Exception as failure:  # a setting that this torch lacks: the others still count
            print(f"| {called} | {batch} | {type(failure).__name__}: {failure} | | |", flush=True)


def attended(batch: int, N: int, *, flash4: bool) -> Iterator[Row]:
    """Attention by each kernel, over views of one tensor."""
    qkv = half(N, 3, HEADS, D).unflatten(0, (batch, TOKENS))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    for name in ("cudnn", "flash"):
        with sdpa_kernel(KERNELS[name]):
            work = partial(F.scaled_dot_product_attention, q, k, v)
            row = flops(f"attention, {name}", batch, work, 4 * batch * TOKENS**2 * C)
        yield row
    if flash4:
        work = partial(PACKAGE.load(), *qkv.unbind(2))
        yield flops("attention, flash4", batch, work, 4 * batch * TOKENS**2 * C)


def gated(batch: int, N: int) -> Iterator[Row]:
    """The gate behind its product, by all rows and by some at a time: the rate is the product's."""
    x, product = half(N, C), Product(half(2 * FFN, C) * 0.02, half(2 * FFN))
    for size in (N, *(size for size in PARTS if size < N)):
        work = partial(gate_by_parts, x, product, size)
        yield flops(f"up and gate, then the gate, by {size} rows", batch, work, 4 * N * FFN * C)


def gate_by_parts(x_NC: Tensor, product: Product, size: int) -> Tensor:
    """up * silu(gate), [N, f]."""
    from h3dist.vae import triton_forms as kernels

    out_Nf = x_NC.new_empty(len(x_NC), FFN)
    for part, into in zip(x_NC.split(size), out_Nf.split(size), strict=True):
        grid = len(part), -(-FFN // kernels.COLUMNS)
        kernels._gate[grid](F.linear(part, *product), into, into, FFN, NARROW=False, WIDTH=kernels.COLUMNS)
    return out_Nf


def elementwise(batch: int, N: int, qkv: Tensor) -> Iterator[Row]:
    """The kernels between products; a layer has the norm twice. Narrow ones write one byte in the place of two."""
    from h3dist.vae import triton_forms as kernels

    x, y, h = half(N, C).float(), half(N, C), half(N, C)
    scale, weight = half(C).float(), half(C).float()
    for rows, warps in CUTS:
        options = {"ADD": True, "NARROW": False, "ROWS": rows, "WIDTH": C, "num_warps": warps}
        launch = partial(kernels._add_normed[(-(-N // rows),)], x, y, scale, weight, h, x, N, C, 1e-5, **options)
        yield bytes_moved(f"norm, {rows} rows, {warps} warps", batch, launch, N * C * 12, times=2)
    narrow = partial(kernels.narrow_add_normed, x, y, scale, weight, 1e-5)
    yield bytes_moved("norm to FP8", batch, narrow, N * C * 11, times=2)
    turns, up_gate = Turns(half(N, R), half(N, R)), half(N, 2 * FFN)
    yield bytes_moved("rotation", batch, partial(kernels.turn, qkv, turns, 1e-5), 2 * N * C * 4)
    yield bytes_moved("gate", batch, partial(kernels.gate, up_gate), 3 * N * FFN * 2)
    yield bytes_moved("gate to FP8", batch, partial(kernels.narrow_gate, up_gate), N * FFN * 5)
    yield bytes_moved("attention's output to FP8", batch, partial(kernels.operand, y), N * C * 3)


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
