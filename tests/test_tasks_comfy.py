"""Contract "comfy" from a request to the denoiser's rows, against the formulas of the Comfy convention for H3."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pipeline_oracle
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from PIL import Image
from safetensors.torch import load_file
from stages import prepare_run
from task_runs import SEED, fields_of, keep_settings, overrides_of, run_stages, write_media
from torch import Tensor
from world import Seat

from h3dist import fitting, pipeline
from h3dist.checkpoint.comfy import open_audio_vae, open_video_vae
from h3dist.checkpoint.tiny import write_tiny
from h3dist.checkpoint.vae_names import audio_state, video_state
from h3dist.media import read_film, read_sound
from h3dist.text.tokenizer import load_tokenizer, tokenize
from h3dist.topology import Ranks

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    keep_settings(monkeypatch)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("comfy")
    write_media(folder)
    paths = write_tiny(folder / "models")
    video, audio = open_video_vae(paths["video_vae"]), open_audio_vae(paths["audio_vae"])
    return SimpleNamespace(
        folder=folder,
        paths=paths,
        tokenizer=load_tokenizer(str(paths["tokenizer"])),
        vae=pipeline_oracle.vae(AutoencoderKLMiniMaxH3, video_state(video), paths["video_vae_config"]),
        audio_vae=pipeline_oracle.vae(AutoencoderKLMiniMaxH3Audio, audio_state(audio), paths["audio_vae_config"]),
    )


def run(tiny: SimpleNamespace, **media: object) -> dict:
    seat = Seat(0, 1, None)
    with seat.stack:
        return run_stages(seat, overrides_of(tiny.paths, "sampler=beta_res"), fields_of(media, tiny.folder))


def picture_rows(tiny: SimpleNamespace, frames: list[Image.Image]) -> Tensor:
    """Rows of a visual condition: the posterior's mean, normalised, 0.999 of it and 0.001 of the seed's noise."""
    levels = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1, 1) for values in IMAGENET)
    posterior = tiny.vae.encode((levels.permute(3, 0, 1, 2)[None] / 255 - mean) / std).latent_dist
    config = tiny.vae.config
    shift, scale = (torch.tensor(config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    latents = ((posterior.mean - shift) / scale)[0]  # [c, t, h, w]
    c, t, h, w = latents.shape
    rows = latents.view(c, t, h // 2, 2, w // 2, 2).permute(1, 2, 4, 0, 3, 5).reshape(-1, 4 * c)
    return 0.999 * rows + 0.001 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(SEED))


def sound_rows(tiny: SimpleNamespace, sound: np.ndarray) -> Tensor:
    """Rows of a sound: the posterior's mean, normalised and clean, the left channel's first."""
    config = tiny.audio_vae.config
    shift, scale = (torch.tensor(config[key]) for key in ("latents_mean", "latents_std"))
    latents = tiny.audio_vae.encode(torch.from_numpy(sound)[:, None]).latent_dist.mode()  # [2, 32, A]
    return ((latents.transpose(1, 2) - shift) / scale).flatten(0, 1)


def covering(picture: Image.Image) -> Image.Image:
    """On 96 x 64: scaled to cover it, cropped at the centre."""
    scale = max(96 / picture.width, 64 / picture.height)
    width, height = round(picture.width * scale), round(picture.height * scale)
    left, top = (width - 96) // 2, (height - 64) // 2
    resized = picture.resize((width, height), Image.Resampling.LANCZOS)
    return resized.crop((left, top, left + 96, top + 64))


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_keyframes(tiny: SimpleNamespace) -> None:
    """First stretched, last covering, between them a guide of 5 frames with its sound; noise of one seed for each."""
    media = {
        "first_frame": "wide.png",
        "last_frame": "tall.png",
        "keyframes": [{"image": "subject.png", "frame": 17}],
    }
    found = run(tiny, **media)
    wide, tall, subject = (Image.open(tiny.folder / f"{name}.png") for name in ("wide", "tall", "subject"))
    frames = wide.resize((96, 64), Image.Resampling.LANCZOS), covering(subject), covering(tall)
    near(found["kept"]["kept video"], torch.cat([picture_rows(tiny, [frame]) for frame in frames]))
    assert found["kept"].keys() == {"kept video"}
    tags: list[int] = []
    for number in (1, 2, 3):
        label = len(tokenize(tiny.tokenizer, f"<Picture {number}>: "))
        tags += [1] * label + [0] * (1 + 3 * 2 + 1)  # the block's ends are tagged as video too
    assert found["tags"].tolist()[: len(tags)] == tags
    assert set(found["tags"].tolist()[len(tags) :]) == {1}


def test_a_guide_of_many_frames(tiny: SimpleNamespace) -> None:
    film = read_film(str(tiny.folder / "motion.mkv"))
    short = tiny.folder / "guide.mkv"
    from mediafiles import tone, write_film

    write_film(short, list(film.frames[:24]), sound=tone(1.0))
    found = run(tiny, keyframes=[{"video": "guide.mkv", "frame": 10}])
    guide = read_film(str(short))
    near(found["kept"]["kept video"], picture_rows(tiny, [covering(Image.fromarray(f)) for f in guide.frames[:22]]))
    near(found["kept"]["kept audio"], sound_rows(tiny, guide.sound[:, : 22 * 32000 // 24]))
    assert set(found["tags"].tolist()) == {1}  # the text encoder is not shown guides


def test_references(tiny: SimpleNamespace) -> None:
    """A picture no larger than the canvas, a film of its own size rounded to 32, a sound; each cut to the clip."""
    found = run(tiny, references=[{"video": "motion.mkv"}, {"image": "subject.png"}, {"audio": "voice.wav"}])
    film, subject = read_film(str(tiny.folder / "motion.mkv")), Image.open(tiny.folder / "subject.png")
    scale = min(1.0, (96 * 64 / (subject.width * subject.height)) ** 0.5)
    width, height = (max(32, round(side * scale / 32) * 32) for side in subject.size)
    canvas = fitting.video_reference_size((128, 96), "comfy")
    frames = [Image.fromarray(frame).resize(canvas, Image.Resampling.LANCZOS) for frame in film.frames[:39]]
    pictures = [
        picture_rows(tiny, frames),
        picture_rows(tiny, [subject.resize((width, height), Image.Resampling.LANCZOS)]),
    ]
    near(found["kept"]["kept video"], torch.cat(pictures))
    voice = read_sound(str(tiny.folder / "voice.wav"))
    near(found["kept"]["kept audio"], torch.cat([sound_rows(tiny, film.sound[:, :52000]), sound_rows(tiny, voice)]))


def test_a_runs_intermediates_hold_the_rows_of_its_conditions(tiny: SimpleNamespace, tmp_path: Path) -> None:
    """A whole run on one rank, from the request to its files."""
    fields = fields_of({"keyframes": [{"image": "subject.png", "frame": 17}]}, tiny.folder) | {"steps": 1}
    made = prepare_run(tiny.paths, fields, tmp_path, intermediates="i.safetensors")
    pipeline.run(made.config, made.job, Ranks())
    found = load_file(tmp_path / "i.safetensors")
    near(found["condition_video_rows"], picture_rows(tiny, [covering(Image.open(tiny.folder / "subject.png"))]))
    assert "condition_audio_rows" not in found and len(found["token_tags"]) == len(found["position_ids"])


def test_the_same_picture_twice_is_two_conditions(tiny: SimpleNamespace, tmp_path: Path) -> None:
    exact = tiny.folder / "exact.png"
    covering(Image.open(tiny.folder / "wide.png")).save(exact)
    found = run(tiny, first_frame="exact.png", last_frame="exact.png")
    first, last = found["kept"]["kept video"].chunk(2)
    assert torch.equal(first, last)  # one picture, and under this contract one noise
