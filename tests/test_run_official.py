"""A whole run in this process, from the request to the files, against diffusers' pipeline and Comfy's formulas."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import GOLDEN, check_golden, needs_golden
from official_pipeline import as_video, official_pipeline, run_official
from safetensors.torch import load_file
from scipy.special import betaincinv
from stages import on_one_core, prepare_run, walk
from torch import Tensor, nn
from world import Seat

from h3dist import pipeline
from h3dist.checkpoint.tiny import write_tiny
from h3dist.media import probe
from h3dist.plan import Layout
from h3dist.saved import sha256
from h3dist.topology import Ranks

REQUEST = {
    "prompt": 'A quiet shot. She says, "Go."',
    "width": 96,
    "height": 64,
    "frames": 39,
    "steps": 4,
    "seed": 2**62 + 1,
}
TOLERANCE = 1e-5  # relative, in the 2-norm; all runs are in float32
SHIFT_V, SHIFT_A = 12.0, 3.0
pytestmark = [pytest.mark.limit(300), pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")]


@pytest.fixture(scope="module", autouse=True)
def one_core():
    with on_one_core():
        yield


@dataclass(frozen=True)
class Case:
    """A set, diffusers' pipeline over it, and what that makes of the request."""

    paths: dict[str, Path]
    model: nn.Module
    expected: dict[str, Tensor]


@pytest.fixture(scope="module", params=["curve", "full"])
def case(request, tmp_path_factory):
    paths = write_tiny(tmp_path_factory.mktemp(request.param), request.param, seed=21)
    pipe = official_pipeline(paths)
    return Case(paths, pipe.transformer, run_official(pipe, REQUEST))


@pytest.fixture(scope="module")
def made(case, tmp_path_factory):
    """The folder where a whole run of one rank has left its files."""
    folder = tmp_path_factory.mktemp("made")
    saved = {"intermediates": "all.safetensors", "trace": "trace.safetensors", "latents": "latents.safetensors"}
    run = prepare_run(case.paths, REQUEST, folder, "sampler=official", **saved)
    pipeline.run(run.config, run.job, Ranks())
    return folder


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def test_everything_is_what_diffusers_makes(case, made, record_property):
    found = load_file(made / "trace.safetensors") | load_file(made / "all.safetensors")
    assert found.keys() == case.expected.keys()
    for name, want in case.expected.items():
        got = found[name]
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        if name == "frames":
            levels = (got.int() - want.int()).abs()
            assert levels.max() <= 1 and (levels == 0).double().mean() > 0.999
        elif want.is_floating_point() and name != "position_ids":
            record_property(name, distance(got, want))
            assert distance(got, want) <= TOLERANCE, name
        else:
            assert torch.equal(got, want), name
    assert case.expected["frames"].double().std() > 10 and case.expected["audio"].std() > 0.01, "not blank, not silent"


def test_the_files_tell_of_each_other(made):
    endings = ["all.safetensors", "latents.safetensors", "o.json", "o.mp4", "trace.safetensors"]
    assert sorted(path.name for path in made.iterdir()) == endings
    told, latents = json.loads((made / "o.json").read_text()), load_file(made / "latents.safetensors")
    assert told["sha256"] == {name: sha256(latents[name]) for name in ("video_latents", "audio_latents")}
    for file in ("all.safetensors", "trace.safetensors"):
        assert all(torch.equal(load_file(made / file)[name], latents[name]) for name in latents)
    assert {name: told["request"][name] for name in REQUEST} == REQUEST
    (rank,) = told["ranks"]
    assert rank["file_bytes"]["counted"] == rank["file_bytes"]["planned"]
    assert len(told["step_seconds"]) == REQUEST["steps"]
    assert told["seconds"].keys() == {"start", "plan", "encode", "denoise", "decode"}


def test_the_film_is_the_requests(made):
    film = probe(made / "o.mp4")
    assert (film.frames, film.width, film.height) == (REQUEST["frames"], REQUEST["width"], REQUEST["height"])
    assert (film.audio_rate, film.audio_channels) == (32000, 2)
    assert film.metadata["title"] == REQUEST["prompt"]
    assert str(REQUEST["seed"]) in film.metadata["comment"]


