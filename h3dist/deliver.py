"""The last stage, on rank 0: latents to frames and sound, and every file of the run written whole, then renamed.

Shape letters: T h w latent frames, height and width; A audio latents a channel; F frames, H W pixels, N samples.
"""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h3dist.checkpoint.comfy import open_vaes
from h3dist.config import Config, as_override
from h3dist.decoding import Clean, Decoded, Vaes, decode_alone
from h3dist.errors import OutputError, RequestError
from h3dist.geometry import AUDIO_CHANNELS, SOUND_CHANNELS, VIDEO_CHANNELS
from h3dist.media import write_behind, write_mp4, write_wav
from h3dist.outputs import Outputs, check_outputs, choose_outputs, claimed, refuse_inputs
from h3dist.plan import Plan, ask_decode, choose_products
from h3dist.preflight import fast_decoder
from h3dist.progress import Steps
from h3dist.records import Denoised
from h3dist.request import Resolved, parse_request, resolve
from h3dist.saved import latents, load_latents, save_tensors, sha256
from h3dist.sidecar import RankReport, describe_run, write_sidecar
from h3dist.site import Site, pick_device
from h3dist.tiles import cut_time
from h3dist.topology import Ranks


@dataclass(frozen=True)
class Delivery:
    """Clean latents video [1, 24, T, h, w] and audio [1, 32, 2, A], and what to tell of the run."""

    resolved: Resolved
    video: Tensor
    audio: Tensor
    plan: Plan | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: tuple[float, ...] = ()
    trace: Mapping[str, Tensor] = field(default_factory=dict)
    conditioning: Mapping[str, Tensor] = field(default_factory=dict)


def delivery(site: Site, denoised: Denoised) -> Delivery:
    """What rank 0 makes files of."""
    prepared, packing = denoised.packed.prepared, denoised.packed.packing
    assert prepared.states_Lt is not None
    rows = {f"condition_{kind.removeprefix('kept ')}_rows": held for kind, held in prepared.kept.items()}
    return Delivery(
        resolved=prepared.started.resolved,
        plan=prepared.started.plan,
        video=denoised.video,
        audio=denoised.audio,
        seconds=dict(site.seconds),
        step_seconds=denoised.step_seconds,
        trace=denoised.trace,
        conditioning={
            "text_states": prepared.states_Lt,
            "text_tags": packing.token_tags[: packing.text_rows],
            "position_ids": packing.position_ids,
            "token_tags": packing.token_tags,
            **rows,
        },
    )


def deliver(
    config: Config,
    outputs: Outputs,
    given: Delivery,
    decode: Callable[[], AbstractContextManager[Decoded]],
    reports: Callable[[], Sequence[RankReport]] = tuple,
) -> None:
    """Decode, mux, write, rename. Where that fails, the latents stay as NAME.latents.safetensors.

    `decode` begins to decode `given`, `reports` asks all ranks for theirs once that is done. Raises `OutputError`,
    `NumericsError` and what the VAEs and other ranks raise.
    """
    begun = time.perf_counter()
    try:
        save_asked(outputs, given)
        chunk_seconds = write_clip(outputs, given, decode)
        seconds = {**given.seconds, "decode": time.perf_counter() - begun}
        told = tell(config, given, reports(), seconds, chunk_seconds)
        with outputs.writing("sidecar") as part:
            write_sidecar(part, told)
        publish(outputs)
    except Exception:
        outputs.discard()  # before the latents are kept: the disk may be full of what failed
        if outputs.rescue:
            rescue(config, outputs, given)
        raise
    finally:
        outputs.discard()


def save_asked(outputs: Outputs, given: Delivery) -> None:
    """The latents and the trace that were asked for, before anything is decoded."""
    request, final = given.resolved.as_request(), latents(given.video, given.audio)
    if outputs.latents:
        with outputs.writing("latents") as part:
            save_tensors(part, final, request)
    if outputs.trace:
        with outputs.writing("trace") as part:
            save_tensors(part, {**given.trace, **final}, request)


def write_clip(
    outputs: Outputs, given: Delivery, decode: Callable[[], AbstractContextManager[Decoded]]
) -> tuple[float, ...]:
    """Frames into the MP4 as they are decoded, with the sound; the WAV and the intermediates where asked for.

    Gives the seconds of each chunk. The next is decoded while one is encoded.
    """
    kept: list[Tensor] | None = [] if outputs.intermediates else None
    chunks = len(cut_time(given.video.shape[2]))
    with outputs.writing("path") as part, decode() as decoded:
        sound_2N = decoded.sound_2N
        with Steps(chunks, shown=True, stage="decode", step="chunk", spent=decoded.spent) as steps:
            write_behind(partial(film, part, given.resolved, sound_2N), noting(decoded.frames, steps, kept))
    if outputs.sound:
        with outputs.writing("sound") as part:
            write_wav(part, sound_2N, frames=given.resolved.frames)
    if kept is not None:
        tensors = {**given.conditioning, **latents(given.video, given.audio)}
        with outputs.writing("intermediates") as part:
            save_tensors(part, {**tensors, "frames": torch.cat(kept), "audio": sound_2N}, given.resolved.as_request())
    return tuple(steps.seconds)


