"""What encoding takes on one device, of what it is made, and what other ways would win.

    python benchmarks/encode_gpu.py [--layers 10] [--tokens 400] [--picture 48] [--repeats 5] [--json FILE]
    python benchmarks/encode_gpu.py --device cpu --tiny                          # does it run: some seconds

The text encoder of the released size with some of its 50 layers and its whole vision tower, random weights stored as in
the file. Each way encodes a text, and a text with one picture of `--picture` x `--picture` tokens: as a run does, in
float32; weights made dense by the Triton kernel, into new memory or into one buffer; with one matrix a shape that is
dense already, which leaves the rest; and products in TF32, which the contract does not allow, to know what that costs.
Then the parts alone, and memory: before, at rest, at most, after release. Rows come as they are done.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.random_encoder import random_encoder, settings
from h3dist.bench.steps import relative_error
from h3dist.bench.suite import environment
from h3dist.bench.timing import Clock
from h3dist.checkpoint.formats import Weight
from h3dist.checkpoint.nvfp4 import Nvfp4Weight
from h3dist.model.reused import triton_fill
from h3dist.text.encoder import TextEncoder
from h3dist.text.layers import StoredLinear
from h3dist.text.presentation import Presentation
from h3dist.text.vision import MERGE, Vision

Dense = Callable[[Weight], Tensor]  # a weight as float32 [N, K]
Shown = tuple[Presentation, Mapping[str, Vision] | None]


@dataclass(frozen=True)
class Row:
    """What one way, or one part alone, took; the error is relative, in the 2-norm, against the way of a run."""

    name: str
    rows: int
    seconds: float | None = None
    first_seconds: float | None = None
    error: float | None = None
    peak_bytes: int | None = None
    failed: str | None = None


def main(words: list[str] | None = None) -> int:
    """All ways and parts, as a table and as JSON."""
    args = arguments(words)
    device = torch.device(args.device)
    picture = args.picture or (4 if args.tiny else 48)
    F.linear(torch.zeros(8, 8, device=device), torch.zeros(8, 8, device=device))  # cuBLAS's work space stays
    memory = {"before": held(device)}
    encoder = random_encoder(config := settings(tiny=args.tiny), args.layers, device)
    memory["at rest"] = held(device)
    told = {"layers": args.layers, "tiny": args.tiny, "memory_bytes": memory, **environment(device)}
    rows: list[Row] = []
    print("| | rows | ms | first, ms | error | GB at most | |\n" + "|---" * 7 + "|")
    for row in measured(encoder, config, args.tokens, picture, Clock(device, args.repeats)):
        rows.append(row)
        print(line(row), flush=True)
        save(args.json, told, rows)
    memory["at most"] = max(row.peak_bytes or 0 for row in rows if row.name == "as a run")
    encoder.release()
    memory["after release"] = held(device)
    print("\n" + ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in memory.items()))
    save(args.json, told, rows)
    return 0


def arguments(words: list[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--picture", type=int, help="tokens a side, default 48")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def measured(encoder: TextEncoder, config: dict, tokens: int, picture: int, clock: Clock) -> Iterator[Row]:
    """Every way over both presentations, then the parts alone."""
    for shown in (text(tokens), text_and_picture(config, tokens, picture)):
        wanted = None
        for name, way in WAYS.items():
            row, found = tried(name, way, encoder, shown, clock)
            wanted = found if wanted is None else wanted
            known = found is not None and name != RANDOM
            yield replace(row, error=relative_error(found, wanted)) if known else row
    yield from parts(encoder, config, tokens, picture, clock)


def text(tokens: int) -> Shown:
    """Random words."""
    ids = torch.randint(0, 150_000, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    return Presentation(tuple(ids), (1,) * tokens), None


def text_and_picture(config: dict, tokens: int, side: int) -> Shown:
    """The same, after a picture of side x side tokens."""
    words, _ = text(tokens)
    block = (config["vision_start_token_id"], *(config["image_token_id"],) * side**2, config["vision_end_token_id"])
    sizes = config["vision_config"]
    width = sizes["in_channels"] * sizes["temporal_patch_size"] * sizes["patch_size"] ** 2
    grid = (1, side * MERGE, side * MERGE)
    patches = torch.randn(prod(grid), width, generator=torch.Generator().manual_seed(2)).clamp(-1, 1)
    presentation = Presentation(block + words.ids, (0,) * len(block) + words.tags)
    return presentation, {"image": Vision(patches, (grid,))}


@contextmanager
def as_it_is(encoder: TextEncoder) -> Iterator[None]:
    """As a run encodes."""
    yield


@contextmanager
def by(encoder: TextEncoder, dense: Dense) -> Iterator[None]:
    """With NVFP4 weights made dense otherwise."""
    model = encoder.model
    kept = {name: module for name, module in model.named_modules() if is_quantised(module)}
    for name, module in kept.items():
        model.set_submodule(name, Otherwise(module, dense))
    try:
        yield
    finally:
        for name, module in kept.items():
            model.set_submodule(name, module)


class Otherwise(nn.Module):
    """A stored linear whose weight is made dense by a function of ours."""

    def __init__(self, linear: StoredLinear, dense: Dense) -> None:
        super().__init__()
        self.linear, self.dense = linear, dense

    def forward(self, x: Tensor) -> Tensor:
        scale = self.linear.stored.pre_quant_scale
        return F.linear(x if scale is None else x * scale.to(x.dtype), self.dense(self.linear.stored), self.linear.bias)


@contextmanager
def by_triton(encoder: TextEncoder) -> Iterator[None]:
    """By the kernel of the fused path, each into new memory."""
    fill = triton_fill()

    def dense(weight: Weight) -> Tensor:
        out = weight.codes.new_empty(weight.shape, dtype=torch.float32)
        fill(weight, out)
        return out

    with by(encoder, dense):
        yield


@contextmanager
def by_triton_in_place(encoder: TextEncoder) -> Iterator[None]:
    """By the kernel of the fused path, all into one buffer."""
    fill = triton_fill()
    weights = [linear.stored for linear in quantised(encoder)]
    buffer = weights[0].codes.new_empty(max(prod(weight.shape) for weight in weights), dtype=torch.float32)

    def dense(weight: Weight) -> Tensor:
        out = buffer[: prod(weight.shape)].view(weight.shape)
        fill(weight, out)
        return out

    with by(encoder, dense):
        yield


@contextmanager
def by_nothing(encoder: TextEncoder) -> Iterator[None]:
    """With one matrix a shape that is dense already: what is left is not the making of dense weights."""
    ready = {linear.stored.shape: linear.stored.dense(torch.float32) for linear in quantised(encoder)}
    with by(encoder, lambda weight: ready[weight.shape]):
        yield


@contextmanager
def in_tf32(encoder: TextEncoder) -> Iterator[None]:
    """As a run, but for products whose inputs are rounded to 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


