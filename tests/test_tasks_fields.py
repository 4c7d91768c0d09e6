"""Nothing is accepted and then ignored: every field of every task's schema changes what a run is made from."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from mediafiles import tone, write_film, write_sound
from PIL import Image

from h3dist.config import compose
from h3dist.errors import RequestError
from h3dist.intake import read_request
from h3dist.material import read_material
from h3dist.outputs import choose_outputs
from h3dist.plan import Layout
from h3dist.preflight import facts_ahead, plan_on, read_aloud
from h3dist.request import TASKS, absolute_media
from h3dist.request.media import ITEMS
from h3dist.sampling.noise import draw

CONFIG = compose(["model.denoiser=/models/h3.safetensors", "runtime.device=cpu"])
COMMON = {"prompt": "A fox", "width": 96, "height": 64, "frames": 56, "seed": 1, "steps": 3}
BASE = {  # task: media that it takes
    "t2va": {},
    "i2va": {"first_frame": "a.png"},
    "l2va": {"last_frame": "a.png"},
    "fl2va": {"first_frame": "a.png", "last_frame": "a.png", "keyframes": [{"image": "a.png", "frame": 9}]},
    "ref2va": {"references": [{"image": "a.png"}, {"video": "f.mkv"}, {"audio": "s.wav"}]},
}
OTHER = {  # field: another value, for every task that has it
    "task": "i2va",
    "prompt": "A hare",
    "width": 128,
    "height": 96,
    "frames": 73,
    "duration": 4.0,
    "seed": 2,
    "steps": 4,
    "mux_audio": False,
    "first_frame": "b.png",
    "last_frame": "b.png",
    "keyframes": [{"image": "b.png", "frame": 9}],
    "references": [{"image": "b.png"}, {"video": "f.mkv"}, {"audio": "s.wav"}],
}
ITEM = {  # model of an item: one, the field that holds it, and another value for each of its own fields
    "ImageKeyframe": ("keyframes", {"image": "a.png", "frame": 9}, {"image": "b.png", "frame": 10}),
    "VideoKeyframe": ("keyframes", {"video": "f.mkv", "frame": 0}, {"video": "g.mkv", "frame": 3}),
    "ImageReference": ("references", {"image": "a.png"}, {"image": "b.png"}),
    "VideoReference": ("references", {"video": "f.mkv"}, {"video": "g.mkv", "soundtrack": False}),
    "AudioReference": ("references", {"audio": "s.wav"}, {"audio": "t.wav"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of each kind of medium, which differ in content alone."""
    folder = tmp_path_factory.mktemp("fields")
    source = np.random.default_rng(2)
    for name in "ab":
        Image.fromarray(source.integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    for name, hertz in (("f", 440), ("g", 660)):
        film = list(source.integers(0, 256, (50, 32, 64, 3), dtype=np.uint8))
        write_film(folder / f"{name}.mkv", film, sound=tone(50 / 24, hertz=hertz))
    for name, hertz in (("s", 440), ("t", 660)):
        write_sound(folder / f"{name}.wav", tone(0.5, 32000, hertz=hertz), 32000, "pcm_s16le")
    return folder


def made_from(fields: dict, folder: Path) -> str:
    """All that a run is made from, as one text: plan, text, noise, pixels and sound, files; or why it is refused."""
    try:
        resolved = read_request(CONFIG, absolute_media(fields, folder))
    except RequestError as error:
        return f"refused: {error}"
    spoken = read_aloud(CONFIG, resolved)
    plan = plan_on(CONFIG, resolved, facts_ahead(CONFIG, spoken), Layout(), device="cpu", capability=None)
    shown = {name: value for name, value in plan.as_dict().items() if name not in ("notes", "reasons")}
    noise = draw("comfy", resolved.seed, resolved.geometry, conditions=plan.conditions)
    files = choose_outputs("/tmp/o.mp4", mux_audio=resolved.mux_audio).targets()
    seen = [(item.frames, item.sound) for item in read_material(resolved, plan.conditions)]
    held = [None if part is None else digest(part) for pair in seen for part in pair]
    noises = [digest(stream.numpy()) for stream in noise]
    return json.dumps([resolved.task, shown, list(map(str, spoken)), noises, held, files], sort_keys=True)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("task", TASKS)
def test_every_field_of_a_task_counts(task: str, folder: Path) -> None:
    fields = COMMON | BASE[task]
    before = made_from(fields, folder)
    assert before == made_from(fields, folder) and not before.startswith("refused"), before
    for field in TASKS[task].model_fields:
        changed = {**fields, field: OTHER[field]}
        if field == "duration":
            del changed["frames"]
        if (field, task) == ("task", "i2va"):
            changed["task"] = "fl2va"
        after = made_from(changed, folder)
        assert after != before, f"{field} of {task} is ignored"
        assert field == "task" or not after.startswith("refused"), after


@pytest.mark.parametrize("model", ITEMS, ids=lambda model: model.__name__)
def test_every_field_of_an_item_counts(model: type, folder: Path) -> None:
    place, item, other = ITEM[model.__name__]
    rest = [{"image": "a.png"}] if place == "references" else []
    before = made_from(COMMON | {place: [*rest, item]}, folder)
    assert not before.startswith("refused"), before
    for field in model.model_fields:
        after = made_from(COMMON | {place: [*rest, item | {field: other[field]}]}, folder)
        assert after != before and not after.startswith("refused"), f"{field} of {model.__name__} is ignored"
