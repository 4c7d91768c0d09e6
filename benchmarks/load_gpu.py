"""Cold start: how fast a rank's weights come from a file to its device, beside what the disk and the bus give alone.

    python benchmarks/load_gpu.py [--blocks 10] [--folder DIR] [--json FILE]
    python benchmarks/load_gpu.py --device cpu --tiny                            # does it run: some seconds

Writes a denoiser's file of the released layout with random NVFP4 content into a folder of its own and takes it away
again. Each row is a read of that file, cold (the page cache dropped: of the whole machine where root may, else of this
file) or warm, or the copy from pinned memory alone. The last column is our rate against the slower of the bare read at
that temperature, by as many streams as was faster, and the copy. Rows come as they are done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.random_files import write_denoiser
from h3dist.bench.spec import Clip, parse_shape
from h3dist.bench.suite import environment
from h3dist.checkpoint.comfy import DenoiserFile, open_denoiser
from h3dist.checkpoint.tiny import CURVE
from h3dist.model.weights import load_denoiser
from h3dist.plan import Layout, Share, make_plan, released_dims

PIECE = 32 << 20  # bytes of one read and of one copy
STREAMS = 4
BIG = ("F8_E4M3", "U8")  # dtypes of codes and scales, which lie side by side at the end of the file


@dataclass(frozen=True)
class Row:
    """One way to read or copy. host_bytes: what this process held at most, beyond what it had before."""

    name: str
    cold: bool
    seconds: float
    bytes: int
    host_bytes: int
    ratio: float | None = None

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds


def main(words: list[str] | None = None) -> int:
    """All ways, as a table and as JSON."""
    args = arguments(words)
    device = torch.device(args.device)
    dims = replace(CURVE if args.tiny else released_dims(), layers=args.blocks)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "random.safetensors"
        begun = time.perf_counter()
        write_denoiser(path, dims)
        print(f"{path.stat().st_size / 1e9:.2f} GB written in {time.perf_counter() - begun:.1f} s to {folder}")
        dfile = open_denoiser(path)
        told = {"blocks": args.blocks, "file_system": file_system(folder), "dropped": drop(path, device)}
        told |= environment(device)
        print(f"file system {told['file_system']}; page cache dropped: {told['dropped']}\n")
        print("| | | s | GB | GB/s | of the slower of disk and bus | host GB at most |\n" + "|---" * 7 + "|")
        rows: list[Row] = []
        for row in measured(dfile, path, device, args.repeats):
            row = against(row, rows)
            rows.append(row)
            print(line(row), flush=True)
            if args.json:
                record = told | {"rows": [asdict(row) | {"rate": row.rate} for row in rows]}
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def arguments(words: list[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--folder", default="/var/tmp", help="on the disk to be measured")
    parser.add_argument("--repeats", type=int, default=2, help="of each row; the fastest counts")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def measured(dfile: DenoiserFile, path: Path, device: torch.device, repeats: int) -> Iterator[Row]:
    """Bare reads, the bare copy, both, and the product's own loading of a whole rank's share and of half."""
    span, buffers = big_span(dfile), [np.ones(PIECE, np.uint8) for _ in range(STREAMS)]  # touched, as reused ones are
    torch.zeros(1, device=device)  # the context of the device is no part of loading
    works: dict[str, Callable[[], int]] = {
        "bare read": partial(read, path, span, buffers[:1]),
        f"bare read, {STREAMS} streams": partial(read, path, span, buffers),
    }
    if device.type == "cuda":
        yield best("pinned copy alone", False, partial(copy, span, device), device, path, repeats)
        works["read, pinned, copied"] = partial(read_and_copy, path, span, device)
    for name, tp in (("all", 1), ("one of two tensor ranks", 2)):
        works[f"load_denoiser, {name}"] = partial(load, path, share_of(dfile, tp), device)
    for cold in (True, False):
        for name, work in works.items():
            yield best(name, cold, work, device, path, repeats)


def against(row: Row, before: Sequence[Row]) -> Row:
    """The row with our rate held against what is possible, from the rows before it."""
    if not row.name.startswith("load_denoiser"):
        return row
    disk = max(other.rate for other in before if other.name.startswith("bare read") and other.cold == row.cold)
    bus = [other.rate for other in before if other.name == "pinned copy alone"]
    return replace(row, ratio=row.rate / min([disk, *bus]))


def best(name: str, cold: bool, work: Callable[[], int], device: torch.device, path: Path, repeats: int) -> Row:
    """The fastest of some runs of work that gives its bytes; cold: each with the page cache dropped, else after one."""
    if not cold:
        work()
    runs = []
    for _ in range(repeats):
        if cold:
            drop(path, device)
        held = begin_peak()
        begun = time.perf_counter()
        size = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        runs.append((time.perf_counter() - begun, peak() - held))
    return Row(name, cold, min(run[0] for run in runs), size, max(run[1] for run in runs))


def load(path: Path, share: Share, device: torch.device) -> int:
    """The product's way, from a file that was not open yet; the weights are gone on return. Gives the bytes read."""
    dfile = open_denoiser(path)
    load_denoiser(dfile, share, device=device, dtype=torch.bfloat16)
    return dfile.file.bytes_read


