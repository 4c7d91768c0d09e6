"""Pieces of the model under every layout: what the shares compute adds up to the whole."""

from pathlib import Path

import pytest
import torch
from fp4 import EMULATED
from lockstep import HandExchange, Lockstep, Part, make_parts
from tiny_model import FFN, HEAD_DIM, HEADS, HIDDEN, TEXT_DIM, error, random_state, write
from torch import Tensor

from h3dist.attention.sdpa import sdpa
from h3dist.checkpoint.comfy import DenoiserFile, open_denoiser
from h3dist.checkpoint.shard import rank_file_bytes
from h3dist.checkpoint.tiny import write_tiny
from h3dist.geometry import Geometry
from h3dist.model.block import View, attend
from h3dist.model.denoiser import Denoiser
from h3dist.model.elementwise import PLAIN
from h3dist.model.exchange import Alone
from h3dist.model.linear import Fp4Kernels, Fp4Linear, dense_linear
from h3dist.model.modulation import tables
from h3dist.model.refiner import refine_text
from h3dist.model.rotary import rotation
from h3dist.model.weights import load_denoiser, read_block
from h3dist.packing import Packing, pack_t2va

GEOMETRY = Geometry(32, 64, 22)
TIMES = (0.4,), (0.7,)
CPU = torch.device("cpu")
TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def dfile(tmp_path_factory: pytest.TempPathFactory) -> DenoiserFile:
    path = tmp_path_factory.mktemp("shares") / "denoiser.safetensors"
    return open_denoiser(write(random_state("full", seed=3), path))


def view(positions: Tensor, inv_freq: Tensor) -> View:
    return View((), rotation(positions, inv_freq, torch.float32), Alone(), sdpa, dense_linear)


@pytest.mark.parametrize("tp", [2, 6])
def test_partial_attention_and_mlp_of_all_shares_sum_to_the_whole(dfile: DenoiserFile, tp: int) -> None:
    packing = pack_t2va(GEOMETRY, [1] * 5)
    h = torch.randn(packing.rows, HIDDEN)
    at = view(packing.position_ids, 1 / 10000 ** (torch.arange(2) / 2))

    def partials(heads: tuple[int, int], ffn: tuple[int, int]) -> tuple[Tensor, Tensor]:
        block = read_block(dfile, "blocks.1", heads, ffn, device=CPU, dtype=torch.float32)
        assert block.qkv.shape == (3 * (heads[1] - heads[0]) * HEAD_DIM, HIDDEN)
        assert block.fc2.shape == (HIDDEN, ffn[1] - ffn[0])
        activated = PLAIN.activate(dense_linear(h, block.fc1))
        return dense_linear(attend(h, block, at), block.out), dense_linear(activated, block.fc2)

    whole = partials((0, HEADS), (0, FFN))
    parts = [partials(part.tp_heads, part.ffn) for part in make_parts(packing.rows, HEADS, FFN, 1, tp)]
    for name, total, pieces in zip(("attention", "mlp"), whole, zip(*parts, strict=True), strict=True):
        assert error(sum(pieces), total) <= TOLERANCE, name
        assert error(pieces[0], total) > 0.1  # a share alone is not the whole


def run_layout(
    dfile: DenoiserFile, packing: Packing, sp: int, tp: int, kernels: Fp4Kernels | None = None
) -> list[tuple[Tensor, Tensor, int]]:
    """Velocities and number of amax agreements of every rank of a layout, for one random step."""
    torch.manual_seed(5)
    dims = dfile.dims
    video, audio = random_latents(packing.geometry)
    text = refine_text(dfile, torch.randn(packing.text_rows, dims.text_dim), CPU)
    modulation = tables(dfile, *TIMES, device=CPU, dtype=torch.float32)

    def rank_main(rank: int, part: Part, exchange: HandExchange) -> tuple[Tensor, Tensor, int]:
        weights = load_denoiser(dfile, part, device=CPU, dtype=torch.float32)
        linear = dense_linear if kernels is None else Fp4Linear(exchange, kernels)
        denoiser = Denoiser(weights, packing, part, modulation, exchange, sdpa, text, linear)
        return *denoiser(video, audio, 0), exchange.amax_calls

    return Lockstep(make_parts(packing.rows, dims.heads, dims.ffn, sp, tp)).run(rank_main)


def random_latents(geometry: Geometry) -> tuple[Tensor, Tensor]:
    video = torch.randn(1, 24, geometry.latent_t, geometry.latent_h, geometry.latent_w)
    return video, torch.randn(1, 32, 2, geometry.audio_latents)


