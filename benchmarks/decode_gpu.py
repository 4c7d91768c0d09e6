"""What makes decoding fast on one device: ours beside diffusers' own, and tiles done otherwise, in one process.

    python benchmarks/decode_gpu.py [--shape 1344x768x39] [--batches 1,2,4,7,8] [--ways REGEX] [--json FILE]
    python benchmarks/decode_gpu.py --whole [--repeats 5] [--json FILE]    # whole clips of 124 frames, no ways
    python benchmarks/decode_gpu.py --device cpu --tiny --no-compile       # does it run: a small VAE, some seconds

Random weights of the released size, shared by all. First the kernels of some tiles; then whole clips, by diffusers and
by ours (`decode_clips.py`); then some tiles of the clip in several ways (`decode_ways.py`). Each row is printed as soon
as it is there: milliseconds of a tile or seconds of a clip, what it gains, how far its frames are from the plain way's,
what the first call took (a compilation is in it), peak memory. A way that fails is told as such and the others go on;
after --seconds those that are left are told as skipped.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.decode_clips import clips
from benchmarks.decode_rows import BEGUN, Row, clock, forget_peak, peak, shown, synchronise, told
from benchmarks.decode_ways import LARGE, Way, all_ways, chosen, eager, fast
from benchmarks.random_vaes import TINY, random_video_vae, video_settings
from h3dist.bench.spec import parse_shape
from h3dist.geometry import CHUNK_FRAMES, TAIL_FRAMES
from h3dist.plan.decode import FAST_CALL_TILES
from h3dist.provenance import commit, versions_of
from h3dist.tiles import HEAD, TAIL, cut_video
from h3dist.vae import VideoVae

TINY_SHAPE, WAYS_SHAPE, WHOLE_SHAPE = "64x64x39", "1344x768x39", "1344x768x124"
KERNELS = 20  # that the profile names


def main(words: list[str] | None = None) -> int:
    """All of it, row by row, and as JSON."""
    args = arguments(words)
    device = torch.device(args.device)
    torch.manual_seed(0)
    settings = video_settings(**(TINY if args.tiny else {}))
    vae = random_video_vae(settings, device)
    shape = args.shape or (TINY_SHAPE if args.tiny else WHOLE_SHAPE if args.whole else WAYS_SHAPE)
    clip = parse_shape(shape)
    latents = torch.randn(1, 24, clip.latent_t, clip.latent_h, clip.latent_w, device=device)
    print(f"{shape} on {made(device)}, ready after {time.monotonic() - BEGUN:.0f} s", flush=True)
    stacked = stack(vae, latents, args.tiles)
    kernels = {} if args.whole or device.type == "cpu" else profiles(vae, stacked)
    found = {"shape": shape, "tiny": args.tiny, **made(device), "rows": [], "kernels": kernels}
    for row in shown(measured(vae, settings, latents, stacked, args)):
        found["rows"].append(asdict(row))
        if args.json:  # again with every row: a time limit leaves what is there
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def arguments(words: list[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape")
    parser.add_argument("--whole", action="store_true", help="whole clips alone")
    parser.add_argument("--plain", action="store_true", help="clips also without autocast and by modules")
    parser.add_argument("--flash4", action="store_true", help="clips also with attention by flash-attn-4")
    parser.add_argument("--calls", default=str(FAST_CALL_TILES), help="of clips: the most tiles a call")
    parser.add_argument("--batches", default="1,2,4,7,8")
    parser.add_argument("--ways", default="", help="a regular expression: only these, and the plain one")
    parser.add_argument("--tiles", type=int, default=16, help="that a way does at least")
    parser.add_argument("--repeats", type=int, default=2, help="after a first one; the median counts")
    parser.add_argument("--seconds", type=float, default=75, help="after which no other way is begun")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile-whole", action="store_true", help="the whole decoder too: minutes")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def measured(
    vae: VideoVae, settings: dict[str, Any], latents: Tensor, stacked: Tensor, args: argparse.Namespace
) -> Iterator[Row]:
    """Every row in turn."""
    calls = list(map(int, args.calls.split(",")))
    more = {"plain": args.plain, "flash4": args.flash4}
    yield from clips(vae, settings, latents, calls, args.repeats if args.whole else 1, **more)
    if not args.whole:
        batches = list(map(int, args.batches.split(",")))
        cuda = vae.device.type == "cuda"
        ways = all_ways(batches, cuda=cuda, compiled=args.compile, whole=args.compile_whole)
        yield from tiles(vae, stacked, chosen(ways, args.ways), args)


def stack(vae: VideoVae, latents: Tensor, count: int) -> Tensor:
    """The first tiles of the clip, over again where it has fewer: [count or more, 24, 7, y, x]."""
    restored = vae.statistics.restore(latents)
    jobs = list(cut_video(*latents.shape[2:]).jobs())
    picked = [jobs[index % len(jobs)] for index in range(max(count, 8))]
    return torch.cat([restored[:, :, list(job.latents), slice(*job.rows), slice(*job.cols)] for job in picked])


def tiles(vae: VideoVae, stacked: Tensor, ways: list[Way], args: argparse.Namespace) -> Iterator[Row]:
    """A row for each way."""
    most, plain = max(way.batch for way in ways), eager(vae, stacked[:1])
    wanted = torch.cat([plain(stacked[index : index + 1]) for index in range(min(most, len(stacked)))])
    for way in ways:
        if time.monotonic() - BEGUN > args.seconds:
            yield Row(str(way), "tile", failed=f"skipped, {args.seconds:.0f} s are over")
        else:
            yield tile_row(vae, stacked, way, wanted, args.repeats)


def tile_row(vae: VideoVae, stacked: Tensor, way: Way, wanted: Tensor, repeats: int) -> Row:
    """Whole batches, as many as make up the tiles: nothing is padded."""
    batches = [batch for batch in stacked.split(way.batch) if len(batch) == way.batch]
    try:
        forget_peak()
        begun = time.perf_counter()
        call = way.make(vae, batches[0])
        given = call(batches[0])
        synchronise()
        first = time.perf_counter() - begun
        error, equal = (None, None) if given is None else compared(used(given), used(wanted[: way.batch]))
        del given
        seconds = median(clock(lambda: [call(batch) is None for batch in batches]) for _ in range(repeats))
        return Row(str(way), "tile", seconds / len(batches) / way.batch, error, equal, first, peak())
    except Exception as error:  # out of memory, no compiler: the other ways still count
        return Row(str(way), "tile", failed=told(error))


def compared(given: Tensor, wanted: Tensor) -> tuple[float, bool]:
    """The largest relative error of a tile, in the 2-norm, NaN where one is not finite; and whether all bits agree."""
    given, wanted = (raw.float().flatten(1) for raw in (given, wanted))
    errors = (given - wanted).norm(dim=1) / wanted.norm(dim=1)
    return errors.max().item(), torch.equal(given, wanted)


def used(raw: Tensor) -> Tensor:
    """Of the decoder's 28 frames those that count."""
    return raw if raw.shape[2] == CHUNK_FRAMES + TAIL_FRAMES else torch.cat([raw[:, :, HEAD], raw[:, :, TAIL]], dim=2)