def share_of(dfile: DenoiserFile, tp: int) -> Share:
    """The first of `tp` tensor ranks' share."""
    clip = Clip(parse_shape("64x64x5"))
    plan = make_plan(clip, dfile.dims, 8, Layout(tp=tp), dtype="bfloat16", attention="sdpa", steps=1)
    return plan.shares[0]


def big_span(dfile: DenoiserFile) -> tuple[int, int]:
    """Where the codes and scales of all blocks lie: nearly all that a rank reads."""
    big = [info for info in dfile.tensors.values() if info.dtype in BIG]
    return min(info.start for info in big), max(info.stop for info in big)


def read(path: Path, span: tuple[int, int], buffers: Sequence[Any]) -> int:
    """A span of the file in pieces, by as many threads beside each other as there are buffers."""
    streams = len(buffers)
    edges = [span[0] + (span[1] - span[0]) * stream // streams for stream in range(streams + 1)]

    def part(stream: int) -> int:
        return sum(size for _, size in pieces(path, (edges[stream], edges[stream + 1]), buffers[stream : stream + 1]))

    with ThreadPoolExecutor(streams) as pool:
        return sum(pool.map(part, range(streams)))


def pieces(path: Path, span: tuple[int, int], buffers: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Reads a span into the buffers, taken in turn; gives which one holds how many bytes."""
    descriptor, position, turn = os.open(path, os.O_RDONLY), span[0], 0
    try:
        while position < span[1]:
            window = memoryview(buffers[turn])[: min(PIECE, span[1] - position)]
            done = os.preadv(descriptor, [window], position)
            yield turn, done
            position, turn = position + done, (turn + 1) % len(buffers)
    finally:
        os.close(descriptor)


def copy(span: tuple[int, int], device: torch.device) -> int:
    """About as many bytes as the span has, from one pinned buffer to the device."""
    source, times = pinned(), -(-(span[1] - span[0]) // PIECE)
    target = torch.empty_like(source, device=device)
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    return times * PIECE


def read_and_copy(path: Path, span: tuple[int, int], device: torch.device) -> int:
    """A read into two pinned buffers in turn, each copied to the device while the other is filled."""
    sources, target = [pinned(), pinned()], torch.empty(PIECE, dtype=torch.uint8, device=device)
    copied = [torch.cuda.Event() for _ in sources]
    for turn, size in pieces(path, span, [source.numpy() for source in sources]):
        target[:size].copy_(sources[turn][:size], non_blocking=True)
        copied[turn].record()
        copied[1 - turn].synchronize()  # before that buffer is filled again
    return span[1] - span[0]


def pinned() -> Tensor:
    """A buffer of one piece; torch keeps it for the next call."""
    return torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)


def drop(path: Path, device: torch.device) -> str:
    """Has the page cache forget: all of it where that may be and a GPU's machine is ours alone, else this file."""
    os.sync()
    if device.type == "cuda":
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3")
            return "all"
        except OSError:
            pass
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return "of this file"


def begin_peak() -> int:
    """Bytes that this process holds now; what it holds at most is counted from here on, where the kernel lets it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak()
    return status("VmRSS")


def peak() -> int:
    """Bytes that this process held at most."""
    return status("VmHWM")


def status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) for text in lines if text.startswith(f"{key}:")) << 10


def file_system(folder: str) -> str:
    """The kind and the source of the mount that holds a folder."""
    mounts = [text.split() for text in Path("/proc/mounts").read_text().splitlines()]
    inside = [m for m in mounts if os.path.realpath(folder).startswith(m[1].rstrip("/") + "/")]
    source, _, kind, *_ = max(inside, key=lambda mount: len(mount[1]))
    return f"{kind} on {source}"


def line(row: Row) -> str:
    """A row of the table."""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    rate, warmth = f"{row.rate / 1e9:.2f}", "cold" if row.cold else "warm"
    cells = (
        row.name,
        warmth,
        f"{row.seconds:.3f}",
        f"{row.bytes / 1e9:.3f}",
        rate,
        ratio,
        f"{row.host_bytes / 1e9:.2f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
