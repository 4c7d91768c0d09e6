"""One evaluation with keyframes and references against diffusers' transformer, on one rank and under every layout."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep
from lockstep import HandExchange, Lockstep, Part, make_parts
from oracle import transformer
from test_model_denoiser import write_set
from tiny_model import error
from torch import Tensor

from h3dist.attention.sdpa import sdpa
from h3dist.conditions import Condition
from h3dist.geometry import Geometry
from h3dist.model.denoiser import Denoiser
from h3dist.model.exchange import Alone
from h3dist.model.modulation import tables
from h3dist.model.refiner import refine_text
from h3dist.model.weights import load_denoiser
from h3dist.packing import Packing, audio_to_rows, pack, patchify, rows_to_audio, unpatchify

GEOMETRY = Geometry(64, 32, 22)
TAGS = torch.tensor([1, 1, 0, 0, 0, 1, 1])
TIMES_V, TIMES_A = (0.0, 0.6, 0.9995), (0.0, 0.85, 0.99987)  # the last is past a visual condition's own time
REFERENCES = (
    Condition("image", 32, 64, frames=1),
    Condition("audio", samples=4000),
    Condition("video", 64, 64, frames=22, samples=22000),
)
KEYFRAMES = (Condition("keyframe", 64, 32, frames=1), Condition("keyframe", 64, 32, frames=1, frame=21))
CASES = {"fl2va": KEYFRAMES, "ref2va": REFERENCES}
LAYOUTS = [(1, 1), (3, 1), (1, 4), (2, 2)]
TOLERANCE = 1e-5
pytestmark = pytest.mark.usefixtures("one_thread")


def random_rows(packing: Packing) -> dict[str, Tensor]:
    """Rows of every condition kind, by kind."""
    counts = {"kept video": 0, "kept audio": 0}
    for segment in packing.segments:
        if segment.kind in counts:
            counts[segment.kind] += segment.stop - segment.start
    return {kind: torch.randn(count, 96 if kind == "kept video" else 32) for kind, count in counts.items()}


def official_step(dfile, packing: Packing, states, kept, video, audio, step: int) -> tuple[Tensor, Tensor]:
    """diffusers' velocities of the clip's own rows, with diffusers' own times of every row."""
    rows = {kind: [] for kind in ("text", "audio", "video", "kept audio", "kept video")}
    for segment in packing.segments:
        rows[segment.kind] += range(segment.start, segment.stop)
    video_rows = torch.tensor(rows["kept video"] + rows["video"])
    audio_rows = torch.tensor(rows["kept audio"] + rows["audio"])
    times, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video_rows,
        audio_rows,
        len(rows["kept video"]),
        len(rows["kept audio"]),
        len(rows["text"]),
        TIMES_V[step],
        TIMES_A[step],
        max(TIMES_V[step], 0.999),
        1.0,
    )
    found_video, found_audio = transformer(dfile)(
        hidden_states=torch.cat([kept["kept video"], patchify(video)])[None],
        audio_hidden_states=torch.cat([kept["kept audio"], audio_to_rows(audio)])[None],
        encoder_hidden_states=states[None],
        timestep=times,
        timestep_indices=indices,
        token_tags=packing.token_tags,
        position_ids=packing.position_ids,
        video_indices=video_rows,
        audio_indices=audio_rows,
        text_indices=torch.tensor(rows["text"]),
        return_dict=False,
    )
    own_video, own_audio = found_video[0, len(rows["kept video"]) :], found_audio[0, len(rows["kept audio"]) :]
    return unpatchify(own_video, GEOMETRY), rows_to_audio(own_audio)


@pytest.fixture(scope="module", params=["full", "curve", "curve-nvfp4"])
def dfile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return write_set(request.param, tmp_path_factory.mktemp("conditions"))


