"""The decoder for several tiles a call against diffusers' modules one tile a call, and each kernel against its plain
form. Triton's kernels run on a GPU, or on a CPU by its interpreter where triton is installed and TRITON_INTERPRET=1
is set; the rest runs anywhere.
"""

import importlib.util
import os
from dataclasses import replace
from functools import partial
from itertools import product as pairs
from typing import Any

import pytest
import torch
from attention_packages import flash4, install
from torch import Tensor

from h3dist.errors import MissingDependency
from h3dist.spread import Extra, spread
from h3dist.tiles import cut_video
from h3dist.vae import VideoVae, choice, narrow
from h3dist.vae.fast import FastDecoder
from h3dist.vae.forms import PLAIN, Product, Rows, Turns
from h3dist.vae.frames import finish
from h3dist.vae.narrow import NARROW
from h3dist.vae.video import _build, _wanted, under
from h3dist.vae.weights import read_config

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16]
GEMMS = ["exact", "fp8"]
SIZES = [
    {"decoder_num_layers": 3, "decoder_num_attention_heads": 3, "decoder_attention_head_dim": 16},
    {"decoder_num_layers": 1, "decoder_num_attention_heads": 4, "decoder_attention_head_dim": 64},
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_vae(size: dict[str, int], device: str, **how: Any) -> VideoVae:
    """Every tensor counts: registers, biases, norms and scales are all far from what leaves things as they are."""
    from diffusers import AutoencoderKLMiniMaxH3

    settings = read_config(None, AutoencoderKLMiniMaxH3) | size
    shapes = {name: meta.shape for name, meta in _build(settings, _wanted(False, True)).state_dict().items()}
    state = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        spread = shape[1:].numel() ** -0.5 if len(shape) > 1 else 0.3
        state[name] = draw(*shape, seed=seed) * spread + (len(shape) == 1 and "bias" not in name)
    return VideoVae.from_state(state, settings, device, **how)


def one_by_one(vae: VideoVae, latents: Tensor) -> Tensor:
    """Each of the tiles [B, 24, 7, y, x] by diffusers' modules."""
    job = next(cut_video(7, *latents.shape[3:]).jobs())
    return torch.stack([vae.decode_job(tile[None], job) for tile in latents])


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES, ids=["narrow", "wide"])
@pytest.mark.parametrize(("B", "y", "x"), [(1, 1, 2), (3, 2, 3), (2, 3, 1)])
def test_it_computes_what_diffusers_modules_do(device, size, B, y, x):
    vae = random_vae(size, device)
    latents = draw(B, 24, 7, y, x).to(device)
    wanted = one_by_one(vae, latents)
    found = FastDecoder.of(vae.parts, vae.device)(latents)
    assert found.shape == wanted.shape == (B, 3, 22, 16 * y, 16 * x) and found.dtype == wanted.dtype
    assert relative(found, wanted) < (1e-6 if device == "cpu" else 2e-3)
    assert wanted.std() > 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_held_once_and_the_modules_still_give_the_same_bits(device):
    vae = random_vae(SIZES[0], device)
    latents = draw(1, 24, 7, 2, 2).to(device)
    before = one_by_one(vae, latents)
    fast = FastDecoder.of(vae.parts, vae.device)
    assert torch.equal(one_by_one(vae, latents), before)
    for block, layer in zip(vae.parts["decoder"].transformer_blocks, fast.layers, strict=True):
        C = block.attn.to_k.weight.shape[0]
        assert block.attn.to_k.weight.data_ptr() == layer.qkv.weight[C:].data_ptr()
        assert block.attn.to_v.bias.data_ptr() == layer.qkv.bias[2 * C :].data_ptr()


def test_attention_by_flash_attn_4_where_it_is_installed(monkeypatch):
    vae, latents = random_vae(SIZES[0], "cpu"), draw(1, 24, 7, 2, 3)
    fast = FastDecoder.of(vae.parts, vae.device)
    with pytest.raises(MissingDependency, match="flash-attn-4"):
        fast(latents, "flash4")
    install(monkeypatch, flash4())
    assert 0 < relative(fast(latents, "flash4"), fast(latents)) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES, ids=["narrow", "wide"])
