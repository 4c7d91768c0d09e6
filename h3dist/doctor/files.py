"""The task of a child: the model files, the folder of the output, the temporary folder. A dead disk hangs here."""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from h3dist.checkpoint.comfy import open_denoiser, open_text_encoder, open_vaes, released
from h3dist.config import Config, ModelConfig, compose
from h3dist.doctor.finding import Finding
from h3dist.errors import H3Error
from h3dist.geometry import Geometry
from h3dist.outputs import check_outputs, choose_outputs
from h3dist.text.tokenizer import count_tokens

USUAL, STEPS = Geometry(1344, 768, 124), 12  # what is made where nothing else is asked for
TEMPORARY_BYTES = 100 << 20  # logs and status files of a run
VARIABLES = {
    "denoiser": "H3_MODEL_PATH",
    "text_encoder": "H3_TEXT_ENCODER_PATH",
    "tokenizer": "H3_TOKENIZER_PATH",
    "video_vae": "H3_VIDEO_VAE_PATH",
    "audio_vae": "H3_AUDIO_VAE_PATH",
}


def files(*overrides: str) -> Iterator[dict[str, Any]]:
    """A finding for each model file, the output folder and the temporary folder of this configuration."""
    config = compose(overrides)
    for finding in (*checkpoints(config.model), *outputs(config), temporary()):
        yield {"finding": asdict(finding)}


def checkpoints(model: ModelConfig) -> Iterator[Finding]:
    """Whether each file's whole header is that of a model that fits its place. Reads no weights."""
    yield from _slot("denoiser", model, lambda: open_denoiser(model.denoiser, model.qkv_order).notes)
    yield from _slot("text_encoder", model, lambda: _open_text(model))
    yield from _slot("tokenizer", model, lambda: _count(model.tokenizer))
    absent = [name for name in ("video_vae", "audio_vae") if not Path(getattr(model, name)).is_file()]
    for name in absent:
        yield _missing(name, model)
    if not absent:
        yield from _slot("video_vae", model, lambda: _open_vaes(model))


def _slot(name: str, model: ModelConfig, opened: Callable[[], tuple[str, ...]]) -> Iterator[Finding]:
    if name != "tokenizer" and not Path(getattr(model, name)).is_file():
        yield _missing(name, model)
        return
    try:
        notes = opened()
    except H3Error as error:
        yield Finding("files", "error", f"model.{name}: {error}", _way_out(name))
        return
    good = "loads, and has MiniMax H3's tokens" if name == "tokenizer" else "its header is whole and fits"
    yield Finding("files", "ok", f"model.{name} {getattr(model, name)}: {good}")
    yield from (Finding("files", "note", f"model.{name}: {note}") for note in notes)


def _open_text(model: ModelConfig) -> tuple[str, ...]:
    return released(open_text_encoder(model.text_encoder, model.text_encoder_config), model.text_encoder_config).notes


def _open_vaes(model: ModelConfig) -> tuple[str, ...]:
    video, audio, notes = open_vaes(model)
    return (f"model.audio_vae fits too: {audio.file.path}", *notes, *video.notes, *audio.notes)


def _count(folder: str) -> tuple[str, ...]:
    count_tokens(folder, "A")
    return ()


def _missing(name: str, model: ModelConfig) -> Finding:
    return Finding("files", "error", f"model.{name}: there is no {getattr(model, name)}", _way_out(name))


def _way_out(name: str) -> str:
    return f"name another: export {VARIABLES[name]}=... or model.{name}=...; `h3dist inspect FILE` says what a file is"


def outputs(config: Config) -> Iterator[Finding]:
    """Whether a clip of the usual size can be written where the output goes."""
    output = config.output
    try:
        chosen = choose_outputs(
            output.path,
            latents=output.latents,
            intermediates=output.intermediates,
            trace=output.trace,
            clobber=output.clobber,
        )
        check_outputs(chosen, USUAL, STEPS)
    except H3Error as error:
        yield Finding("disk", "error", str(error), "name another file: -o FILE, output.path= or H3_OUTPUT_PATH")
        return
    folder = os.path.dirname(chosen.path)
    yield Finding("disk", "ok", f"outputs: {folder} can be written and has {_free(folder) / 1e9:.1f} GB free")


def temporary() -> Finding:
    """Whether the temporary folder takes a run's logs."""
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        return Finding("disk", "error", f"no temporary folder: {error.strerror}", "set TMPDIR to a folder to write in")
    free = _free(folder)
    if free < TEMPORARY_BYTES:
        what = f"temporary files: {folder} has {free / 1e6:.0f} MB free"
        return Finding("disk", "warning", what, "make room there, or set TMPDIR to another folder")
    return Finding("disk", "ok", f"temporary files: {folder} has {free / 1e9:.1f} GB free")


def _free(folder: str) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
