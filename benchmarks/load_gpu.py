"""Cold start: how fast a rank's weights come from a file to its device, beside what the disk and the bus give alone.

    python benchmarks/load_gpu.py [--blocks 10] [--folder DIR] [--json FILE]
    python benchmarks/load_gpu.py --device cpu --tiny                            # does it run: some seconds

Writes a denoiser's file of the released layout with random NVFP4 content into a folder of its own and takes it away
again. First what a process pays once, whatever it loads: CUDA's context, and pinned memory by the byte. Then each row
is a read of that file, cold (none of it in the page cache, which the kernel is asked) or warm, or the copy from pinned
memory alone; the first load of the process is measured before the others, and alone. `share` is our rate against the
slower of the bare read at that temperature, by as many streams as was faster, and the copy; `pinning` the seconds of a
row in which CUDA gave out pinned memory. Rows come as they are done.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
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
from h3dist.checkpoint.readers import READERS
from h3dist.checkpoint.tiny import CURVE
from h3dist.model.weights import load_denoiser
from h3dist.plan import Layout, Share, make_plan, released_dims

PIECE = 32 << 20  # bytes of one read and of one copy
STREAMS = 4  # of the bare read, and readers of a load beside the product's own
PINNED = 256 << 20  # bytes of pinned memory that are asked for to see what they cost
BIG = ("F8_E4M3", "U8")  # dtypes of codes and scales, which lie side by side at the end of the file


@dataclass(frozen=True)
class Row:
    """One way to read or copy. host_bytes: what this process held at most, beyond what it had before. cached: the part
    of the file that was in the page cache when it began, where the kernel told. pinning: seconds of pinned memory's
    allocation."""

    name: str
    cold: bool
    seconds: float
    bytes: int
    host_bytes: int
    ratio: float | None = None
    cached: float | None = None
    pinning: float = 0.0

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
        rows = list(beginning(device))  # before anything else asks the device
        told = {"blocks": args.blocks, "repeats": args.repeats, "file_system": file_system(folder)}
        told |= environment(device)
        print(f"file system {told['file_system']}\n")
        print("| | | s | GB | GB/s | share | pinning, s | host GB at most | cached |\n" + "|---" * 9 + "|")
        print("".join(f"{line(row)}\n" for row in rows), end="", flush=True)
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


def beginning(device: torch.device) -> Iterator[Row]:
    """What a process pays once: a context, and the first pinned memory, which CUDA has the kernel lock page by page."""
    if device.type == "cuda":
        for name, size in (("CUDA's context", 0), ("pinned memory, the first", PINNED)):
            held, begun = begin_peak(), time.perf_counter()
            torch.empty(size, dtype=torch.uint8, pin_memory=True) if size else torch.zeros(1, device=device)
            torch.cuda.synchronize(device)
            yield Row(name, True, time.perf_counter() - begun, size, peak() - held)


def measured(dfile: DenoiserFile, path: Path, device: torch.device, repeats: int) -> Iterator[Row]:
    """The first load, then bare reads, the bare copy, both, and the product's own loading of all and of half."""
    span, buffers = big_span(dfile), [np.ones(PIECE, np.uint8) for _ in range(STREAMS)]  # touched, as reused ones are
    loads = {
        "load_denoiser, all": partial(load, path, share_of(dfile, 1), device),
        f"load_denoiser, all, {STREAMS} readers": partial(load, path, share_of(dfile, 1), device, STREAMS),
        "load_denoiser, one of two tensor ranks": partial(load, path, share_of(dfile, 2), device),
    }
    first = once("load_denoiser, all, the process's first", True, loads["load_denoiser, all"], device, path)
    works: dict[str, Callable[[], int]] = {
        "bare read": partial(read, path, span, buffers[:1]),
        f"bare read, {STREAMS} streams": partial(read, path, span, buffers),
    }
    if device.type == "cuda":
        yield best("pinned copy alone", False, partial(copy, span, device), device, path, repeats)
        works["read, pinned, copied"] = partial(read_and_copy, path, span, device)
    for cold in (True, False):
        for name, work in (works | loads).items():
            yield best(name, cold, work, device, path, repeats)
        if cold:
            yield first


def against(row: Row, before: Sequence[Row]) -> Row:
    """The row with our rate held against what is possible, from the rows before it."""
    if not row.name.startswith("load_denoiser"):
        return row
    disk = max(other.rate for other in before if other.name.startswith("bare read") and other.cold == row.cold)
    bus = [other.rate for other in before if other.name == "pinned copy alone"]
    return replace(row, ratio=row.rate / min([disk, *bus]))


def best(name: str, cold: bool, work: Callable[[], int], device: torch.device, path: Path, repeats: int) -> Row:
    """The fastest of some runs of work that gives its bytes; cold: the file is out of the cache, else after a run."""
    if not cold:
        work()
    runs = [once(name, cold, work, device, path) for _ in range(repeats)]
    return replace(min(runs, key=lambda run: run.seconds), host_bytes=max(run.host_bytes for run in runs))


def once(name: str, cold: bool, work: Callable[[], int], device: torch.device, path: Path) -> Row:
    """One run of it."""
    there = drop(path) if cold else cached(path)
    held, pinned_before = begin_peak(), pinning(device)
    begun = time.perf_counter()
    size = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begun
    return Row(name, cold, seconds, size, peak() - held, None, there, pinning(device) - pinned_before)


def pinning(device: torch.device) -> float:
    """Seconds that this process has spent on the allocation of pinned memory, as torch counts them."""
    if device.type != "cuda":
        return 0.0
    return torch.cuda.host_memory_stats().get("host_alloc_time.total", 0) / 1e6


def load(path: Path, share: Share, device: torch.device, readers: int = READERS) -> int:
    """The product's way, from a file that was not open yet; the weights are gone on return. Gives the bytes read."""
    dfile = open_denoiser(path)
    load_denoiser(dfile, share, device=device, dtype=torch.bfloat16, readers=readers)
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


def drop(path: Path) -> float | None:
    """Has the page cache forget the file; gives the part of it that stayed. Other files, the libraries' too, stay."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return cached(path)


def cached(path: Path) -> float | None:
    """The part of a file's pages that are in the page cache, by mincore(2); None where the kernel does not tell."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped))
        failed = ctypes.CDLL(None).mincore(address, size, pages.ctypes.data_as(ctypes.c_void_p))
        del view  # or the map cannot be closed
    return None if failed else float((pages & 1).mean())


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
    ratio, pinned_in = "" if row.ratio is None else f"{row.ratio:.2f}", f"{row.pinning:.3f}" if row.pinning else ""
    rate, warmth = f"{row.rate / 1e9:.2f}" if row.bytes else "", "cold" if row.cold else "warm"
    cells = (
        row.name,
        warmth,
        f"{row.seconds:.3f}",
        f"{row.bytes / 1e9:.3f}",
        rate,
        ratio,
        pinned_in,
        f"{row.host_bytes / 1e9:.2f}",
        "" if row.cached is None else f"{row.cached:.0%}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
