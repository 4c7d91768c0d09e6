"""What media and keyframes trip over, from a request on: each refusal with its field, each rule as it is stated."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from mediafiles import pitch, tone, write_film, write_sound
from PIL import Image

from h3dist.conditions import Condition
from h3dist.config import compose
from h3dist.errors import RequestError
from h3dist.geometry import Geometry
from h3dist.intake import read_request
from h3dist.material import conditions_of, fit_picture, read_material
from h3dist.packing import pack
from h3dist.request import Resolved, absolute_media

CONFIG = compose(["model.denoiser=/models/h3.safetensors"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every trap as a file."""
    folder = tmp_path_factory.mktemp("traps")
    noise = np.random.default_rng(0).integers(0, 255, (90, 160, 3), np.uint8)
    Image.fromarray(noise).save(folder / "photo.png")
    Image.fromarray(noise).save(folder / "whole.jpg", quality=95)
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:4000])
    (folder / "text.png").write_text("this is a text\n" * 40)
    (folder / "empty.png").write_bytes(b"")
    Image.new("RGB", (1, 1), (1, 2, 3)).save(folder / "dot.png")
    Image.new("1", (20000, 20000)).save(folder / "bomb.png", compress_level=1)
    grey = np.full((32, 64, 3), 99, np.uint8)
    write_film(folder / "ntsc.mp4", [grey] * 60, fps=Fraction(30000, 1001))
    write_film(folder / "long.mp4", [grey] * 360, sound=tone(15.1))  # 15.00 s of picture in a longer container
    for channels, rate in ((1, 8000), (1, 44100), (2, 24000), (6, 48000), (2, 96000)):
        write_sound(folder / f"{channels}-{rate}.wav", tone(1.5, rate, channels), rate, "pcm_s16le")
    write_sound(folder / "hour.mp3", np.zeros((1, 60 * 8000), np.float32), 8000, "libmp3lame", bit_rate=8000)
    (folder / "hour.mp3").write_bytes((folder / "hour.mp3").read_bytes() * 60)
    return folder


def ask(folder: Path, **fields: object) -> Resolved:
    return read_request(CONFIG, {"prompt": "a fox", "seed": 1} | absolute_media(fields, folder))


def denied(folder: Path, **fields: object) -> str:
    with pytest.raises(RequestError) as caught:
        ask(folder, **fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("text.png", "not a picture that can be read"),
        ("empty.png", "holds no bytes"),
        ("bomb.png", "at most 89 million"),
        ("absent.png", "No such file"),
    ],
)
def test_a_picture_that_cannot_be_read_is_refused_with_its_field(folder: Path, name: str, why: str) -> None:
    for field, fields in {
        "first_frame": {"first_frame": name},
        "last_frame": {"first_frame": "photo.png", "last_frame": name},
        "keyframes[0].image": {"keyframes": [{"image": name, "frame": 3}]},
        "references[1].image": {"references": [{"image": "photo.png"}, {"image": name}]},
    }.items():
        told = denied(folder, **fields)
        assert told.startswith(f"{field}: ") and why in told and "\n" not in told


def test_a_picture_that_breaks_off_is_refused_with_its_field_where_it_is_read(folder: Path) -> None:
    """Its header is whole, so the plan is made; rank 0 reads it before any model."""
    for field, fields in {
        "first_frame": {"first_frame": "cut.jpg"},
        "keyframes[0]": {"keyframes": [{"image": "cut.jpg", "frame": 3}]},
        "references[1]": {"references": [{"image": "photo.png"}, {"image": "cut.jpg"}]},
    }.items():
        made = ask(folder, **fields)
        with pytest.raises(RequestError) as caught:
            read_material(made, conditions_of(made, "comfy"))
        assert str(caught.value).startswith(f"{field}: ") and "image file is truncated" in str(caught.value)


def test_an_hour_of_sound_is_refused_with_its_field(folder: Path) -> None:
    told = denied(folder, references=[{"image": "photo.png"}, {"audio": "hour.mp3"}])
    assert told.startswith("references[1].audio: ") and "at most 600 s are read" in told


def test_one_pixel_is_a_picture(folder: Path) -> None:
    made = ask(folder, first_frame="dot.png")
    assert (made.width, made.height) == (768, 768)
    (item,) = read_material(made, conditions_of(made, "comfy"))
    assert (item.frames == (1, 2, 3)).all()


@pytest.mark.parametrize(("width", "height"), [(496, 320), (592, 1056)])
def test_a_canvas_that_is_refused_is_refused_with_a_keyframe_too(folder: Path, width: int, height: int) -> None:
    """Neither is snapped where there is a picture: both are no multiples of 32 in their width."""
    bare = denied(folder, width=width, height=height)
    assert f"width={width}" in bare and "the nearest are" in bare
    for fields in ({"first_frame": "photo.png"}, {"last_frame": "photo.png"}, {"references": [{"image": "photo.png"}]}):
        assert denied(folder, width=width, height=height, **fields) == bare


def test_a_keyframe_at_a_frame_that_the_clip_lacks(folder: Path) -> None:
    assert "keyframes[0].frame=-1" in denied(folder, keyframes=[{"image": "photo.png", "frame": -1}])
    assert "frames 0 to 123" in denied(folder, frames=124, keyframes=[{"image": "photo.png", "frame": 124}])
    assert ask(folder, frames=124, keyframes=[{"image": "photo.png", "frame": 123}]).keyframes[0].frame == 123


