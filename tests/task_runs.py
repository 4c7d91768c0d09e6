"""One request run twice, by this package's stages and by diffusers' pipeline, and how far the results part."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pipeline_oracle
import torch
from diffusers.modular_pipelines.minimax_h3.references import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from mediafiles import tone, write_film, write_sound
from PIL import Image
from torch import Tensor

from h3dist.geometry import Geometry
from h3dist.packing import rows_to_audio, unpatchify
from h3dist.request import absolute_media

GEOMETRY = Geometry(96, 64, 39)
STEPS, SEED = 2, 7
LAYOUTS = {"single": (1, 1), "ulysses 3": (3, 1), "tensor 4": (1, 4), "hybrid 2x2": (2, 2)}
IMAGE, VOICE, FILM = {"image": "subject.png"}, {"audio": "voice.wav"}, {"video": "motion.mkv"}
CASES = {
    "first": {"first_frame": "wide.png"},
    "last": {"last_frame": "tall.png"},
    "both": {"first_frame": "wide.png", "last_frame": "tall.png"},
    "image": {"references": [IMAGE]},
    "image and audio": {"references": [IMAGE, VOICE]},
    "video with sound": {"references": [FILM]},
    "all three": {"references": [VOICE, FILM, IMAGE]},
}


def write_media(folder: Path) -> None:
    """Pictures, a film with its sound, and a voice; nothing is of the size or the length that the model reads."""
    source = np.random.default_rng(5)
    for name, (width, height) in {"wide": (160, 90), "tall": (75, 100), "subject": (70, 50)}.items():
        pixels = source.integers(0, 256, (height // 5, width // 5, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{name}.png")
    film = [source.integers(0, 256, (96, 128, 3), dtype=np.uint8) for _ in range(53)]
    write_film(folder / "motion.mkv", film, sound=tone(53 / 24, hertz=330.0))
    write_sound(folder / "voice.wav", tone(0.7, 44100, 1), 44100, "pcm_s16le")


def prompt(media: dict[str, Any]) -> str:
    names = {"image": "<Picture 1>", "audio": "<Audio 1>", "video": "<Video 1>"}
    told = [names[kind] for item in media.get("references", ()) for kind in item if kind in names] or ["A woman"]
    return f"{' and '.join(told)} by a rain-streaked window, <d>Hello.</d>"


def official(parts: SimpleNamespace, media: dict[str, Any], folder: Path) -> pipeline_oracle.Official:
    """diffusers' pipeline on the same request."""
    given = {"width": GEOMETRY.width, "height": GEOMETRY.height, "num_frames": GEOMETRY.frames}
    given |= {"prompt": prompt(media), "steps": STEPS, "seed": SEED}
    if "references" in media:
        references = [_reference(item, folder) for item in media["references"]]
        return pipeline_oracle.run(parts, "ref2va", references=references, **given)
    names = {"first_frame": "image", "last_frame": "last_image"}
    return pipeline_oracle.run(
        parts, "fl2va", **{names[key]: Image.open(folder / media[key]) for key in media}, **given
    )


def _reference(item: dict[str, str], folder: Path) -> Any:
    """One of diffusers' references, with media as this package decodes them."""
    from h3dist.media import read_film, read_sound

    if "image" in item:
        return MiniMaxH3ImageReference(Image.open(folder / item["image"]))
    if "audio" in item:
        return MiniMaxH3AudioReference(torch.from_numpy(read_sound(str(folder / item["audio"]))))
    film = read_film(str(folder / item["video"]))
    return MiniMaxH3VideoReference(film.frames, audio=torch.from_numpy(film.sound))


def overrides_of(paths: dict[str, Path], *more: str) -> list[str]:
    text = paths["overrides"].read_text().replace("@", str(paths["denoiser"].parent))
    return [*filter(None, text.split("\n")), *more]


def fields_of(media: dict[str, Any], folder: Path) -> dict[str, Any]:
    sizes = {"width": GEOMETRY.width, "height": GEOMETRY.height, "frames": GEOMETRY.frames}
    return {"prompt": prompt(media), **sizes, "steps": STEPS, "seed": SEED, **absolute_media(media, folder)}


def keep_settings(monkeypatch: Any) -> None:
    """Has `monkeypatch` restore what `run_stages` changes."""
    from h3dist import fitting, pipeline

    for name in pipeline_oracle.SMALL:
        monkeypatch.setattr(fitting, name, getattr(fitting, name))
    monkeypatch.setattr(pipeline, "all_cores", pipeline.all_cores)