def test_fp8_products_are_near_and_their_weights_stand_in_the_place_of_the_modules(device, size):
    """Near the plain forms, of which a rounding now and then falls to the other side; and near exact products."""
    vae = random_vae(size, device)
    latents = draw(3, 24, 7, 2, 3).to(device)
    exact = FastDecoder.of(vae.parts, vae.device)(latents)
    beside = FastDecoder.of(vae.parts, vae.device, "fp8")
    found = random_vae(size, device, fast=True, gemm="fp8")
    assert len(vae.parts["decoder"].transformer_blocks) == len(beside.layers) == size["decoder_num_layers"]
    assert len(found.parts["decoder"].transformer_blocks) == 0 and found.fast.heads == beside.heads
    assert all(layer.down.weight.codes_NK.element_size() == 1 for layer in found.fast.layers)
    raw = found.fast(latents)
    assert raw.dtype == exact.dtype and torch.equal(raw, beside(latents))
    assert 3e-3 < relative(raw, exact) < 0.1
    assert relative(raw, replace(beside, forms=NARROW)(latents)) < (1e-6 if device == "cpu" else 4e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_tile_is_the_same_bits_at_every_place_of_a_batch_and_among_any_others(device, gemm):
    vae = random_vae(SIZES[1], device)
    fast = FastDecoder.of(vae.parts, vae.device, gemm)
    latents = draw(4, 24, 7, 3, 2).to(device)
    wanted = fast(latents)
    latents[0] = torch.nan
    assert torch.equal(fast(latents)[1:], wanted[1:]), "NaN stays in its tile"
    latents[0] = latents[3]
    assert torch.equal(fast(latents.flip(0))[0], wanted[3]) and torch.equal(fast(latents)[0], wanted[3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gemm", GEMMS)
def test_frames_do_not_depend_on_the_number_of_ranks(device, gemm):
    """Calls as the schedules of 1 to 8 ranks have them: five tiles of a chunk in calls of 2, 2 and 1."""
    vae, calls = random_vae(SIZES[1], device), []
    fast = FastDecoder.of(vae.parts, vae.device, gemm)
    vae = replace(vae, fast=lambda tiles: calls.append(len(tiles)) or fast(tiles))
    latents = draw(1, 24, 12, 2, 54).to(device)
    cuts = cut_video(*latents.shape[2:])
    wanted = torch.cat(list(vae.decode(latents, 2)))
    restored, jobs = vae.statistics.restore(latents), list(cuts.jobs())
    for ranks in range(1, 9):
        schedule, tiles = spread([[1.0] * 5] * 2, ranks, Extra(0.1, 0.7), 2), {}
        for rank, chunk in pairs(range(ranks), range(2)):
            for call in schedule.calls(rank, chunk, 2):
                found = vae.decode_jobs(restored, [jobs[5 * chunk + place] for place in call], 2)
                tiles |= {(chunk, place): tile for place, tile in zip(call, found, strict=True)}
        assert torch.equal(torch.cat(list(finish([tiles[place] for place in sorted(tiles)], cuts))), wanted)
    assert set(calls) == {2}, "the last call of a chunk is filled up"
    plain = torch.cat(list(replace(vae, fast=None).decode(latents))).int()
    assert (plain - wanted.int()).abs().max() <= (20 if gemm == "fp8" else 0 if device == "cpu" else 2)


@pytest.mark.gpu
def test_the_host_waits_for_nothing_but_a_chunk_of_frames():
    vae, latents = random_vae(SIZES[1], "cuda"), draw(1, 24, 17, 2, 54).cuda()
    vae = replace(vae, fast=FastDecoder.of(vae.parts, vae.device))
    wanted = list(vae.decode(latents, 3))  # kernels are compiled here
    restored, cuts = vae.statistics.restore(latents), cut_video(*latents.shape[2:])
    tiles = (tile for jobs in cuts.calls(3) for tile in vae.decode_jobs(restored, jobs, 3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = list(finish(tiles, cuts, ahead=1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("T", "h", "w"), [(2, 3, 4), (12, 18, 54)])
def test_a_tile_is_made_of_the_latents_under_it(T, h, w):
    latents = draw(1, 24, T, h, w)
    for job in cut_video(T, h, w).jobs():
        assert torch.equal(under(latents, job), latents[:, :, list(job.latents), slice(*job.rows), slice(*job.cols)])


@pytest.mark.gpu
def test_a_tile_of_the_released_width_is_as_near_as_float16_allows():
    """Two layers, whole tiles, an odd batch: against one tile a call, and by each attention kernel alone."""
    size = {"decoder_num_layers": 2, "decoder_num_attention_heads": 32, "decoder_attention_head_dim": 64}
    vae = random_vae(size, "cuda")
    latents = draw(7, 24, 7, 16, 16).cuda()
    wanted = one_by_one(vae, latents)
    fast = FastDecoder.of(vae.parts, vae.device)
    for attention in (None, "cudnn", "flash"):
        found = fast(latents, attention)
        assert max(relative(*pair) for pair in zip(found, wanted, strict=True)) < 2e-3
        assert torch.equal(fast(latents.roll(1, 0), attention), found.roll(1, 0)), "bits depend on the place"


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """As far apart as a few roundings to the dtype allow."""
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(("N", "C"), [(1, 16), (5, 48), (9, 1025)])
def test_kernel_of_addition_and_norm(device, dtype, N, C):
    x, y = draw(N, C).to(device), draw(N, C, seed=1).to(device, dtype)
    scale, weight = draw(C, seed=2).to(device), 1 + draw(C, seed=3).to(device) / 4
    other = x.clone()
    close(choice.load().normed(x, weight, 1e-5, dtype), PLAIN.normed(x, weight, 1e-5, dtype), dtype)
    found = choice.load().add_normed(x, y, scale, weight, 1e-5)
    wanted = PLAIN.add_normed(other, y, scale, weight, 1e-5)
    assert found.dtype == wanted.dtype == dtype
    close(found, wanted, dtype)
    close(x, other, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(("N", "h", "D", "R"), [(5, 3, 16, 6), (2, 4, 64, 24), (3, 1, 8, 4), (1, 2, 20, 3)])
def test_kernel_of_norm_and_rotation(device, dtype, N, h, D, R):
    qkv, angles = (2 * draw(N, 3, h, D)).to(device, dtype), 3 * draw(N, R, seed=1)
    turns = Turns(angles.cos().to(device, dtype), angles.sin().to(device, dtype))
    other, before = qkv.clone(), qkv.clone()
    choice.load().turn(qkv, turns, 1e-5)
    PLAIN.turn(other, turns, 1e-5)
    close(qkv, other, dtype)
    assert torch.equal(qkv[:, 2], before[:, 2]) and not torch.equal(qkv[:, 1], before[:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("width", [1, 16, 1025])
def test_kernel_of_the_gate(device, dtype, width):
    up_gate = (4 * draw(5, 2 * width)).to(device, dtype)
    found, wanted = choice.load().gate(up_gate), PLAIN.gate(up_gate)
    assert found.shape == (5, width)
    torch.testing.assert_close(found, wanted, rtol={torch.float32: 2e-6, torch.float16: 4e-3}[dtype], atol=1e-5)


def nearly(found: Rows, wanted: Rows, apart: float = 0.01) -> None:
    """Of what was a last bit apart before it was rounded, some few codes and scales are one step apart."""
    assert found.codes_NK.dtype == wanted.codes_NK.dtype == torch.float8_e4m3fn
    assert found.scale_N1.dtype == torch.float32 and found.scale_N1.shape == wanted.scale_N1.shape
    assert (found.scale_N1 != wanted.scale_N1).float().mean() <= 20 * apart
    numbers, due = (rows.codes_NK.float() * rows.scale_N1 for rows in (found, wanted))
    if INTERPRETED:  # it rounds ties up, and gives half of what is rounded up to a power of two (triton 3.6)
        power = wanted.codes_NK.view(torch.uint8) & 7 == 0
        numbers, apart = torch.where(power, due, numbers), 0.05
    assert (numbers != due).float().mean() <= apart
    assert ((numbers - due).abs() <= (due.abs() / 8).maximum(wanted.scale_N1 / 512)).all(), "one step"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(("N", "C"), [(2, 16), (5, 48), (9, 1025)])
def test_kernels_that_round_rows_to_fp8(device, dtype, N, C):
    """Zeros and rows of very large and very small numbers have scales too."""
    load = partial(choice.load, "fp8")
    size = torch.logspace(-5, 4, N).view(N, 1)
    x, y = (draw(N, C) * size).to(device), (draw(N, C, seed=1) * size).to(device, dtype)
    x[-1] = y[-1] = 0
    scale, weight = draw(C, seed=2).to(device), 1 + draw(C, seed=3).to(device) / 4
    other = x.clone()
    nearly(load().normed(x, weight, 1e-5, dtype), NARROW.normed(x, weight, 1e-5, dtype))
    nearly(load().add_normed(x, y, scale, weight, 1e-5), NARROW.add_normed(other, y, scale, weight, 1e-5))
    torch.testing.assert_close(x.cpu() / size, other.cpu() / size, rtol=2e-6, atol=2e-6)  # sums may cancel
    nearly(load().operand(y), NARROW.operand(y), apart=0)
    up_gate = torch.cat([y, draw(N, C, seed=4).to(device, dtype)], dim=1)
    nearly(load().gate(up_gate), NARROW.gate(up_gate))


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "M", "K"), [(1, 16, 32), (1797, 6144, 2048), (7 * 1797, 2048, 8192), (333, 48, 144)])
def test_fp8_product_by_torchs_gemm(N, M, K):
    """Rows and biases of very different sizes, any number of rows, sums as long as the widest."""
    x = narrow.operand((draw(N, K) * torch.logspace(-2, 2, N).view(N, 1)).cuda())
    product = narrow.narrowed(Product(draw(M, K, seed=1).cuda() * K**-0.5, draw(M, seed=2).cuda().half()))
    found, wanted = narrow.scaled_linear(x, product), narrow.linear(x, product)
    assert found.dtype == torch.float16
    worst = (found.float() - wanted.float()).norm(dim=1) / wanted.float().norm(dim=1)
    assert worst.max() < 3e-3


def test_fp8_product_is_that_of_what_the_codes_say():
    weight, bias, rows = draw(7, 12, seed=1), draw(7, seed=2), 3 * draw(5, 12)
    x, product = narrow.operand(rows), narrow.narrowed(Product(weight, bias))
    said = [part.codes_NK.double() * part.scale_N1.double() for part in (x, product.weight)]
    torch.testing.assert_close(narrow.linear(x, product).double(), said[0] @ said[1].T + bias, rtol=1e-6, atol=1e-6)
    assert all(relative(part, given) < 0.05 for part, given in zip(said, (rows, weight), strict=True))


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_the_error_says_so():
    with pytest.raises(MissingDependency, match=r"decode\.fast=on needs triton"):
        choice.load()
