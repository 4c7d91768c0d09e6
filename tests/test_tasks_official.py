"""Every task end to end against diffusers' pipeline: states, latents after every step, frames and sound.

Real processes over gloo run the pipeline's own stages, from a request and its media files: contract "official",
float32, tiny sets of both forms. Here each case runs on a layout or two, and every run is decoded; all of them on all
four, in both forms, is `benchmarks/parity_tasks.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pipeline_oracle
import pytest
import torch
from PIL import Image
from task_runs import (
    CASES,
    LAYOUTS,
    SEED,
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

from h3dist.checkpoint.comfy import open_slots
from h3dist.checkpoint.tiny import write_tiny
from h3dist.conditioning import encode_conditions
from h3dist.config import compose
from h3dist.intake import read_request
from h3dist.material import conditions_of, read_material
from h3dist.request import absolute_media

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
def as_before(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """`run_stages` changes settings for good, which may not outlive a test of this process."""
    keep_settings(monkeypatch)


@pytest.mark.parametrize(("form", "case", "layouts"), RUNS, ids=[f"{form}-{case}" for form, case, _ in RUNS])
def test_a_run_is_diffusers_on_every_layout(sets, world: World, folder: Path, form: str, case: str, layouts) -> None:
    tiny = sets[form]
    wanted = official(tiny.parts, CASES[case], folder)
    given = overrides_of(tiny.paths, "sampler=official"), fields_of(CASES[case], folder)
    for layout in layouts:
        sp, tp = LAYOUTS[layout]
        found, *others = world.run(run_stages, *given, sp, tp, ranks=sp * tp, limit=110)
        errors = latent_errors(found, wanted) | output_errors(tiny.paths, found, wanted)
        assert max(errors.values()) <= TOLERANCE, (layout, errors)
        for other in others:
            assert torch.equal(other["video"], found["video"]) and torch.equal(other["audio"], found["audio"])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_a_run_is_near_diffusers_on_the_cpu(sets, folder, case, dtype, limit, capsys) -> None:
    """float32 differs by the order of sums, which the posterior's rounding to float16 widens; bfloat16, which rounds
    each activation by up to 0.4 %, comes to 9e-3 on a CPU. A GPU decodes frames in float16. Products are dense: FP4's
    would compute something else.
    """
    tiny = sets["full"]
    wanted = official(tiny.parts, CASES[case], folder)
    overrides = overrides_of(tiny.paths, "sampler=official", "runtime.device=cuda", f"runtime.dtype={dtype}")
    overrides.append("runtime.gemm=dense")
    seat = Seat(0, 1, None)
    with seat.stack:
        found = run_stages(seat, overrides, fields_of(CASES[case], folder), device="cuda:0")
    errors = latent_errors(found, wanted) | output_errors(tiny.paths, found, wanted, "cuda:0")
    with capsys.disabled():
        print(f"\n{case}, {dtype} on a GPU: " + ", ".join(f"{name} {value:.1e}" for name, value in errors.items()))
    assert errors.pop("frames") <= max(limit, 1e-2), errors
    assert max(errors.values()) <= limit, errors


def test_one_file_as_first_and_last_frame_has_two_noises(sets, folder: Path) -> None:
    """It fits the canvas, so both are one picture, and only noise, 0.001 of a row, tells their rows apart."""
    Image.open(folder / "wide.png").resize((96, 64)).save(folder / "exact.png")
    lines = overrides_of(sets["curve"].paths)
    media = absolute_media({"first_frame": "exact.png", "last_frame": "exact.png"}, folder)
    for sampler, shared in (("official", False), ("beta_res", True)):
        config = compose([*lines, f"sampler={sampler}"])
        contract = config.sampler.noise
        made = read_request(config, {"prompt": "x", "width": 96, "height": 64, "frames": 39, "seed": SEED} | media)
        first, last = material = read_material(made, conditions_of(made, contract))
        assert np.array_equal(first.frames, last.frames) and (first.condition.frame, last.condition.frame) == (0, 38)
        how = {"contract": contract, "seed": SEED, "device": torch.device("cpu")}
        one, other = encode_conditions(material, open_slots(config.model), config.model, **how)["kept video"].chunk(2)
        assert torch.equal(one, other) == shared and float((one - other).abs().max()) < 0.01


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
