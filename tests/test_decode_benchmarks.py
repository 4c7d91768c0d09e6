"""The benchmarks of decoding run, and the schedule gains what it should."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import decode_gpu, decode_kernels, parallel_decode
from benchmarks.decode_clips import apart
from h3dist.vae.forms import Product

GEMMS = ["exact", "fp8"]
RESULTS = Path(parallel_decode.__file__).parent / "results"


@pytest.mark.parametrize(
    "words", [[], ["--times", str(RESULTS / "cpu-decode-times-2026-11-29.json")]], ids=["unit", "cpu"]
)
def test_the_schedule_gains_nine_tenths_of_the_ranks(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parallel_decode.py", "schedule", *words])
    assert parallel_decode.main() == 0
    assert "| 8 | 25.0" in capsys.readouterr().out


@pytest.mark.parametrize(("batch", "fast"), [(1, False), (2, True)])
def test_a_tile_is_timed_by_either_decoder(batch, fast, monkeypatch):
    made, settings = [], decode_gpu.video_settings(**decode_gpu.TINY)
    monkeypatch.setattr(parallel_decode, "video_settings", lambda decoder_num_layers: settings)
    monkeypatch.setattr(parallel_decode, "_best", lambda work, device: made.append(work()) or 1.0)
    assert parallel_decode.tile_seconds(torch.device("cpu"), batch, fast=fast) == 1 / batch
    assert all(len(tiles) == batch for tiles in made) and len(made) == 2


def test_every_way_to_do_tiles_runs_and_gives_the_same_tile(tmp_path, capsys):
    torch.set_num_threads(1)
    out = tmp_path / "ways.json"
    words = ["--device", "cpu", "--tiny", "--no-compile", "--batches", "1,3", "--repeats", "1", "--seconds", "1e6"]
    assert decode_gpu.main([*words, "--json", str(out)]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert not any(row["failed"] for row in rows.values())
    assert {row["unit"] for row in rows.values()} == {"clip", "tile"}
    tiles = {name: row["error"] for name, row in rows.items() if row["unit"] == "tile"}
    assert all(1e-4 < error < 0.1 if "fp8" in name else error < 1e-5 for name, error in tiles.items())
    clips = [row for row in rows.values() if row["unit"] == "clip"]
    names = "diffusers, autocast", *(f"ours, fast, {g}, batch 1" for g in GEMMS), "diffusers, its pipeline's block"
    assert tuple(row["name"] for row in clips) == names
    assert [row["equal"] for row in clips[1:3]] == [True, False] and clips[2]["worst_levels"] >= 1 > clips[1]["error"]
    assert clips[3]["worst_levels"] <= 1  # it rounds on its own
    assert all(len(row["runs"]) == 1 and row["seconds"] == row["runs"][0] for row in clips)
    assert "| eager, batch 3 |" in capsys.readouterr().out


def test_how_far_frames_are_apart_is_told_in_levels():
    wanted = torch.full((2, 3, 4, 3), 100, dtype=torch.uint8)
    found = wanted.clone()
    found[1, 2, 3, 0] = 94
    error, mean, worst = apart(found, wanted)
    assert (mean, worst) == (6 / 72, 6) and error == pytest.approx(6 / (100 * 72**0.5))
    assert apart(wanted, wanted) == (0, 0, 0)


def test_a_way_that_fails_is_told_and_the_others_go_on(capsys):
    def broken(vae, example):
        raise MemoryError("no memory for it")

    ways = [decode_gpu.Way("eager", 1, decode_gpu.eager), decode_gpu.Way("broken", 1, broken)]
    vae = decode_gpu.random_video_vae(decode_gpu.video_settings(**decode_gpu.TINY), torch.device("cpu"))
    stacked = torch.randn(2, 24, 7, 2, 2)
    args = decode_gpu.arguments(["--repeats", "1", "--seconds", "1e9"])
    first, second = decode_gpu.shown(decode_gpu.tiles(vae, stacked, ways, args))
    assert first.equal and second.failed == "MemoryError: no memory for it"
    (late,) = decode_gpu.tiles(vae, stacked, ways[:1], decode_gpu.arguments(["--seconds", "0"]))
    assert "skipped" in late.failed


def test_ways_to_multiply_give_the_same_product():
    x, product = torch.randn(5, 32), Product(torch.randn(48, 32), torch.randn(48))
    first, *others = decode_kernels.ways(x, product)
    wanted = first.work()
    for way in others:
        with way.around() if torch.cuda.is_available() else nullcontext():
            found = way.work()
        torch.testing.assert_close(found + product.bias if "no bias" in way.name else found, wanted)


@pytest.mark.gpu
def test_parts_of_the_decoder_are_timed_one_by_one():
    rows = {row.part: row for row in decode_kernels.parts(1, flash4=False)}
    assert {"qkv", "down, FP8", "attention, cudnn", "norm to FP8", "gate to FP8"} <= rows.keys()
    assert rows["down, FP8"].error < 0.1 and all(row.milliseconds > 0 for row in rows.values())
