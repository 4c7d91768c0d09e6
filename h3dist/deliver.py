"""The last stage, on rank 0: latents to frames and sound, and every file of the run written whole, then renamed.

Shape letters: T h w latent frames, height and width; A audio latents a channel; F frames, H W pixels, N samples.
"""

import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h3dist.checkpoint.comfy import StateFile, open_vaes
from h3dist.config import Config, as_override
from h3dist.errors import OutputError, RequestError
from h3dist.geometry import AUDIO_CHANNELS, SOUND_CHANNELS, VIDEO_CHANNELS
from h3dist.media import write_mp4, write_wav
from h3dist.outputs import Outputs, check_outputs, choose_outputs, claimed, refuse_inputs
from h3dist.plan import Plan
from h3dist.request import Resolved, parse_request, resolve
from h3dist.saved import latents, load_latents, save_tensors, sha256
from h3dist.sidecar import RankReport, describe_run, write_sidecar
from h3dist.site import all_cores, pick_device
from h3dist.topology import Ranks
from h3dist.vae import AudioVae, VideoVae


@dataclass(frozen=True)
class Delivery:
    """Clean latents video [1, 24, T, h, w] and audio [1, 32, 2, A], the VAEs' files, and what to tell of the run."""

    resolved: Resolved
    video_vae: StateFile
    audio_vae: StateFile
    video: Tensor
    audio: Tensor
    plan: Plan | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: tuple[float, ...] = ()
    trace: Mapping[str, Tensor] = field(default_factory=dict)
    conditioning: Mapping[str, Tensor] = field(default_factory=dict)


def deliver(
    config: Config,
    device: torch.device,
    outputs: Outputs,
    given: Delivery,
    reports: Sequence[RankReport] = (),
) -> None:
    """Decode, mux, write, rename. Where that fails, the latents stay as NAME.latents.safetensors.

    Raises `OutputError`, `NumericsError` and what the VAEs raise.
    """
    begun = time.perf_counter()
    try:
        save_asked(outputs, given)
        with all_cores():
            write_clip(config, device, outputs, given)
        seconds = {**given.seconds, "decode": time.perf_counter() - begun}
        with outputs.writing("sidecar") as part:
            write_sidecar(part, tell(config, given, reports, seconds))
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


def write_clip(config: Config, device: torch.device, outputs: Outputs, given: Delivery) -> None:
    """Frames into the MP4 as they are decoded, with the sound; the WAV and the intermediates where asked for."""
    resolved = given.resolved
    sound_2N = AudioVae.load(given.audio_vae, config.model.audio_vae_config, device).decode(given.audio)
    vae = VideoVae.load(given.video_vae, config.model.video_vae_config, device)
    kept: list[Tensor] | None = [] if outputs.intermediates else None
    with outputs.writing("path") as part:
        write_mp4(
            part,
            keeping(vae.decode(given.video), kept),
            sound_2N if resolved.mux_audio else None,
            width=resolved.width,
            height=resolved.height,
            frames=resolved.frames,
            metadata={"title": resolved.prompt, "comment": f"h3dist, seed {resolved.seed}"},
        )
    if outputs.sound:
        with outputs.writing("sound") as part:
            write_wav(part, sound_2N, frames=resolved.frames)
    if kept is not None:
        decoded = {"frames": torch.cat(kept), "audio": sound_2N}
        tensors = {**given.conditioning, **latents(given.video, given.audio), **decoded}
        with outputs.writing("intermediates") as part:
            save_tensors(part, tensors, resolved.as_request())


def keeping(chunks: Iterable[Tensor], kept: list[Tensor] | None) -> Iterator[Tensor]:
    """The same chunks, each also put into `kept`."""
    for chunk in chunks:
        if kept is not None:
            kept.append(chunk)
        yield chunk


def tell(
    config: Config, given: Delivery, reports: Sequence[RankReport], seconds: Mapping[str, float]
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
    with claimed(outputs.targets().values()):
        deliver(config, device, outputs, Delivery(resolved, video_vae, audio_vae, video, audio))
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