def test_the_shortest_clip_is_made_though_diffusers_cannot_decode_it(case, tmp_path):
    run = prepare_run(case.paths, REQUEST | {"frames": 1}, tmp_path, "sampler=official")
    pipeline.run(run.config, run.job, Ranks())
    film = probe(tmp_path / "o.mp4")
    assert film.frames == 5
    assert abs(film.audio_ticks - 5 * film.timescale // 24) <= 2
    assert any("1" in note and "5" in note for note in json.loads((tmp_path / "o.json").read_text())["notes"])


@needs_golden
def test_one_rank_makes_what_other_software_made(tmp_path):
    request = json.loads((GOLDEN / "request.json").read_text())
    run = prepare_run({"overrides": GOLDEN / "overrides.txt"}, request, tmp_path, intermediates="all.safetensors")
    pipeline.run(run.config, run.job, Ranks())
    check_golden(tmp_path / "all.safetensors")


@pytest.mark.parametrize("sampler", ["beta_res", "comfy_simple"])
def test_the_comfy_contract_is_its_formulas(case, sampler, tmp_path, record_property):
    steps = REQUEST["steps"] + 1
    run = prepare_run(case.paths, REQUEST | {"steps": steps}, tmp_path, f"sampler={sampler}", trace="trace.safetensors")
    found = {name: torch.from_numpy(x) for name, x in walk(Seat(0, 1, None), run, Layout()).trace.items()}
    sigmas = beta_sigmas(steps) if sampler == "beta_res" else simple_sigmas(steps)
    states = comfy_states(case.model, case.expected, sigmas)
    for step, (video, audio) in enumerate(states, start=1):
        for name, want in ((f"step.{step:03d}.video_latents", video), (f"step.{step:03d}.audio_latents", audio)):
            record_property(name, distance(found[name], want))
            assert distance(found[name], want) <= TOLERANCE, name
    assert torch.equal(found["video_latents"], found[f"step.{steps:03d}.video_latents"])
    assert distance(found["video_latents"], case.expected["video_latents"]) > 0.01, "the contracts differ"


# --- Comfy's loop by its published formulas, in double precision, around diffusers' transformer


def table() -> np.ndarray:
    """The thousand levels, shifted for video, in float32."""
    tau = np.arange(1, 1001, dtype=np.float32) / np.float32(1000)
    return (SHIFT_V * tau / (1 + (SHIFT_V - 1) * tau)).astype(np.float32)


def simple_sigmas(steps: int) -> list[float]:
    return [float(table()[999 - j * 1000 // steps]) for j in range(steps)] + [0.0]


def beta_sigmas(steps: int) -> list[float]:
    places = [round(float(betaincinv(0.6, 0.6, 1 - j / steps)) * 999) for j in range(steps)]
    return [float(table()[place]) for place in dict.fromkeys(places)] + [0.0]


def comfy_states(model: nn.Module, official: dict[str, Tensor], sigmas: list[float]) -> list[tuple[Tensor, Tensor]]:
    """Both latents after every step: RES multistep on one flat vector, where audio travels as x sigma_v / sigma_a."""
    shape = official["video_latents"].shape
    source = torch.Generator().manual_seed(REQUEST["seed"])
    video, carried = (torch.randn(official[f"{kind}_latents"].shape, generator=source) for kind in ("video", "audio"))
    gain, split = SHIFT_V / SHIFT_A, video.numel()
    x, old, states = torch.cat([video.flatten(), carried.flatten()]).double(), None, []
    for i, sigma in enumerate(sigmas[:-1]):
        video, audio = x[:split].view(shape), x[split:].view(carried.shape) * (audio_sigma(sigma) / sigma)
        v_video, v_audio = velocities(model, official, video, audio, 1 - sigma, 1 - audio_sigma(sigma))
        u = (1 - gain) * audio + (1 + (gain - 1) * audio_sigma(sigma)) * -v_audio
        clean = x - sigma * torch.cat([-v_video.flatten(), u.flatten()])
        x, old = advanced(sigmas, i, x, clean, old), clean
        factor = audio_sigma(sigmas[i + 1]) / sigmas[i + 1] if sigmas[i + 1] else 1 / gain
        states.append((x[:split].view(shape), x[split:].view(carried.shape) * factor))
    return states


def audio_sigma(sigma: float) -> float:
    base = sigma / (SHIFT_V + sigma * (1 - SHIFT_V))
    return SHIFT_A * base / (1 + (SHIFT_A - 1) * base)


def advanced(sigmas: list[float], i: int, x: Tensor, clean: Tensor, old: Tensor | None) -> Tensor:
    """One step: Euler first and last, else phi functions in lambda = -ln sigma."""
    sigma, after = sigmas[i], sigmas[i + 1]
    if i == 0 or after == 0:
        return x + (x - clean) / sigma * (after - sigma)
    h = math.log(sigma / after)
    c2 = math.log(sigma / sigmas[i - 1]) / h
    phi1 = (math.exp(-h) - 1) / -h
    b2 = (phi1 - 1) / -h / c2
    return math.exp(-h) * x + h * ((phi1 - b2) * clean + b2 * old)


def velocities(
    model: nn.Module, official: dict[str, Tensor], video: Tensor, audio: Tensor, time_v: float, time_a: float
) -> tuple[Tensor, Tensor]:
    """diffusers' transformer at two times, from latents to data-ward velocities in double precision."""
    places, text = torch.arange(len(official["token_tags"])), len(official["text_tags"])
    audio_rows = 2 * audio.shape[-1]
    frames, height, width = video.shape[2:]
    rows = video.view(24, frames, height // 2, 2, width // 2, 2).permute(1, 2, 4, 0, 3, 5).reshape(1, -1, 96)
    indices = torch.zeros(len(places), dtype=torch.int64)
    indices[text : text + audio_rows] = 1
    v_video, v_audio = model(
        hidden_states=rows.float(),
        audio_hidden_states=audio[0].permute(1, 2, 0).reshape(1, -1, 32).float(),
        encoder_hidden_states=official["text_states"][None],
        timestep=torch.tensor([time_v, time_a]),
        timestep_indices=indices,
        token_tags=official["token_tags"],
        position_ids=official["position_ids"],
        video_indices=places[text + audio_rows :],
        audio_indices=places[text : text + audio_rows],
        text_indices=places[:text],
        return_dict=False,
    )
    return as_video(v_video[0], frames, height, width).double(), v_audio[0].view(2, -1, 32).permute(2, 0, 1).double()[
        None
    ]
