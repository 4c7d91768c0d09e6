"""Every task end to end against diffusers' pipeline: states, latents after every step, frames and sound.

Real processes over gloo run the pipeline's own stages, from a request and its media files: contract "official",
float32, tiny sets of both forms. Here each case runs on a layout or two; all of them on all four, in both forms,
is `benchmarks/parity_tasks.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pipeline_oracle
import pytest
import torch
from task_runs import (
    CASES,
    LAYOUTS,
    error,
    fields_of,
    keep_settings,
    latent_errors,
    official,
    output_errors,
    overrides_of,
    run_stages,
    write_media,
)
from world import Seat, World

from h3dist.checkpoint.tiny import write_tiny

TOLERANCE = 1e-4
RUNS = [
    ("full", "first", ("single", "ulysses 3")),
    ("full", "last", ("tensor 4",)),
    ("full", "both", ("hybrid 2x2",)),
    ("full", "image", ("ulysses 3",)),
    ("full", "image and audio", ("tensor 4",)),
    ("full", "video with sound", ("hybrid 2x2",)),
    ("full", "all three", ("single", "tensor 4")),
    ("curve", "all three", ("ulysses 3",)),
]
pytestmark = [pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"), pytest.mark.limit(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    write_media(folder)
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """Both forms of a tiny set, each with diffusers' components."""
    made = {form: write_tiny(tmp_path_factory.mktemp(form), form) for form in ("full", "curve")}
    return {form: SimpleNamespace(paths=paths, parts=pipeline_oracle.load(paths)) for form, paths in made.items()}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4) as made:
        yield made


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch):
    """`run_stages` changes settings for good, which may not outlive a test of this process."""
    keep_settings(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("form", "case", "layouts"), RUNS, ids=[f"{form}-{case}" for form, case, _ in RUNS])
def test_a_run_is_diffusers_on_every_layout(sets, world: World, folder: Path, form: str, case: str, layouts) -> None:
    tiny = sets[form]
    wanted = official(tiny.parts, CASES[case], folder)
    given = overrides_of(tiny.paths, "sampler=official"), fields_of(CASES[case], folder)
    for layout in layouts:
        sp, tp = LAYOUTS[layout]
        found, *others = world.run(run_stages, *given, sp, tp, ranks=sp * tp, limit=110)
        errors = latent_errors(found, wanted)
        if layout == "single":
            errors |= output_errors(tiny.paths, found, wanted)
        assert max(errors.values()) <= TOLERANCE, (layout, errors)
        for other in others:
            assert torch.equal(other["video"], found["video"]) and torch.equal(other["audio"], found["audio"])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize("case", ["both", "all three"])
def test_on_a_gpu_latents_are_near_diffusers_on_the_cpu(sets, folder, case, dtype, limit, capsys) -> None:
    tiny = sets["full"]
    wanted = official(tiny.parts, CASES[case], folder)
    overrides = overrides_of(tiny.paths, "sampler=official", "runtime.device=cuda", f"runtime.dtype={dtype}")
    seat = Seat(0, 1, None)
    with seat.stack:
        errors = latent_errors(run_stages(seat, overrides, fields_of(CASES[case], folder), device="cuda:0"), wanted)
    with capsys.disabled():
        print(f"\n{case}, {dtype} on a GPU: " + ", ".join(f"{name} {value:.1e}" for name, value in errors.items()))
    assert max(errors.values()) <= limit, errors


def test_every_condition_changes_the_clip(sets, folder: Path) -> None:
    """A request's media are not read in vain: without the sound, or in another order, it is another clip."""
    film, picture, voice = {"video": "motion.mkv"}, {"image": "subject.png"}, {"audio": "voice.wav"}
    requests = [
        [film, picture, voice],
        [picture, film, voice],
        [film | {"soundtrack": False}, picture, voice],
        [film | {"soundtrack": "voice.wav"}, picture, voice],
        [film, picture],
    ]
    clips = []
    media = [{"references": references} for references in requests]
    media += [
        {"first_frame": "wide.png"},
        {"last_frame": "wide.png"},
        {"keyframes": [{"image": "wide.png", "frame": 9}]},
    ]
    for given in media:
        fields = fields_of(given, folder) | {"steps": 1, "prompt": "By the window"}
        seat = Seat(0, 1, None)
        with seat.stack:
            clips.append(run_stages(seat, overrides_of(sets["curve"].paths, "sampler=official"), fields)["video"])
    for number, clip in enumerate(clips):
        for other in clips[:number]:
            assert error(clip, other) > 1e-4