@pytest.mark.parametrize("task", CASES)
def test_velocities_with_conditions_are_the_official_ones_under_every_layout(dfile, task: str) -> None:
    torch.manual_seed(11)
    packing = pack(GEOMETRY, TAGS, CASES[task])
    states = torch.randn(len(TAGS), dfile.dims.text_dim)
    video = torch.randn(1, 24, GEOMETRY.latent_t, GEOMETRY.latent_h, GEOMETRY.latent_w)
    audio = torch.randn(1, 32, 2, GEOMETRY.audio_latents)
    kept = random_rows(packing)
    text = refine_text(dfile, states, "cpu")
    modulation = tables(dfile, TIMES_V, TIMES_A, device="cpu", dtype=torch.float32, kept=True)
    expected = [official_step(dfile, packing, states, kept, video, audio, step) for step in range(len(TIMES_V))]

    def rank_main(rank: int, part: Part, exchange: HandExchange) -> list[tuple[Tensor, Tensor]]:
        weights = load_denoiser(dfile, part, device=torch.device("cpu"), dtype=torch.float32)
        denoiser = Denoiser(weights, packing, part, modulation, exchange, sdpa, text, kept=kept)
        return [denoiser(video, audio, step) for step in range(len(TIMES_V))]

    dims = dfile.dims
    for sp, tp in LAYOUTS:
        for results in Lockstep(make_parts(packing.rows, dims.heads, dims.ffn, sp, tp)).run(rank_main):
            for (got_video, got_audio), (want_video, want_audio) in zip(results, expected, strict=True):
                assert error(got_video, want_video) <= TOLERANCE
                assert error(got_audio, want_audio) <= TOLERANCE


def test_the_times_of_conditions_are_their_own(tmp_path: Path) -> None:
    dfile = write_set("curve", tmp_path)
    kept = tables(dfile, TIMES_V, TIMES_A, device="cpu", dtype=torch.float32, kept=True)
    plain = tables(dfile, TIMES_V, TIMES_A, device="cpu", dtype=torch.float32)
    fixed = tables(dfile, (0.999, 0.999, 0.9995), (1.0,) * 3, device="cpu", dtype=torch.float32)
    for with_conditions, without, own in zip(kept.blocks, plain.blocks, fixed.blocks, strict=True):
        assert torch.equal(with_conditions[:, :3], without)
        torch.testing.assert_close(with_conditions[:, 3], own[:, 0])  # a picture's, with the video's modality
        torch.testing.assert_close(with_conditions[:, 4], own[:, 2])  # a sound's, with the audio's
    assert torch.equal(kept.final, plain.final)


def test_condition_rows_matter_and_stay_as_they_are(dfile) -> None:
    torch.manual_seed(2)
    packing = pack(GEOMETRY, TAGS, REFERENCES)
    dims, rows = dfile.dims, (0, packing.rows)
    heads = (0, dims.heads)
    share = SimpleNamespace(
        rows=rows, projected_rows=rows, tp_heads=heads, heads=heads, projected_heads=heads, ffn=(0, dims.ffn)
    )
    modulation = tables(dfile, TIMES_V, TIMES_A, device="cpu", dtype=torch.float32, kept=True)
    weights = load_denoiser(dfile, share, device=torch.device("cpu"), dtype=torch.float32)
    text, kept = torch.randn(len(TAGS), dims.hidden), random_rows(packing)
    video = torch.randn(1, 24, GEOMETRY.latent_t, GEOMETRY.latent_h, GEOMETRY.latent_w)
    audio = torch.randn(1, 32, 2, GEOMETRY.audio_latents)

    def velocity(rows: dict[str, Tensor]) -> Tensor:
        return Denoiser(weights, packing, share, modulation, Alone(), sdpa, text, kept=rows)(video, audio, 1)[0]

    before = {kind: tensor.clone() for kind, tensor in kept.items()}
    first = velocity(kept)
    assert all(torch.equal(kept[kind], before[kind]) for kind in kept)
    for kind in kept:
        assert error(velocity(kept | {kind: -kept[kind]}), first) > 1e-3