def film(path: Path | str, resolved: Resolved, sound_2N: Tensor, chunks: Iterable[Tensor]) -> None:
    """The MP4 of a request at `path`."""
    write_mp4(
        path,
        chunks,
        sound_2N if resolved.mux_audio else None,
        width=resolved.width,
        height=resolved.height,
        frames=resolved.frames,
        metadata={"title": resolved.prompt, "comment": f"h3dist, seed {resolved.seed}"},
    )


def noting(chunks: Iterable[Tensor], steps: Steps, kept: list[Tensor] | None) -> Iterator[Tensor]:
    """The same chunks, each told as progress and also put into `kept`."""
    for chunk in chunks:
        steps.advance()
        if kept is not None:
            kept.append(chunk)
        yield chunk


def tell(
    config: Config,
    given: Delivery,
    reports: Sequence[RankReport],
    seconds: Mapping[str, float],
    chunk_seconds: Sequence[float],
) -> dict[str, object]:
    """The sidecar's content."""
    hashes = {"video_latents": sha256(given.video), "audio_latents": sha256(given.audio)}
    return describe_run(
        config,
        given.resolved,
        given.plan,
        reports,
        seconds=seconds,
        step_seconds=given.step_seconds,
        chunk_seconds=chunk_seconds,
        sha256=hashes,
    )


def publish(outputs: Outputs) -> None:
    """Rename every finished file, the clip last. Raises `OutputError`."""
    for role in sorted(outputs.targets(), key=lambda role: role == "path"):
        if role != "rescue":
            outputs.publish(role)


def rescue(config: Config, outputs: Outputs, given: Delivery) -> None:
    """Keep the latents of a run that failed after denoising, and say so; the first error stands."""
    try:
        with outputs.writing("rescue") as part:
            save_tensors(part, latents(given.video, given.audio), given.resolved.as_request())
        outputs.publish("rescue")
    except OutputError as error:
        told = f"the latents could not be kept: {error}"
    else:
        words = shlex.join(["h3dist", "decode", str(outputs.rescue), *_decoders(config)])
        told = f"the latents are kept; this goes on from them: {words}"
    print(f"h3dist: {told}", file=sys.stderr, flush=True)


def _decoders(config: Config) -> list[str]:
    """Overrides that name what a decode reads."""
    names = ("video_vae", "audio_vae", "video_vae_config", "audio_vae_config")
    said = {name: getattr(config.model, name) for name in names}
    device = [] if config.runtime.device == "auto" else [f"runtime.device={config.runtime.device}"]
    device += [] if config.decode.fast == "auto" else [f"decode.fast={config.decode.fast}"]
    device += [] if config.decode.gemm == "auto" else [f"decode.gemm={config.decode.gemm}"]
    device += [] if config.decode.batch is None else [f"decode.batch={config.decode.batch}"]
    return device + [as_override(f"model.{name}", os.path.abspath(path)) for name, path in said.items() if path]


def decode_file(config: Config, path: Path, output: Mapping[str, Any]) -> str:
    """Finish a run from its saved latents: decode and mux them. Gives the MP4's path.

    `output` names the files as for a run; without a path the MP4 stands beside the latents. Raises
    `RequestError`, `CheckpointError`, `OutputError` and `NumericsError`.
    """
    found, request = load_latents(path)
    resolved = resolve(parse_request(request), allow_untrained=True, schedule="simple")  # any number of steps
    _check_shapes(path, found, resolved)
    said = vars(config.output) | {name: value for name, value in output.items() if value is not None}
    if output.get("path") is None:
        said["path"] = str(path).removesuffix(".safetensors").removesuffix(".latents") + ".mp4"
    outputs = choose_outputs(**said, mux_audio=resolved.mux_audio, rescue=False)
    refuse_inputs(outputs, [str(path), *vars(config.model).values()])
    check_outputs(outputs, resolved.geometry, resolved.steps)
    video_vae, audio_vae, _ = open_vaes(config.model)
    device = pick_device(config, Ranks())
    video, audio = (found[name].to(device) for name in ("video_latents", "audio_latents"))
    fast = fast_decoder(config, device.type)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    gemm = choose_products(config.decode.gemm, fast, capability)
    how = ask_decode("rank0", device.type, fast, config.decode.batch, resolved.geometry, gemm)
    clean = Clean(video, audio, Vaes(video_vae, audio_vae), config.model, device, how.fast, how.batch, how.gemm)
    with claimed(outputs.targets().values()):
        deliver(config, outputs, Delivery(resolved, video, audio), partial(decode_alone, clean))
    return outputs.path


def _check_shapes(path: Path, found: Mapping[str, Tensor], resolved: Resolved) -> None:
    """Raise `RequestError` where latents are not of the size that their own request says."""
    clip = resolved.geometry
    due = {
        "video_latents": [1, VIDEO_CHANNELS, clip.latent_t, clip.latent_h, clip.latent_w],
        "audio_latents": [1, AUDIO_CHANNELS, SOUND_CHANNELS, clip.audio_latents],
    }
    for name, shape in due.items():
        if list(found[name].shape) != shape:
            raise RequestError(
                f"{path}: {name} are {list(found[name].shape)}; its request, {clip.width}x{clip.height} pixels and "
                f"{clip.frames} frames, has {shape}"
            )
