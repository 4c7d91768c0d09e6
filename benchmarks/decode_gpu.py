"""What makes decoding fast on one device: ours beside diffusers' own, and tiles done otherwise, in one process.

    python benchmarks/decode_gpu.py [--shape 1344x768x124] [--batches 1,2,4,8] [--repeats 3] [--json FILE]
    python benchmarks/decode_gpu.py --device cpu --tiny --no-compile       # does it run: a small VAE, some seconds

Random weights of the released size, shared by both. Whole clips: diffusers' AutoencoderKLMiniMaxH3.decode, ours until
frames are blended, ours until they are bytes on the host. Then all tiles of the clip as batches of several sizes (the
last one padded), in float16 and float32, channels last, compiled: seconds, against one tile a call, the largest
relative error of a tile against that, peak memory. A variant that fails is told as such and the others go on.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.random_vaes import TINY, random_video_vae, video_settings
from h3dist.bench.spec import parse_shape
from h3dist.provenance import commit, versions_of
from h3dist.tiles import HEAD, TAIL, Cuts, cut_video
from h3dist.vae import VideoVae
from h3dist.vae.blend import blend

TINY_SHAPE = "64x64x39"  # two tiles, small ones


@dataclass(frozen=True)
class Variant:
    """A way to do tiles."""

    batch: int = 1
    half: bool = True  # float16 autocast
    channels_last: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        parts = ("float16" if self.half else "float32",)
        parts += ("channels last",) * self.channels_last + ("compiled",) * self.compiled
        return f"batch {self.batch}, {', '.join(parts)}"


@dataclass(frozen=True)
class Row:
    """What one way took. `error` is relative, in the 2-norm, the largest of any tile looked at."""

    name: str
    seconds: float | None
    error: float | None
    peak_memory: int | None
    failed: str | None = None


def main(words: list[str] | None = None) -> int:
    """All ways, as a table and as JSON."""
    args = arguments(words)
    device = torch.device(args.device)
    torch.manual_seed(0)
    settings = video_settings(**(TINY if args.tiny else {}))
    vae = random_video_vae(settings, device)
    clip = parse_shape(TINY_SHAPE if args.tiny else args.shape)
    latents = torch.randn(1, 24, clip.latent_t, clip.latent_h, clip.latent_w, device=device)
    cuts = cut_video(*latents.shape[2:])
    rows = [
        *clips(vae, settings, latents, cuts, args.repeats),
        *tiles(vae, latents, cuts, variants(args), args.repeats),
    ]
    show(rows)
    if args.json:
        told = {"shape": args.shape, "tiny": args.tiny, "rows": [asdict(row) for row in rows], **made(device)}
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def arguments(words: list[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="1344x768x124")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def variants(args: argparse.Namespace) -> list[Variant]:
    """Each batch in the plain way, and the other ways at the smallest and at the largest."""
    batches = list(map(int, args.batches.split(",")))
    ends = sorted({batches[0], batches[-1]})
    found = [Variant(batch) for batch in batches] + [Variant(batch, half=False) for batch in ends]
    found += [Variant(batch, channels_last=True) for batch in ends]
    return found + [Variant(batch, compiled=True) for batch in batches] * args.compile


def clips(vae: VideoVae, settings: dict[str, Any], latents: Tensor, cuts: Cuts, repeats: int) -> Iterator[Row]:
    """Whole clips: theirs, and ours to frames and to bytes on the host."""
    restored = vae.statistics.restore(latents)
    theirs = diffusers_model(vae, settings)

    def ours() -> Tensor:
        return torch.cat(list(blend((vae.decode_job(restored, job) for job in cuts.jobs()), cuts)), dim=1)

    def of_diffusers() -> Tensor:
        with torch.no_grad(), vae._autocast():
            return theirs.decode(restored, return_dict=False)[0][0].float()

    wanted = ours()
    yield timed("diffusers, whole clip", of_diffusers, repeats, wanted)
    yield timed("ours, blended", ours, repeats, wanted)
    yield timed("ours, frames on the host", lambda: torch.cat(list(vae.decode(latents))), repeats, None)


def diffusers_model(vae: VideoVae, settings: dict[str, Any]) -> Any:
    """diffusers' model over the same decoder; its encoder stays without storage."""
    from diffusers import AutoencoderKLMiniMaxH3

    given = {name: value for name, value in settings.items() if not name.startswith("latents_")}
    with torch.device("meta"):
        model = AutoencoderKLMiniMaxH3(**given)
    model.decoder, model.post_quant_conv = vae.parts["decoder"], vae.parts["post_quant_conv"]
    return model.eval()