RANDOM = "already dense"  # which computes something else
WAYS = {
    "as a run": as_it_is,
    "dense by Triton": by_triton,
    "dense by Triton, one buffer": by_triton_in_place,
    RANDOM: by_nothing,
    "TF32, not allowed": in_tf32,
}


def tried(name: str, way: Callable, encoder: TextEncoder, shown: Shown, clock: Clock) -> tuple[Row, Tensor | None]:
    """One way over one presentation, and the states that it gives; or why there is none."""
    rows, device = len(shown[0].ids), clock.device

    def work() -> Tensor:
        return encoder.encode(*shown)[0]

    try:
        clear(device)
        with way(encoder):
            begun = time.perf_counter()
            found = work().cpu()
            first = time.perf_counter() - begun
            seconds = clock.time(work, warm=0).median
            return Row(name, rows, seconds, first, None, peak(device)), found
    except Exception as error:  # no Triton, out of memory: the other ways still count
        return Row(name, rows, failed=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"), None


def parts(encoder: TextEncoder, config: dict, tokens: int, picture: int, clock: Clock) -> Iterator[Row]:
    """What encoding is made of, each alone: weights made dense, products, the vision tower."""
    linears = quantised(encoder)

    def dense() -> None:
        for linear in linears:
            linear.stored.dense(torch.float32)

    yield Row("every layer made dense, alone", 0, clock.time(dense, warm=1).median)
    ready = {linear.stored.shape: linear.stored.dense(torch.float32) for linear in linears}
    for rows in (tokens, tokens + picture**2 + 2):
        given = {width: torch.randn(rows, width, device=clock.device) for _, width in ready}

        def products(given: dict[int, Tensor] = given) -> None:
            for linear in linears:
                F.linear(given[linear.stored.shape[1]], ready[linear.stored.shape])

        yield Row("every layer's products, alone", rows, clock.time(products, warm=1).median)
    _, seen = text_and_picture(config, tokens, picture)
    patches, grid = seen["image"].patches.to(clock.device), torch.tensor(seen["image"].grids, device=clock.device)

    @torch.no_grad()
    def tower() -> None:
        encoder.model.visual(patches, grid_thw=grid)

    yield Row("vision tower, alone", picture**2, clock.time(tower, warm=1).median)


def quantised(encoder: TextEncoder) -> list[StoredLinear]:
    """The linears over NVFP4 weights, in their order."""
    return [module for module in encoder.model.modules() if is_quantised(module)]


def is_quantised(module: nn.Module) -> bool:
    """Whether it is a linear over an NVFP4 weight."""
    return isinstance(module, StoredLinear) and isinstance(module.stored, Nvfp4Weight)


def held(device: torch.device) -> int:
    """Bytes that torch holds on a GPU, once it gave back what no tensor needs; 0 on a CPU."""
    clear(device)
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int | None:
    """Bytes of tensors at most on a GPU since `clear`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def clear(device: torch.device) -> None:
    """Gives back what no tensor holds, and counts the most anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def save(path: Path | None, told: Mapping[str, Any], rows: list[Row]) -> None:
    """As JSON, where it was asked for."""
    if path:
        path.write_text(json.dumps({**told, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def line(row: Row) -> str:
    """A row of the table."""

    def number(value: float | None, form: str, unit: float = 1.0) -> str:
        return "" if value is None else format(value / unit, form)

    times = number(row.seconds, ".2f", 1e-3), number(row.first_seconds, ".0f", 1e-3)
    cells = (row.name, str(row.rows or ""), *times, number(row.error, ".1e"), number(row.peak_bytes, ".2f", 1e9))
    return f"| {' | '.join((*cells, row.failed or ''))} |"


if __name__ == "__main__":
    sys.exit(main())
