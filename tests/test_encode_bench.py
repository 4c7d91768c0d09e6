"""The benchmark of the text encoder runs: every way gives a run's states, and leaves the encoder as it was."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import encode_gpu
from benchmarks.random_encoder import random_encoder, settings
from h3dist.checkpoint.formats import Int8Weight, PlainWeight
from h3dist.model.reused import plain_fill
from h3dist.text.layers import StoredEmbedding, StoredLinear

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_way_gives_the_states_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(encode_gpu, "triton_fill", lambda: plain_fill)  # the kernel's place, on a CPU
    out = tmp_path / "encode.json"
    words = ["--device", "cpu", "--tiny", "--layers", "3", "--tokens", "20", "--repeats", "1", "--json", str(out)]
    assert encode_gpu.main(words) == 0
    rows = {(row["name"], row["rows"]): row for row in json.loads(out.read_text())["rows"]}
    assert {rows_ for name, rows_ in rows if name in encode_gpu.WAYS} == {20, 20 + 16 + 2}
    for (name, _), row in rows.items():
        assert row["failed"] is None and row["seconds"] > 0, row
        if name in encode_gpu.WAYS and name != encode_gpu.RANDOM:
            assert row["error"] < 1e-6, row
    assert {name for name, _ in rows} - encode_gpu.WAYS.keys() == {
        "every layer made dense, alone",
        "every layer's products, alone",
        "vision tower, alone",
    }
    assert "after release 0.000 GB" in capsys.readouterr().out


def test_a_way_that_cannot_be_is_told_and_leaves_the_encoder_as_it_was(monkeypatch):
    encoder, clock = random_encoder(settings(tiny=True), 3, CPU), encode_gpu.Clock(CPU, 1)
    before = dict(encoder.model.named_modules())

    def broken() -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(encode_gpu, "triton_fill", lambda: lambda weight, out: broken())
    row, found = encode_gpu.tried("x", encode_gpu.by_triton_in_place, encoder, encode_gpu.text(7), clock)
    assert row.failed == "RuntimeError: no such kernel" and found is None
    assert dict(encoder.model.named_modules()) == before
    _, right = encode_gpu.tried("x", encode_gpu.as_it_is, encoder, encode_gpu.text(7), clock)
    _, other = encode_gpu.tried("x", encode_gpu.by_nothing, encoder, encode_gpu.text(7), clock)
    assert encode_gpu.relative_error(other, right) > 0.1, "one matrix a shape is another encoder"


def test_a_random_encoder_is_stored_as_the_released_one_is():
    encoder = random_encoder(settings(tiny=True), 3, CPU)
    linears = [(name, m) for name, m in encoder.model.named_modules() if isinstance(m, StoredLinear)]
    decoder = [(name, m.stored) for name, m in linears if name.startswith("language_model.")]
    assert len(decoder) == 3 * 7 and [m for _, m in decoder] == [m.stored for m in encode_gpu.quantised(encoder)]
    for name, stored in decoder:
        assert stored.full_precision
        assert (stored.pre_quant_scale is not None) == name.endswith(("o_proj", "down_proj"))
    vision = [m.stored for name, m in linears if name.startswith("visual.")]
    assert all(isinstance(stored, PlainWeight) and stored.tensor.dtype == torch.bfloat16 for stored in vision)
    table = encoder.model.language_model.embed_tokens
    assert isinstance(table, StoredEmbedding) and isinstance(table.stored, Int8Weight)