def tiles(vae: VideoVae, latents: Tensor, cuts: Cuts, ways: list[Variant], repeats: int) -> Iterator[Row]:
    """All tiles of the clip, as the ways do them."""
    restored = vae.statistics.restore(latents)
    stacked = torch.cat(
        [restored[:, :, list(job.latents), slice(*job.rows), slice(*job.cols)] for job in cuts.jobs()]
    )  # [tiles, 24, 7, y, x]
    wanted = decode_tiles(vae, stacked[:1], Variant(half=vae.device.type == "cuda"))
    for way in ways:
        yield timed(str(way), lambda way=way: decode_tiles(vae, stacked, way), repeats, wanted)


def decode_tiles(vae: VideoVae, stacked: Tensor, way: Variant) -> Tensor:
    """The first tile's frames, after all were decoded."""
    decoder, first = vae.parts["decoder"], vae.parts["post_quant_conv"]
    if way.compiled:
        decoder = compiled(decoder)
    kept = None
    autocast = torch.autocast(vae.device.type, torch.float16, enabled=way.half)
    weights = nullcontext() if way.half or vae.device.type == "cpu" else single_precision(vae)
    with torch.no_grad(), weights:
        for batch in stacked.split(way.batch):
            padded = torch.cat([batch, *[batch[-1:]] * (way.batch - len(batch))]).to(first.weight.dtype)
            if way.channels_last:
                padded = padded.contiguous(memory_format=torch.channels_last_3d)
            with autocast:
                raw = decoder(first(padded))
            kept = torch.cat([raw[0, :, HEAD], raw[0, :, TAIL]], dim=1) if kept is None else kept
    return kept.float()


@cache
def compiled(decoder: torch.nn.Module) -> Any:
    """The decoder compiled, once."""
    return torch.compile(decoder, dynamic=False)


@contextmanager
def single_precision(vae: VideoVae) -> Iterator[None]:
    """The decoder's weights as float32 while it lasts, then as they were."""
    kept = {name: parameter.data for name, parameter in vae.parts.named_parameters()}
    vae.parts.float()
    try:
        yield
    finally:
        for name, parameter in vae.parts.named_parameters():
            parameter.data = kept[name]


def timed(name: str, work: Callable[[], Tensor], repeats: int, wanted: Tensor | None) -> Row:
    """The least of `repeats` runs after one that warms up."""
    cuda = torch.cuda.is_available()
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        given = work()
        seconds = [clock(work) for _ in range(repeats)]
    except Exception as error:  # out of memory, no compiler: the other ways still count
        return Row(name, None, None, None, f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")
    error = None if wanted is None else ((given - wanted).norm() / wanted.norm()).item()
    return Row(name, min(seconds), error, torch.cuda.max_memory_allocated() if cuda else None)


def clock(work: Callable[[], Any]) -> float:
    """Seconds of one run."""
    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def show(rows: list[Row]) -> None:
    """A Markdown table."""
    plain = next((row.seconds for row in rows if row.name.startswith("batch 1") and row.seconds), None)
    print("| way | seconds | against one tile a call | relative error | peak memory |\n|---|---|---|---|---|")
    for row in rows:
        if row.seconds is None:
            print(f"| {row.name} | failed: {row.failed} | | | |")
            continue
        error = "" if row.error is None else f"{row.error:.1e}"
        memory = "" if row.peak_memory is None else f"{row.peak_memory / 1e9:.1f} GB"
        ratio = f"{plain / row.seconds:.2f}" if plain else ""
        print(f"| {row.name} | {row.seconds:.3f} | {ratio} | {error} | {memory} |")


def made(device: torch.device) -> dict[str, Any]:
    """Where and when."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "date": str(date.today()), "commit": commit(), **versions_of(("torch", "diffusers"))}


if __name__ == "__main__":
    sys.exit(main())
