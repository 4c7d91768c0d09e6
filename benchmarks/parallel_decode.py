"""Decoding over ranks: what the schedule makes of job times, and what two CPU ranks really take.

    python benchmarks/parallel_decode.py measure [--device cpu|cuda] [--times FILE]
    python benchmarks/parallel_decode.py schedule [--times FILE] [--shape 1344x768x124] [--batch 7]
    python benchmarks/parallel_decode.py ranks [--counts 1,2] [--shape 1344x768x124] [--repeats 3] [--json FILE]

`measure` times, on one device and one thread of a CPU, a tile of the released video VAE (on a CPU from one and two of
its 36 layers), rank 0's work on a chunk, and the sound; random weights. `schedule` plays the schedule of 1 to 8 ranks
with such times, or with unit costs where there is no file: no transfer and no encoder in it. Exit code 1 where any
number of ranks gains less than GOAL of itself. `ranks` decodes a clip on real gloo ranks, one thread each, with a
small video VAE but every tile of the real clip, scheduled by what a tile and a chunk take here, and compares the
frames by hash.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.random_vaes import SMALL, random_audio_vae, random_video_vae, video_settings
from h3dist.bench.spec import parse_shape
from h3dist.comm import Comm
from h3dist.decoding import Clean, assist, decode_together
from h3dist.geometry import Geometry
from h3dist.plan import Layout, schedule_decode
from h3dist.provenance import commit
from h3dist.spread import Extra, Schedule, makespan, spread
from h3dist.tiles import Cuts, cut_video
from h3dist.topology import Ranks
from h3dist.vae import VideoVae
from h3dist.vae.fast import FastDecoder
from h3dist.vae.frames import finish

RESULTS = Path(__file__).parent / "results"
COUNTS = range(1, 9)
GOAL = 0.9  # of ideal
LAYERS = 36  # of the released decoder
HEARD = 16  # audio latents that are timed on a CPU
REPEATS = 3


def main() -> int:
    """One of the three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("measure", "schedule", "ranks"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="1344x768x124")
    parser.add_argument("--times", type=Path)
    parser.add_argument("--counts", default="1,2")
    parser.add_argument("--batch", type=int, default=1, help="tiles of a call")
    parser.add_argument("--fast", action="store_true", help="of the fast decoder: its schedule, or its tile")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work = {"measure": measure, "schedule": show_schedule, "ranks": show_ranks}
    return work[args.what](args)


# --- job times


def measure(args: argparse.Namespace) -> int:
    """Seconds of a tile, of rank 0's work on a chunk, of the sound; into --times."""
    device, clip = torch.device(args.device), parse_shape(args.shape)
    torch.set_num_threads(1)
    times = {
        "what": "measured job times of one clip, seconds; random weights of the released size",
        "shape": args.shape,
        "tile": tile_seconds(device, args.batch, fast=args.fast),
        "batch": args.batch,
        "fast": args.fast,
        "chunk": chunk_seconds(clip, device),
        "sound": sound_seconds(clip, device),
        **_made(device),
    }
    text = json.dumps(times, indent=1)
    print(text)
    if args.times:
        args.times.write_text(text + "\n")
    return 0


def tile_seconds(device: torch.device, batch: int = 1, *, fast: bool = False) -> float:
    """One of the tiles of a call of the decoder; on a CPU extrapolated from its first layers."""
    latents = torch.randn(1, 24, 7, 16, 16, device=device)
    jobs = list(cut_video(7, 16, 16).jobs())[:1] * batch

    def seconds(layers: int) -> float:
        vae = random_video_vae(video_settings(decoder_num_layers=layers), device)
        if fast:
            vae = replace(vae, fast=FastDecoder.of(vae.parts, device))
        return _best(lambda: list(vae.decode_jobs(latents, jobs, batch)), device) / batch

    if device.type == "cuda":
        return seconds(LAYERS)
    one, two = seconds(1), seconds(2)
    return one + (LAYERS - 1) * (two - one)


