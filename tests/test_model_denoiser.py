"""The denoiser against diffusers' transformer, block by block, in both checkpoint forms."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import transformer
from tiny_model import TEXT_DIM, OracleStep, error, oracle_step, random_state, write
from torch import Tensor

from h3dist.attention.sdpa import sdpa
from h3dist.checkpoint.comfy import DenoiserFile, open_denoiser
from h3dist.checkpoint.tiny import write_tiny
from h3dist.geometry import Geometry
from h3dist.model.denoiser import Denoiser
from h3dist.model.exchange import Alone
from h3dist.model.modulation import tables
from h3dist.model.refiner import refine_text
from h3dist.model.weights import load_denoiser
from h3dist.packing import Packing, audio_to_rows, pack_t2va, patchify, rows_to_audio, unpatchify

GEOMETRY = Geometry(64, 96, 22)
TEXT_TAGS = torch.tensor([1] * 5 + [0] * 3 + [1] * 3)
TIMES_V, TIMES_A = (0.0, 0.31, 0.875), (0.0, 0.613, 0.97)
TOLERANCE = 1e-5


@dataclass
class Case:
    dfile: DenoiserFile
    states: Tensor
    video: Tensor
    audio: Tensor
    packing: Packing
    expected: list[OracleStep]


def write_set(name: str, folder: Path) -> DenoiserFile:
    """A set by name: its form, and "-nvfp4" where its blocks are quantised as in the released files."""
    form = name.removesuffix("-nvfp4")
    if name == form:
        return open_denoiser(write(random_state(form), folder / f"{name}.safetensors"))
    return open_denoiser(write_tiny(folder, form, seed=2)["denoiser"])


@pytest.fixture(scope="module", params=["full", "curve", "full-nvfp4", "curve-nvfp4"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dfile = write_set(request.param, tmp_path_factory.mktemp("denoiser"))
    torch.manual_seed(1)
    states = torch.randn(len(TEXT_TAGS), dfile.dims.text_dim)
    video = torch.randn(1, 24, GEOMETRY.latent_t, GEOMETRY.latent_h, GEOMETRY.latent_w)
    audio = torch.randn(1, 32, 2, GEOMETRY.audio_latents)
    packing = pack_t2va(GEOMETRY, TEXT_TAGS)
    rows = torch.arange(packing.rows)
    packed = SimpleNamespace(
        position_ids=packing.position_ids,  # equal to diffusers' own: tests/test_packing.py
        token_tags=packing.token_tags,
        **{f"{kind}_indices": rows[packing.span(kind)] for kind in ("text", "audio", "video")},
    )
    model = transformer(dfile)
    rows_of = (patchify(video), audio_to_rows(audio))
    expected = [oracle_step(model, packed, states, *rows_of, times) for times in zip(TIMES_V, TIMES_A, strict=True)]
    yield Case(dfile, states, video, audio, packing, expected)
    torch.set_num_threads(threads)


def whole_share(case: Case) -> SimpleNamespace:
    dims, rows = case.dfile.dims, (0, case.packing.rows)
    heads = (0, dims.heads)
    return SimpleNamespace(
        rows=rows, projected_rows=rows, tp_heads=heads, heads=heads, projected_heads=heads, ffn=(0, dims.ffn)
    )


def build(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Denoiser:
    device, share = torch.device(device), whole_share(case)
    return Denoiser(
        load_denoiser(case.dfile, share, device=device, dtype=dtype),
        case.packing,
        share,
        tables(case.dfile, TIMES_V, TIMES_A, device=device, dtype=dtype),
        Alone(),
        sdpa,
        refine_text(case.dfile, case.states, device),
    )


def test_refined_text_is_the_official_one(case: Case) -> None:
    text = refine_text(case.dfile, case.states, "cpu")
    assert text.dtype == torch.float32
    assert error(text, case.expected[0].text) <= TOLERANCE


@pytest.mark.parametrize("step", range(len(TIMES_V)))
def test_hidden_state_after_every_block_is_the_official_one(case: Case, step: int) -> None:
    denoiser = build(case)
    x = denoiser.embed(case.video, case.audio)
    assert error(x, case.expected[step].hidden[0]) <= TOLERANCE
    for block in range(case.dfile.dims.layers):
        stream = denoiser.stream(x)
        denoiser.run_block(stream, block, step)
        assert error(stream.whole(), case.expected[step].hidden[block + 1]) <= TOLERANCE, f"after block {block}"
    out = denoiser.outputs(x, step)
    assert error(out[case.packing.span("video"), :96], case.expected[step].video) <= TOLERANCE
    assert error(out[case.packing.span("audio"), 96:], case.expected[step].audio) <= TOLERANCE


@pytest.mark.parametrize("step", range(len(TIMES_V)))
def test_a_step_gives_the_official_velocities_as_latents(case: Case, step: int) -> None:
    video, audio = build(case)(case.video, case.audio, step)
    assert video.dtype == audio.dtype == torch.float32
    assert error(video, unpatchify(case.expected[step].video, GEOMETRY)) <= TOLERANCE
    assert error(audio, rows_to_audio(case.expected[step].audio)) <= TOLERANCE


def test_a_step_is_repeatable_and_leaves_its_inputs_alone(case: Case) -> None:
    denoiser = build(case)
    video, audio = case.video.clone(), case.audio.clone()
    first, _ = denoiser(video, audio, 1)
    again, _ = denoiser(video, audio, 1)
    assert torch.equal(first, again)
    assert torch.equal(video, case.video)
    assert torch.equal(audio, case.audio)
    assert not first.is_inference()  # samplers may update it in place


def test_bfloat16_stays_near_float32(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    denoiser = build(case, torch.bfloat16)
    assert denoiser.embed(case.video, case.audio).dtype == torch.bfloat16
    video, audio = denoiser(case.video, case.audio, 1)
    figures = (
        error(video, unpatchify(case.expected[1].video, GEOMETRY)),
        error(audio, rows_to_audio(case.expected[1].audio)),
    )
    with capsys.disabled():
        print(f"\nbfloat16 against float32, {case.dfile.dims.form}: video, audio {figures}")
    assert max(figures) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_on_a_gpu_a_step_gives_the_official_velocities(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    video, audio = build(case, dtype, "cuda")(case.video, case.audio, 1)
    assert not video.is_cuda  # velocities come back to where the latents are
    assert error(video, unpatchify(case.expected[1].video, GEOMETRY)) <= tolerance
    assert error(audio, rows_to_audio(case.expected[1].audio)) <= tolerance


def test_interleaved_qkv_rows_read_as_bands(tmp_path: Path) -> None:
    state = random_state("curve")
    official = dict(state)
    for name in [name for name in state if name.endswith("qkv_proj.weight")]:
        q_k_v = state[name].unflatten(0, (3, -1, 16))  # [3, H, D, C]
        official[name] = q_k_v.transpose(0, 1).flatten(0, 2).contiguous()
    bands = open_denoiser(write(state, tmp_path / "bands.safetensors"))
    shuffled = open_denoiser(write(official, tmp_path / "official.safetensors"), qkv_order="interleaved")
    for dfile in (bands, shuffled):
        share = SimpleNamespace(tp_heads=(2, 5), projected_heads=(2, 5), ffn=(64, 128))
        weights = load_denoiser(dfile, share, device="cpu", dtype=torch.float32)
        q, k, v = weights.blocks[1].qkv.dense(torch.float32).chunk(3)
        stored = state["blocks.1.attn.qkv_proj.weight"].float().chunk(3)
        for part, band in zip((q, k, v), stored, strict=True):
            assert torch.equal(part, band[2 * 16 : 5 * 16])
    states = torch.randn(4, TEXT_DIM)
    assert torch.equal(refine_text(bands, states, "cpu"), refine_text(shuffled, states, "cpu"))
