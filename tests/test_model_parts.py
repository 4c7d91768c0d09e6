"""Rotation, modulation tables and normalisation against diffusers' and against their formulas."""

from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed, _apply_rotary_emb
from oracle import transformer
from tiny_model import (
    CURVE_GRID,
    CURVE_RANK,
    HIDDEN,
    LAYERS,
    TIME_FREQ,
    error,
    random_state,
    write,
)

from h3dist.checkpoint.comfy import open_denoiser
from h3dist.geometry import Geometry
from h3dist.model.elementwise import Run, add_gated, modulated
from h3dist.model.modulation import PAIRS, STREAMS, interpolate, sinusoid, tables
from h3dist.model.rotary import rotate, rotation
from h3dist.packing import pack_t2va

TIMES_V, TIMES_A = (0.0, 0.31, 0.875, 1.0), (0.0, 0.613, 0.97, 1.0)
TOLERANCE = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_the_official_one(dtype: torch.dtype) -> None:
    positions = pack_t2va(Geometry(96, 64, 39), [1] * 7).position_ids
    official = MiniMaxH3RotaryPosEmbed(rope_freq_dim=4)
    x = torch.randn(positions.shape[0], 3, 32, dtype=dtype)
    rotated = rotate(x, rotation(positions, official.inv_freq, dtype))
    expected = _apply_rotary_emb(x[None], *official(positions))[0]
    assert rotated.dtype == dtype
    assert error(rotated, expected) <= (1e-6 if dtype == torch.float32 else 2**-7)
    assert torch.equal(rotated[..., 24:], x[..., 24:])  # 2 * 3 * 4 channels turn, the others pass
    assert rotated.is_contiguous()


def test_rotation_angles_are_float32_products_of_float32_positions() -> None:
    positions = torch.tensor([[1234.5678901, -3.25, 31.0]], dtype=torch.float64)
    inv_freq = torch.tensor([1.0, 0.1])
    angles = rotation(positions, inv_freq, torch.float32)
    expected = (positions.float()[0, :, None] * inv_freq).flatten()
    assert torch.equal(angles.cos[0, 0], expected.cos())
    assert torch.equal(angles.sin[0, 0], expected.sin())


@pytest.mark.parametrize("form", ["full", "curve"])
def test_tables_hold_the_official_modulation_of_every_step(form: str, tmp_path: Path) -> None:
    state = random_state(form)
    dfile = open_denoiser(write(state, tmp_path / "denoiser.safetensors"))
    found = tables(dfile, TIMES_V, TIMES_A, device="cpu", dtype=torch.float32)
    model = transformer(dfile)
    steps = len(TIMES_V)
    temb = {
        stream: model.time_embedder(model.time_proj(torch.tensor(times)))
        for stream, times in zip(STREAMS, (TIMES_V, TIMES_A), strict=True)
    }
    assert len(found.blocks) == LAYERS
    for block, table in zip(model.transformer_blocks, found.blocks, strict=True):
        assert table.shape == (steps, len(PAIRS), 6, HIDDEN)
        for row, (stream, tag) in enumerate(PAIRS):
            official = torch.stack(block.adaln_proj(temb[stream]), dim=1)[tag::3]  # [n, 6, C]
            official[:, (1, 4)] += 1
            assert error(table[:, row], official) <= TOLERANCE
    for row, stream in enumerate(STREAMS):
        hidden = torch.randn(steps, HIDDEN)
        official = model.norm_out(hidden, temb[stream], torch.arange(steps))
        shift, factor = found.final[:, row].unbind(1)
        normed = torch.nn.functional.rms_norm(hidden, (HIDDEN,), state["final_layer.norm.weight"].float(), 1e-5)
        assert error(normed * factor + shift, official) <= TOLERANCE


def test_full_tables_in_bfloat16_are_diffusers_own(tmp_path: Path) -> None:
    state = random_state("full")
    dfile = open_denoiser(write(state, tmp_path / "denoiser.safetensors"))
    table = tables(dfile, TIMES_V, TIMES_A, device="cpu", dtype=torch.bfloat16).blocks[1]
    assert table.dtype == torch.bfloat16
    model = transformer(dfile)
    temb = model.time_embedder(model.time_proj(torch.tensor(TIMES_V)))  # float32, as in a mixed-precision model
    projection = model.transformer_blocks[1].adaln_proj.to(torch.bfloat16)
    official = torch.stack(projection(temb), dim=1)[0::3]
    official[:, (1, 4)] += 1
    assert torch.equal(table[:, 0], official)


def test_curve_tables_are_computed_in_float32(tmp_path: Path) -> None:
    dfile = open_denoiser(write(random_state("curve"), tmp_path / "denoiser.safetensors"))
    narrow = tables(dfile, TIMES_V, TIMES_A, device="cpu", dtype=torch.bfloat16)
    wide = tables(dfile, TIMES_V, TIMES_A, device="cpu", dtype=torch.float32)
    for small, large in zip((*narrow.blocks, narrow.final), (*wide.blocks, wide.final), strict=True):
        assert torch.equal(small, large.to(torch.bfloat16))  # rounded once, at the end


def test_the_sinusoid_is_cosine_first_and_takes_time_unscaled() -> None:
    s = sinusoid(torch.tensor([0.0, 0.5]), TIME_FREQ)
    assert s[0].tolist() == [1.0] * (TIME_FREQ // 2) + [0.0] * (TIME_FREQ // 2)
    assert s[1, 0] == torch.tensor(0.5).cos()
    assert s[1, TIME_FREQ // 2] == torch.tensor(0.5).sin()


def test_the_curve_is_linear_between_grid_points_and_clamped_outside() -> None:
    curve = torch.randn(CURVE_GRID, CURVE_RANK)
    last = CURVE_GRID - 1
    places = torch.tensor([0.0, 3.0, 3.25, last - 1, last - 0.5, last])
    found = interpolate(curve, places / last)
    torch.testing.assert_close(found[0], curve[0])
    torch.testing.assert_close(found[1], curve[3])
    torch.testing.assert_close(found[2], 0.75 * curve[3] + 0.25 * curve[4])
    torch.testing.assert_close(found[4], (curve[-2] + curve[-1]) / 2)
    torch.testing.assert_close(found[5], curve[-1])
    outside = interpolate(curve, torch.tensor([-0.5, 1.5]))
    assert torch.equal(outside, curve[[0, -1]])


def test_runs_are_modulated_and_gated_apart() -> None:
    x, y = torch.randn(7, HIDDEN), torch.randn(7, HIDDEN)
    norm, table = torch.rand(HIDDEN) + 0.5, torch.randn(3, 6, HIDDEN)
    runs = (Run(0, 2, 1), Run(2, 6, 0), Run(6, 7, 2))
    row_of = torch.tensor([1, 1, 0, 0, 0, 0, 2])
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
    expected = normed * table[row_of, 1] + table[row_of, 0]
    torch.testing.assert_close(modulated(x, norm, table, runs), expected)
    before = x.clone()
    add_gated(x, y, table[:, 5], runs)
    torch.testing.assert_close(x, before + table[row_of, 5] * y)