def run_stages(
    seat: Any, overrides: list[str], fields: dict[str, Any], sp: int = 1, tp: int = 1, device: str = "cpu"
) -> dict[str, Any]:
    """The pipeline's own stages on one rank: its latents, and on rank 0 what led to them."""
    from h3dist import fitting, pipeline
    from h3dist.checkpoint.comfy import open_denoiser
    from h3dist.config import compose
    from h3dist.outputs import choose_outputs
    from h3dist.plan import Layout
    from h3dist.site import Site
    from h3dist.topology import Ranks

    for name, value in pipeline_oracle.SMALL.items():
        setattr(fitting, name, value)
    pipeline.all_cores = nullcontext  # threads that wait for a busy core only burn it
    config = compose(overrides)
    ranks = Ranks(seat.rank, seat.rank, seat.world, seat.world)
    outputs = choose_outputs(path="/tmp/unused.mp4", trace="/tmp/unused.safetensors") if seat.rank == 0 else None
    comm = seat.connect(Layout(sp=sp, tp=tp), device=device, timeout=100, stage_timeout=100)
    site = Site(config, ranks, torch.device(device), comm, outputs)
    dfile = open_denoiser(config.model.denoiser)
    started = pipeline.start(site, {"request": fields}, dfile)
    prepared = pipeline.prepare(site, started)
    states_Lt = None if seat.rank else prepared.states_Lt.clone()
    denoised = pipeline.denoise(site, pipeline.pack(prepared, site))
    share = started.plan.shares[seat.rank]
    assert comm.counted == share.sent, "bytes sent are those of the plan"
    assert dfile.file.bytes_read == share.file_bytes, "bytes read are those of the plan"
    latents = {"video": denoised.video.cpu(), "audio": denoised.audio.cpu()}
    if states_Lt is None:
        return latents
    assert torch.equal(prepared.states_Lt, states_Lt), "nothing writes over what was made"
    kept = {kind: rows.cpu() for kind, rows in prepared.kept.items()}
    tags = denoised.packed.packing.token_tags[: started.plan.text_rows]
    return latents | {"trace": denoised.trace, "states": prepared.states_Lt.cpu(), "kept": kept, "tags": tags}


def latent_errors(found: dict[str, Any], wanted: pipeline_oracle.Official) -> dict[str, float]:
    """Relative errors of the text states and of both streams after every step."""
    errors = {"states": error(found["states"], wanted.states)}
    for step, (video, audio) in enumerate(zip(wanted.video_rows, wanted.audio_rows, strict=True)):
        trace = {stream: found["trace"][f"step.{step + 1:03d}.{stream}_latents"] for stream in ("video", "audio")}
        errors[f"video {step + 1}"] = error(trace["video"], unpatchify(video, GEOMETRY))
        errors[f"audio {step + 1}"] = error(trace["audio"], rows_to_audio(audio))
    return errors


def output_errors(
    paths: dict[str, Path], found: dict[str, Any], wanted: pipeline_oracle.Official, device: str = "cpu"
) -> dict[str, float]:
    """Relative errors of frames in [0, 1], before they are rounded to levels, and of the sound; decoded on `device`."""
    from h3dist.tiles import cut_video
    from h3dist.vae.blend import blend
    from h3dist.vae.frames import PIXEL_MEAN, PIXEL_STD

    files = (str(paths[f"{kind}_vae{end}"]) for kind in ("video", "audio") for end in ("", "_config"))
    vae, audio_vae = decoders(device, *files)
    latents, cuts = vae.statistics.restore(found["video"].to(device)), cut_video(*found["video"].shape[2:])
    raw = torch.cat(list(blend((vae.decode_job(latents, job) for job in cuts.jobs()), cuts)), dim=1).cpu()
    mean, std = (torch.tensor(values).view(3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    frames = (raw * std + mean).clamp(0, 1).transpose(0, 1)
    sound = audio_vae.decode(found["audio"].to(device)).cpu()
    return {"frames": error(frames, wanted.frames), "sound": error(sound, wanted.sound)}


@cache
def decoders(device: str, video: str, video_config: str, audio: str, audio_config: str) -> tuple[Any, Any]:
    """Both VAEs, read once for all runs over them."""
    from h3dist.checkpoint.comfy import open_audio_vae, open_video_vae
    from h3dist.vae import AudioVae, VideoVae

    return (
        VideoVae.load(open_video_vae(video), video_config, device),
        AudioVae.load(open_audio_vae(audio), audio_config, device),
    )


def error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| in the 2-norm."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