LAYOUTS = [(2, 1), (4, 1), (7, 1), (1, 2), (1, 4), (1, 6), (1, 7), (2, 2), (2, 3), (3, 2)]
FEW_ROWS = Geometry(32, 32, 5)  # 23 rows with 5 of text: of 7 ranks the sixth has 3 and the last none


@pytest.mark.parametrize("geometry", [GEOMETRY, FEW_ROWS], ids=["ragged", "few"])
@pytest.mark.parametrize(("sp", "tp"), LAYOUTS)
def test_every_layout_gives_the_velocities_of_one_rank(
    dfile: DenoiserFile, geometry: Geometry, sp: int, tp: int
) -> None:
    packing = pack_t2va(geometry, [1] * 5)
    ((video, audio, _),) = run_layout(dfile, packing, 1, 1)
    results = run_layout(dfile, packing, sp, tp)
    for got_video, got_audio, amax_calls in results:
        assert error(got_video, video) <= TOLERANCE
        assert error(got_audio, audio) <= TOLERANCE
        assert torch.equal(got_video, results[0][0])  # equal on every rank
        assert torch.equal(got_audio, results[0][1])
        assert amax_calls == 0  # dense weights need no agreement


def test_the_layouts_include_short_and_empty_ranks() -> None:
    rows = [b - a for a, b in (part.rows for part in make_parts(23, HEADS, FFN, 7, 1))]
    assert pack_t2va(FEW_ROWS, [1] * 5).rows == 23
    assert rows == [4, 4, 4, 4, 4, 3, 0]


@pytest.fixture(scope="module")
def nvfp4_dfile(tmp_path_factory: pytest.TempPathFactory) -> DenoiserFile:
    return open_denoiser(write_tiny(tmp_path_factory.mktemp("nvfp4"), "curve")["denoiser"])


@pytest.mark.parametrize("geometry", [GEOMETRY, FEW_ROWS], ids=["ragged", "few"])
@pytest.mark.parametrize(("sp", "tp"), [(7, 1), (1, 6), (2, 3)])
def test_quantised_activations_are_the_same_under_every_layout(
    nvfp4_dfile: DenoiserFile, geometry: Geometry, sp: int, tp: int
) -> None:
    packing = pack_t2va(geometry, [1] * 5)
    ((video, audio, _),) = run_layout(nvfp4_dfile, packing, 1, 1, EMULATED)
    ((dense_video, _, _),) = run_layout(nvfp4_dfile, packing, 1, 1)
    assert error(dense_video, video) > 0.01  # the activations are quantised indeed
    for got_video, got_audio, amax_calls in run_layout(nvfp4_dfile, packing, sp, tp, EMULATED):
        assert error(got_video, video) <= TOLERANCE
        assert error(got_audio, audio) <= TOLERANCE
        assert amax_calls == 4 * nvfp4_dfile.dims.layers


def test_a_rank_embeds_its_own_rows_alone(dfile: DenoiserFile, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = pack_t2va(GEOMETRY, [1] * 5)
    part = make_parts(packing.rows, HEADS, FFN, 3, 1)[1]
    weights = load_denoiser(dfile, part, device=CPU, dtype=torch.float32)
    modulation = tables(dfile, *TIMES, device=CPU, dtype=torch.float32)
    denoiser = Denoiser(weights, packing, part, modulation, Alone(), sdpa, torch.randn(5, HIDDEN))
    projected = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        "h3dist.model.denoiser.F.linear", lambda x, *rest: projected.append(x.shape[0]) or linear(x, *rest)
    )
    denoiser.embed(*random_latents(GEOMETRY))
    assert sum(projected) == part.rows[1] - part.rows[0]


@pytest.mark.parametrize("form", ["full", "curve"])
@pytest.mark.parametrize("tp", [1, 6])
def test_a_rank_asks_of_the_file_what_was_planned(form: str, tp: int, tmp_path: Path) -> None:
    path = write(random_state(form), tmp_path / "denoiser.safetensors")
    for rank, part in enumerate(make_parts(100, HEADS, FFN, 1, tp)):
        dfile = open_denoiser(path)
        before = dfile.file.bytes_read
        load_denoiser(dfile, part, device=CPU, dtype=torch.bfloat16)
        tables(dfile, *TIMES, device=CPU, dtype=torch.bfloat16)
        if rank == 0:
            refine_text(dfile, torch.randn(3, TEXT_DIM), CPU)
        planned = rank_file_bytes(dfile, part.tp_heads, part.ffn, refiner=rank == 0)
        assert dfile.file.bytes_read - before == planned