def chunk_seconds(clip: Geometry, device: torch.device) -> float:
    """Rank 0's fading, colours and copy of a chunk whose tiles are there: of two chunks, so that they are faded too."""
    cuts = cut_video(12, clip.latent_h, clip.latent_w)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    tile = torch.randn(3, 22, cuts.rows.size, cuts.cols.size, device=device, dtype=dtype)
    count = len(list(cuts.jobs()))
    return _best(lambda: [len(frames) for frames in finish([tile] * count, cuts)], device) / 2


def sound_seconds(clip: Geometry, device: torch.device) -> float:
    """The sound of a clip; on a CPU from a part of it."""
    vae = random_audio_vae(device)
    heard = HEARD if device.type == "cpu" else clip.audio_latents
    latents = torch.randn(1, 32, 2, heard, device=device)
    return _best(lambda: vae.decode(latents), device) * clip.audio_latents / heard


def _best(work: Callable[[], Any], device: torch.device) -> float:
    """The least of REPEATS, after one that warms up."""
    found = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return min(found[1:])


# --- the schedule, played


def show_schedule(args: argparse.Namespace) -> int:
    """A table over ranks from job times, or unit costs: the plan's own schedule, played with those times."""
    clip = parse_shape(args.shape)
    times = json.loads(args.times.read_text()) if args.times else {"tile": 1.0, "chunk": 0.0, "sound": 0.0}
    extra = Extra(times["chunk"] / times["tile"], times["sound"] / times["tile"])
    how = args.device, extra, args.batch, args.fast
    cuts, one = played(clip, 1, *how)
    print(
        f"{args.shape}: {len(cuts.chunks)} chunks of {tiles_of(cuts)} tiles; in tiles: a chunk {extra.chunk:.3f}, the "
        f"sound {extra.sound:.3f} ({times.get('device', 'unit costs')})\n"
    )
    print("| ranks | makespan, tiles | speed-up | of ideal |\n|---|---|---|---|")
    gains = {ranks: one / played(clip, ranks, *how)[1] for ranks in COUNTS}
    for ranks, gain in gains.items():
        print(f"| {ranks} | {one / gain:.2f} | {gain:.2f} | {gain / ranks:.3f} |")
    return 0 if all(gain >= GOAL * ranks for ranks, gain in gains.items()) else 1


def played(clip: Geometry, ranks: int, device: str, extra: Extra, batch: int, fast: bool) -> tuple[Cuts, float]:
    """The makespan, in tiles; `batch` divides those of a chunk."""
    cuts, schedule = schedule_decode(clip, ranks, device, batch, fast=fast)
    return cuts, makespan(schedule, [[1.0] * tiles_of(cuts)] * len(cuts.chunks), extra)


def tiles_of(cuts: Cuts) -> int:
    """Tiles of a chunk."""
    return len(cuts.rows.starts) * len(cuts.cols.starts)


# --- real ranks


@dataclass(frozen=True)
class Small(Clean):
    """Latents with a small video VAE that is there already, and a sound that costs nothing."""

    vae: VideoVae | None = None

    def sound(self) -> Tensor:
        return torch.zeros(2, 800 * self.audio.shape[-1])

    def video_vae(self) -> VideoVae:
        assert self.vae is not None
        return self.vae


@dataclass
class Took:
    """What a number of ranks took, by the clock and of their processors, and the frames that they gave."""

    ranks: int
    frames: str
    seconds: list[float]
    cpu_seconds: list[float]  # of the rank that computed most: what other work on the machine hardly changes


