"""Keyframes and references from their files: what is fitted how, and that sizes told ahead are the sizes read."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mediafiles import tone, write_film, write_sound
from PIL import Image

from h3dist import conditioning
from h3dist.conditions import Condition
from h3dist.config import compose
from h3dist.errors import RequestError
from h3dist.fitting import fit_keyframe
from h3dist.intake import read_request
from h3dist.material import Material, _cut, conditions_of, fit_picture, read_material
from h3dist.media import read_film
from h3dist.plan import Layout
from h3dist.planner import Ahead, decide_ahead
from h3dist.preflight import facts_ahead, plan_on, read_aloud
from h3dist.request import absolute_media

PROMPT = "A fox runs"
DENOISER = "model.denoiser=/models/h3.safetensors"  # of no said partition: for any task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    source = np.random.default_rng(1)
    for name, (width, height) in {"wide": (160, 90), "tall": (90, 160), "exact": (96, 64)}.items():
        Image.fromarray(source.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    film = [source.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(60)]
    write_film(folder / "loud.mkv", film, sound=tone(2.5))
    write_film(folder / "silent.mkv", film)
    write_sound(folder / "voice.wav", tone(0.3, 32000, 2), 32000, "pcm_s16le")
    return folder


@pytest.fixture
def resolved(folder: Path):
    def read(noise: str = "comfy", **fields):
        sizes = {"width": 96, "height": 64, "frames": 39, "seed": 1} if "references" in fields else {"frames": 39}
        config = compose([DENOISER] if noise == "comfy" else [DENOISER, "sampler=official"])
        return read_request(config, {"prompt": PROMPT, "seed": 1, **sizes, **absolute_media(fields, folder)})

    return read


def test_a_circle_keeps_its_shape_where_it_covers_and_not_where_it_is_stretched() -> None:
    y, x = np.mgrid[:90, :160]
    circle = np.where((x - 80) ** 2 + (y - 45) ** 2 < 40**2, 255, 0).astype(np.uint8)
    picture = np.repeat(circle[:, :, None], 3, axis=2)

    def aspect(fitted: np.ndarray) -> float:
        inside = fitted[:, :, 0] > 127
        return inside.any(axis=0).sum() / inside.any(axis=1).sum()

    stretched = fit_picture(picture, (96, 160), covering=False)
    covering = fit_picture(picture, (96, 160), covering=True)
    assert stretched.shape == covering.shape == (160, 96, 3)
    assert aspect(stretched) == pytest.approx(96 / 160 * 90 / 160, rel=0.05)
    wide = fit_picture(picture, (320, 160), covering=True)  # less high than its own aspect: cut above and below
    assert aspect(wide) == pytest.approx(1, rel=0.02)
    assert fit_picture(picture, (160, 90), covering=True) is picture


@pytest.mark.parametrize("contract", ["comfy", "official"])
def test_the_sizes_told_ahead_are_those_that_are_read(resolved, contract: str) -> None:
    asked = (
        resolved(contract, first_frame="wide.png", last_frame="tall.png"),
        resolved(contract, width=96, height=64, frames=124, keyframes=[{"video": "loud.mkv", "frame": 9}]),
        resolved(
            contract,
            references=[{"audio": "voice.wav"}, {"video": "loud.mkv"}, {"image": "tall.png"}, {"video": "silent.mkv"}],
        ),
        resolved(contract, references=[{"video": "silent.mkv", "soundtrack": "voice.wav"}]),
        resolved(contract, references=[{"video": "loud.mkv", "soundtrack": False}]),
    )
    for request in asked:
        conditions = conditions_of(request, contract)
        for item, condition in zip(read_material(request, conditions), conditions, strict=True):
            assert item.condition == condition
            assert (item.sound is not None) == (condition.samples > 0)
            assert (item.frames is not None) == (condition.frames > 0)
            if item.frames is not None:
                assert item.frames.dtype == np.uint8
                assert item.frames.shape[1:] == (condition.height, condition.width, 3)
                assert len(item.frames) == max(condition.frames, condition.shown)
            if item.sound is not None:
                assert item.sound.shape == (2, condition.samples) and item.sound.dtype == np.float32


def test_a_guide_brings_its_sound_and_is_cut_to_17k_and_5(resolved) -> None:
    request = resolved(width=96, height=64, frames=124, keyframes=[{"video": "loud.mkv", "frame": 9}])
    (condition,) = conditions_of(request, "comfy")
    assert condition == Condition("keyframe", 96, 64, 56, 74666, 9)
    (item,) = read_material(request, (condition,))
    film = read_film(request.keyframes[0].source)
    assert np.array_equal(item.frames[5], fit_picture(film.frames[5], (96, 64), covering=True))
    assert np.array_equal(item.sound, film.sound[:, :74666])


def test_the_first_frame_is_stretched_and_the_last_covers(resolved) -> None:
    request = resolved(first_frame="wide.png", last_frame="wide.png", width=96, height=64)
    first, last = read_material(request, conditions_of(request, "comfy"))
    picture = np.array(Image.open(request.keyframes[0].source))
    assert np.array_equal(first.frames[0], fit_picture(picture, (96, 64), covering=False))
    assert np.array_equal(last.frames[0], fit_picture(picture, (96, 64), covering=True))
    assert not np.array_equal(first.frames, last.frames)
    alone = {
        contract: resolved(contract, last_frame="wide.png", width=96, height=64) for contract in ("comfy", "official")
    }
    for contract, covering in (("comfy", True), ("official", False)):  # official: what comes first is stretched
        (item,) = read_material(alone[contract], conditions_of(alone[contract], contract))
        assert np.array_equal(item.frames[0], fit_picture(picture, (96, 64), covering=covering))


def test_sound_that_breaks_off_is_refused() -> None:
    condition = Condition("audio", samples=8000)
    with pytest.raises(RequestError, match="not whole"):
        _cut(np.zeros((2, 7999), np.float32), condition, "voice.wav")
    assert _cut(np.ones((2, 9000), np.float32), condition, "voice.wav").shape == (2, 8000)


def test_rows_come_in_the_order_of_the_conditions_and_each_vae_only_where_needed(monkeypatch) -> None:
    loaded = []

    class Video:
        @classmethod
        def load(cls, *args, encoder: bool, decoder: bool):
            loaded.append(("video", encoder, decoder))
            return cls()

    class Audio:
        @classmethod
        def load(cls, *args, encoder: bool):
            loaded.append(("audio", encoder))
            return cls()

        def encode(self, sound: torch.Tensor) -> torch.Tensor:
            return torch.full((1, 32, 2, sound.shape[1] // 800), float(sound[0, 0]))

    def encode_frames(vae, frames, contract):
        return torch.full((1, 24, 1, frames.shape[1] // 16, frames.shape[2] // 16), float(frames[0, 0, 0, 0]))

    monkeypatch.setattr(conditioning, "VideoVae", Video)
    monkeypatch.setattr(conditioning, "AudioVae", Audio)
    monkeypatch.setattr(conditioning, "encode_frames", encode_frames)
    slots, model = (
        SimpleNamespace(video_vae=None, audio_vae=None),
        SimpleNamespace(video_vae_config=None, audio_vae_config=None),
    )

    def encode(*material: Material) -> dict[str, torch.Tensor]:
        how = {"contract": "comfy", "seed": 3, "device": torch.device("cpu")}
        return conditioning.encode_conditions(material, slots, model, **how)

    stills = [
        Material(fit_keyframe((64, 32), 1, 0, n), np.full((1, 32, 64, 3), 10 * n, np.uint8), None) for n in (1, 2)
    ]
    voice = Material(Condition("audio", samples=800), None, np.full((2, 800), 0.5, np.float32))
    found = encode(stills[1], voice, stills[0])
    assert found["kept video"].shape == (4, 96) and found["kept audio"].shape == (2, 32)
    assert [round(float(value)) for value in found["kept video"].mean(dim=1)] == [20, 20, 10, 10]
    assert loaded == [("video", True, False), ("audio", True)]
    loaded.clear()
    assert encode() == {} and loaded == []
    assert encode(voice).keys() == {"kept audio"} and loaded == [("audio", True)]


def test_every_condition_shows_in_the_plan_before_anything_runs(folder: Path) -> None:
    config = compose([DENOISER, "parallel=ulysses", "runtime.device=cpu"])

    def plan(**media: object):
        sizes = {"width": 96, "height": 64, "frames": 39, "seed": 1}
        request = read_request(config, {"prompt": PROMPT} | sizes | absolute_media(media, folder))
        facts = facts_ahead(config, read_aloud(config, request))
        return plan_on(config, request, facts, Layout(sp=2), device="cpu", capability=None)

    bare, with_media = plan(), plan(references=[{"image": "wide.png"}, {"video": "loud.mkv"}])
    image, film = with_media.conditions
    assert (image.kind, film.kind) == ("image", "video") and film.samples == 52000
    kept = image.video_rows + film.video_rows + film.audio_rows
    assert with_media.rows - with_media.text_rows == bare.rows - bare.text_rows + kept
    assert with_media.text_rows > bare.text_rows
    rows, sound = image.video_rows + film.video_rows, film.audio_rows
    assert with_media.shares[0].sent["conditions"] == 4 * (96 * rows + 32 * sound)
    assert with_media.shares[1].sent["conditions"] == bare.shares[0].sent["conditions"] == 0
    assert with_media.shares[0].weight_bytes > bare.shares[0].weight_bytes  # tables for their times
    text = with_media.text()
    assert f"+ {kept} conditions +" in text and "64 x 64" in text and "1.62 s" in text
    assert "condition" not in bare.text().replace("conditions", "")
    assert with_media.digest != bare.digest


def test_the_text_encoder_reads_labels_blocks_and_the_prompt(resolved) -> None:
    request = resolved(references=[{"image": "exact.png"}, {"audio": "voice.wav"}])
    found = read_aloud(compose([DENOISER]), request)
    assert [piece for piece in found if isinstance(piece, str)] == ["<Picture 1>: ", "<Audio 1>: ", PROMPT]


def test_the_plan_as_json_has_the_rows_and_bytes_of_every_condition(folder: Path) -> None:
    config = compose([DENOISER, "runtime.device=cpu"])
    sizes = {"width": 96, "height": 64, "frames": 39, "seed": 1}
    for media in (
        {"first_frame": "wide.png", "last_frame": "tall.png"},
        {"keyframes": [{"video": "loud.mkv", "frame": 0}], "frames": 124},
        {"references": [{"image": "wide.png"}, {"video": "loud.mkv"}, {"audio": "voice.wav"}]},
    ):
        decision = decide_ahead(config, {"prompt": PROMPT} | sizes | absolute_media(media, folder), Ahead(gpus=1))
        told = decision.as_dict()["conditions"]
        assert len(told) == len(decision.plan.conditions)
        for item, condition in zip(told, decision.plan.conditions, strict=True):
            assert (item["video_rows"], item["audio_rows"]) == (condition.video_rows, condition.audio_rows)
            assert item["bytes"] == 4 * (96 * condition.video_rows + 32 * condition.audio_rows) > 0
        seen = any(condition.shown for condition in decision.plan.conditions)
        assert any("text rows show keyframes and references" in note for note in decision.notes) == seen
