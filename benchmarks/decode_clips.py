"""Whole clips: by diffusers' AutoencoderKLMiniMaxH3.decode, by the block of its pipeline, from latents to pictures on
the host, and by ours, from latents to bytes on the host.

All share one decoder's weights. How far frames are from those of the first row is told in levels of 255.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.decode_rows import Row, clock, forget_peak, peak, told
from benchmarks.decode_ways import autocast
from h3dist.tiles import cut_video, even_batch
from h3dist.vae import VideoVae
from h3dist.vae.fast import FastDecoder
from h3dist.vae.frames import to_levels

Work = Callable[[], Any]  # frames raw [3, F, H, W], or u8 [f, H, W, 3] by chunks, or pictures


def clips(
    vae: VideoVae,
    settings: dict[str, Any],
    latents: Tensor,
    calls: list[int],
    repeats: int,
    *,
    plain: bool = False,
    flash4: bool = False,
) -> Iterator[Row]:
    """diffusers' under autocast, then ours fast, by exact and by FP8 products, for each number of tiles a call, then
    diffusers' as a pipeline.

    `flash4`: then ours with attention by flash-attn-4 too. `plain`: then diffusers' as its pipelines call it, and ours
    in its modules.
    """
    wanted = None
    for name, work in all_works(vae, settings, latents, calls, plain=plain, flash4=flash4):
        row, frames = clip_row(name, work, repeats, wanted)
        wanted = frames if wanted is None else wanted
        yield row


def all_works(
    vae: VideoVae, settings: dict[str, Any], latents: Tensor, calls: list[int], *, plain: bool, flash4: bool
) -> Iterator[tuple[str, Work]]:
    """Each with its name. What makes a fast decoder may fail, and is a row of its own then."""
    restored, theirs = vae.statistics.restore(latents), diffusers_model(vae, settings)
    count = cut_video(*latents.shape[2:]).tiles

    def of_diffusers(cast: bool) -> Tensor:
        with torch.no_grad(), autocast(vae, cast):
            return theirs.decode(restored, return_dict=False)[0][0]

    @cache
    def quick(gemm: str) -> VideoVae:
        return replace(vae, fast=FastDecoder.of(vae.parts, vae.device, gemm))

    def of_ours(gemm: str, batch: int, attention: str | None) -> list[Tensor]:
        made = quick(gemm)
        return list(replace(made, fast=partial(made.fast, attention=attention)).decode(latents, batch))

    yield "diffusers, autocast", lambda: of_diffusers(True)
    batches = dict.fromkeys(even_batch(count, most) for most in calls)
    for attention, gemm, batch in product((None, *["flash4"] * flash4), ("exact", "fp8"), batches):
        name = ", ".join(["ours, fast", gemm, *[attention] * bool(attention), f"batch {batch}"])
        yield name, partial(of_ours, gemm, batch, attention)
    yield "diffusers, its pipeline's block", partial(decode_step, theirs, restored)
    if plain:
        yield "diffusers, no autocast", lambda: of_diffusers(False)
        yield "ours, plain", lambda: list(vae.decode(latents))


def diffusers_model(vae: VideoVae, settings: dict[str, Any]) -> Any:
    """diffusers' model over the same decoder; its encoder stays without storage."""
    from diffusers import AutoencoderKLMiniMaxH3

    given = {name: value for name, value in settings.items() if not name.startswith("latents_")}
    with torch.device("meta"):
        model = AutoencoderKLMiniMaxH3(**given)
    model.decoder, model.post_quant_conv = vae.parts["decoder"], vae.parts["post_quant_conv"]
    return model.eval()


def decode_step(model: Any, latents: Tensor) -> list[Any]:
    """The pictures that the decoding block of diffusers' pipeline gives, by its default."""
    from diffusers.modular_pipelines import PipelineState
    from diffusers.modular_pipelines.minimax_h3 import decoders, modular_pipeline
    from diffusers.video_processor import VideoProcessor

    pipeline = modular_pipeline.MiniMaxH3ModularPipeline
    colours = {name: getattr(pipeline, name).fget(None) for name in ("pixel_mean", "pixel_std")}
    processor = VideoProcessor(vae_scale_factor=16, do_normalize=False)  # as the block's own specification has it
    parts = SimpleNamespace(vae=model, video_processor=processor, _execution_device=latents.device, **colours)
    state = PipelineState()
    state.set("latents", latents)  # the model's own mean and deviation are 0 and 1: they are restored already
    state.set("output_type", "pil")
    _, state = decoders.MiniMaxH3VideoDecodeStep()(parts, state)
    return state.get("videos")[0]


def as_frames(given: Any) -> Tensor:
    """u8 [F, H, W, 3] on the host, of raw frames [3, F, H, W], of chunks of bytes, or of pictures."""
    if isinstance(given, Tensor):
        return to_levels(given.float()).cpu()
    return torch.cat(
        [chunk if isinstance(chunk, Tensor) else torch.from_numpy(np.array(chunk))[None] for chunk in given]
    )


def clip_row(name: str, work: Work, repeats: int, wanted: Tensor | None) -> tuple[Row, Tensor | None]:
    """`repeats` whole clips after a first one, and the frames u8 [F, H, W, 3] of that, on the host."""
    try:
        forget_peak()
        kept: list[Any] = []
        first, memory = clock(lambda: kept.append(work())), peak()
        frames = as_frames(kept.pop())
        error, mean, worst = (None, None, None) if wanted is None else apart(frames, wanted)
        runs = tuple(clock(lambda: work() is None) for _ in range(repeats))
        equal = None if wanted is None else worst == 0
        return Row(name, "clip", median(runs), error, equal, first, memory, None, mean, worst, runs), frames
    except Exception as failure:
        return Row(name, "clip", failed=told(failure)), None


def apart(found: Tensor, wanted: Tensor) -> tuple[float, float, int]:
    """Of bytes [F, H, W, 3]: the relative error in the 2-norm, the mean and the largest difference.

    Frame by frame, on a GPU where there is one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    total, worst = torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), device=device)
    for pair in zip(found, wanted, strict=True):
        one, other = (frame.to(device).float() for frame in pair)
        off = (one - other).abs()
        squares += torch.stack([off.square().sum(), other.square().sum()])
        total += off.sum()
        worst = worst.maximum(off.max())
    return (squares[0] / squares[1]).sqrt().item(), total.item() / wanted.numel(), int(worst.item())