def show_ranks(args: argparse.Namespace) -> int:
    """Wall time and frames of several numbers of ranks, scheduled by what a tile and a chunk take here."""
    torch.set_num_threads(1)
    clip, device = parse_shape(args.shape), torch.device("cpu")
    extra = Extra(chunk_seconds(clip, device) / small_tile_seconds(device), 0.0)
    counts = list(map(int, args.counts.split(",")))
    found = [take(ranks, args.shape, extra, args.repeats) for ranks in counts]
    told = {
        "shape": args.shape,
        "video_vae": SMALL,
        "chunk_in_tiles": extra.chunk,
        "rows": [row(took, found[0], clip, extra) for took in found],
        "frames_equal": len({took.frames for took in found}) == 1,
        "frames": found[0].frames,
        **_made(device),
    }
    text = json.dumps(told, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0 if told["frames_equal"] else 1


def row(took: Took, one: Took, clip: Geometry, extra: Extra) -> dict[str, Any]:
    """Measured beside what the schedule alone promises."""
    cuts, schedule = scheduled(clip, took.ranks, extra)
    costs = [[1.0] * tiles_of(cuts)] * len(cuts.chunks)
    promised = makespan(spread(costs, 1, extra), costs, extra) / makespan(schedule, costs, extra)
    gains = {
        "speed_up": round(min(one.seconds) / min(took.seconds), 3),
        "cpu_speed_up": round(min(one.cpu_seconds) / min(took.cpu_seconds), 3),
        "by_schedule": round(promised, 3),
    }
    return {"ranks": took.ranks, "seconds": took.seconds, "cpu_seconds": took.cpu_seconds, **gains}


def small_tile_seconds(device: torch.device) -> float:
    """A tile of the small VAE."""
    vae, job = random_video_vae(video_settings(**SMALL), device), next(cut_video(7, 16, 16).jobs())
    latents = torch.randn(1, 24, 7, 16, 16, device=device)
    return _best(lambda: vae.decode_job(latents, job), device)


def scheduled(clip: Geometry, ranks: int, extra: Extra) -> tuple[Cuts, Schedule]:
    """The cuts and a schedule by these costs."""
    cuts = cut_video(clip.latent_t, clip.latent_h, clip.latent_w)
    return cuts, spread([[1.0] * tiles_of(cuts)] * len(cuts.chunks), ranks, extra)


def take(ranks: int, shape: str, extra: Extra, repeats: int) -> Took:
    """Decode on that many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (ranks, shape, extra, repeats, folder), nprocs=ranks)
        return Took(**json.loads((Path(folder) / "took.json").read_text()))


def rank_main(rank: int, ranks: int, shape: str, extra: Extra, repeats: int, folder: str) -> None:
    """One rank: decodes the clip `repeats` times."""
    torch.set_num_threads(1)
    clip, device = parse_shape(shape), torch.device("cpu")
    torch.manual_seed(0)
    video = torch.randn(1, 24, clip.latent_t, clip.latent_h, clip.latent_w)
    audio = torch.randn(1, 32, 2, clip.audio_latents)
    clean = Small(video, audio, None, None, device, vae=random_video_vae(video_settings(**SMALL), device))
    store = dist.FileStore(f"{folder}/store", ranks) if ranks > 1 else None
    seconds, busy, parts = [], [], scheduled(clip, ranks, extra)
    with Comm.connect(Ranks(rank, rank, ranks, ranks), Layout(sp=ranks), device, store=store) as comm:
        for _ in range(repeats):
            comm.agree("ready")
            begun, computed = time.perf_counter(), time.process_time()
            frames = decode(clean, comm, *parts)
            mine = time.process_time() - computed
            busy.append(round(max(map(float, comm.collect("done", str(mine)))), 3))
            seconds.append(round(time.perf_counter() - begun, 3))
    if rank == 0:
        took = {"ranks": ranks, "seconds": seconds, "cpu_seconds": busy, "frames": frames}
        (Path(folder) / "took.json").write_text(json.dumps(took))


def decode(clean: Small, comm: Comm, cuts: Cuts, schedule: Schedule) -> str:
    """The SHA-256 of all frames, on rank 0."""
    if comm.rank:
        assist(clean, comm, cuts, schedule)
        return ""
    digest = hashlib.sha256()
    if schedule.ranks == 1:
        for chunk in clean.video_vae().decode(clean.video):
            digest.update(chunk.numpy())
        return digest.hexdigest()
    with decode_together(clean, comm, cuts, schedule) as decoded:
        for chunk in decoded.frames:
            digest.update(chunk.numpy())
    return digest.hexdigest()


def _made(device: torch.device) -> dict[str, Any]:
    """Where and when."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()}-core CPU, one thread"
    return {
        "device": name,
        "load": [round(value, 1) for value in os.getloadavg()],
        "torch": torch.__version__,
        "date": str(date.today()),
        "commit": commit(),
    }


if __name__ == "__main__":
    sys.exit(main())
