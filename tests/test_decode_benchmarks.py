"""The benchmarks of decoding run, and the schedule gains what it should."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import decode_gpu, parallel_decode

RESULTS = Path(parallel_decode.__file__).parent / "results"


@pytest.mark.parametrize(
    "words", [[], ["--times", str(RESULTS / "cpu-decode-times-2026-11-29.json")]], ids=["unit", "cpu"]
)
def test_the_schedule_gains_nine_tenths_of_the_ranks(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parallel_decode.py", "schedule", *words])
    assert parallel_decode.main() == 0
    assert "| 8 | 25.0" in capsys.readouterr().out


def test_every_way_to_do_tiles_runs_and_gives_the_same_tile(tmp_path, capsys):
    torch.set_num_threads(1)
    out = tmp_path / "ways.json"
    words = ["--device", "cpu", "--tiny", "--no-compile", "--batches", "1,3", "--repeats", "1", "--json", str(out)]
    assert decode_gpu.main(words) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert not any(row["failed"] for row in rows.values())
    assert rows["diffusers, whole clip"]["error"] < 1e-5
    assert rows["batch 3, float32"]["error"] < 1e-5 < rows["batch 3, float16"]["error"] < 1e-1
    assert "| batch 1, float16, channels last |" in capsys.readouterr().out