def profiles(vae: VideoVae, stacked: Tensor) -> dict[str, list[dict[str, Any]]]:
    """The kernels of a plain tile, and of fast batches."""
    plain = profile("one plain tile", eager(vae, stacked[:1]), stacked[:1])
    found = {"plain": plain}
    for gemm in ("exact", "fp8"):
        try:
            name, example = f"{LARGE} fast tiles, {gemm} products", stacked[:LARGE]
            found[f"fast, {gemm}"] = profile(name, fast(vae, example, gemm=gemm), example)
        except Exception as error:
            print(f"the fast decoder failed: {told(error)}", flush=True)
    return found


def profile(name: str, call: Callable[[Tensor], Any], latents: Tensor) -> list[dict[str, Any]]:
    """The longest kernels of one call, printed: name, calls, milliseconds in all."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    call(latents)
    synchronise()
    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call(latents)
        synchronise()
    events = [event for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    found = [{"name": event.key, "calls": event.count, "ms": event.self_device_time_total / 1e3} for event in events]
    found.sort(key=lambda kernel: -kernel["ms"])
    print(f"\n{name}: {sum(kernel['ms'] for kernel in found):.1f} ms of kernels\n| kernel | calls | ms |")
    print("|---|---|---|")
    for kernel in found[:KERNELS]:
        print(f"| {kernel['name'][:90]} | {kernel['calls']} | {kernel['ms']:.2f} |")
    return found[: 2 * KERNELS]


def made(device: torch.device) -> dict[str, Any]:
    """Where and when."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "date": str(date.today()), "commit": commit(), **versions_of(("torch", "diffusers"))}


if __name__ == "__main__":
    sys.exit(main())