@pytest.mark.parametrize(("covering", "kept"), [(True, True), (False, False)])
def test_a_circle_of_160x90_on_96x160(covering: bool, kept: bool) -> None:
    """Covered, it stays one; stretched, it is 0.6 / 1.78 times as wide as high."""
    y, x = np.mgrid[:90, :160]
    circle = np.where((x - 80) ** 2 + (y - 45) ** 2 < 20**2, 255, 0).astype(np.uint8)
    fitted = fit_picture(np.repeat(circle[:, :, None], 3, axis=2), (96, 160), covering=covering)[:, :, 0] > 127
    aspect = fitted.any(axis=0).sum() / fitted.any(axis=1).sum()
    assert aspect == pytest.approx(1 if kept else 96 / 160 * 90 / 160, rel=0.05)


def test_29_97_frames_a_second_and_a_container_longer_than_its_picture(folder: Path) -> None:
    """60 frames at 29.97 are the 48 that a reference needs; 15 s of picture in 15.1 s are the 360 that it may have."""
    assert ask(folder, references=[{"video": "ntsc.mp4"}]).references[0].facts.frames == 48
    assert ask(folder, frames=362, references=[{"video": "long.mp4"}]).references[0].facts.frames == 360


@pytest.mark.parametrize("name", ["1-8000", "1-44100", "2-24000", "6-48000", "2-96000"])
def test_440_hertz_are_heard_as_440_hertz_in_two_channels(folder: Path, name: str) -> None:
    made = ask(folder, references=[{"image": "photo.png"}, {"audio": f"{name}.wav"}])
    sound = read_material(made, conditions_of(made, "comfy"))[1].sound
    assert sound.shape == (2, 48000) and all(abs(pitch(channel) - 440) < 1 for channel in sound)


# Positions by the formulas: text rows first, then a cursor that each reference moves on.


def grid(height: int, width: int) -> list[tuple[float, float]]:
    """Of h x w latents every patch's place, row by row: centred, 32 on the geometric mean of the sides."""
    mean = (height * width) ** 0.5
    axes = [[32 * ((1 - d / mean) / 2 + i * (d / mean) / (d / 2)) for i in range(d // 2)] for d in (height, width)]
    return [(y, x) for y in axes[0] for x in axes[1]]


def times(count: int) -> list[float]:
    """When each of `count` video latents begins, in audio latents: they hold 1, 4, 4, 4, 4 frames by turns."""
    spans = [5 / 3 * (1, 4, 4, 4, 4)[i % 5] for i in range(count)]
    return [sum(spans[:i]) for i in range(count + 1)]


def video_at(start: float, latents: tuple[int, int, int]) -> list[tuple[float, float, float]]:
    return [(start + t, y, x) for t in times(latents[0])[:-1] for y, x in grid(*latents[1:])]


def sound_at(start: float, count: int, like: tuple[int, int]) -> list[tuple[float, float, float]]:
    places = grid(*like)
    return [(start + n, 0.0, side) for side in (places[0][1], places[-1][1]) for n in range(count)]


IMAGE = Condition("image", 96, 64, frames=1, shown=1)
VOICE, SONG = Condition("audio", samples=12345), Condition("audio", samples=80000)
FILM = Condition("video", 64, 96, frames=22, samples=40000)


@pytest.mark.parametrize(
    "references",
    [(IMAGE, VOICE), (FILM,), (IMAGE, SONG, VOICE), (VOICE, FILM, IMAGE)],
    ids=lambda r: "+".join(c.kind for c in r),
)
def test_positions_are_the_formulas(references: tuple[Condition, ...]) -> None:
    geometry, text = Geometry(160, 96, 39), 9
    canvas = (geometry.latent_h, geometry.latent_w)
    wanted, cursor = [(float(i), 0.0, 0.0) for i in range(text)], float(text)
    for item in references:
        own, heard = (item.latent_h, item.latent_w), -(-item.samples // 800)
        if item.kind == "audio":
            wanted += sound_at(cursor, heard, canvas)
        elif item.samples:
            wanted += sound_at(cursor, heard, own)
        if item.frames:
            wanted += video_at(cursor, (item.latent_t, *own))
        span = 1.0 if item.kind == "image" else max(heard, times(item.latent_t)[-1] if item.frames else 0)
        cursor += span
    wanted += sound_at(cursor, geometry.audio_latents, canvas)
    wanted += video_at(cursor, (geometry.latent_t, *canvas))
    found = pack(geometry, torch.ones(text, dtype=torch.int64), references).position_ids
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-9)


def test_positions_of_one_small_case_in_numbers() -> None:
    """Two text rows, a sound of three latents, a film of 5 frames with four latents of sound, then the clip."""
    film = Condition("video", 32, 32, frames=5, samples=3200)
    found = pack(Geometry(64, 32, 5), torch.ones(2, dtype=torch.int64), (Condition("audio", samples=2400), film))
    left, right = 16 - 16 * 2**0.5, 16.0  # of the clip's two patches side by side
    at = [tuple(round(value, 6) for value in row) for row in found.position_ids.tolist()]
    assert at[:2] == [(0, 0, 0), (1, 0, 0)]
    assert at[2:8] == [(2 + n, 0, round(w, 6)) for w in (left, right) for n in range(3)]
    assert at[8:16] == [(5 + n, 0, 0) for _ in range(2) for n in range(4)]
    assert at[16:18] == [(5, 0, 0), (round(5 + 5 / 3, 6), 0, 0)]
    assert at[18] == (round(5 + 25 / 3, 6), 0, round(left, 6))  # the film is longer than its sound
