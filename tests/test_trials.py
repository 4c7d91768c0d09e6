"""The trials of compilation run: the same velocity every way, and what cannot be here is told."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import trials

SMALL = ["--device", "cpu", "--size", "small", "--blocks", "1", "--repeats", "1", "--compiler", "eager"]
pytestmark = pytest.mark.usefixtures("one_thread")


def rows_of(path: Path) -> dict:
    return {(row["shape"], row["way"]): row for row in json.loads(path.read_text())["rows"]}


def test_every_way_gives_the_plain_velocity_or_says_why_not(tmp_path, monkeypatch, capsys):
    out = tmp_path / "trials.json"
    slow = ("block compiled as it is", "between compiled, ahead")  # the one to trace, the other beside its like
    monkeypatch.setattr(trials, "WAYS", tuple(way for way in trials.WAYS if way.name not in slow))
    assert trials.main([*SMALL, "--shapes", "64x64x5", "--json", str(out)]) == 0
    rows = {way: row for (_, way), row in rows_of(out).items()}
    assert rows.keys() == {way.name for way in trials.WAYS}
    done = {way for way, row in rows.items() if row["failed"] is None}
    assert done == {way.name for way in trials.WAYS if not (way.fused or way.graph)}
    assert all(rows[way]["error"] < 1e-6 and rows[way]["seconds"] > 0 for way in done)
    assert rows["block compiled"]["graph_breaks"] == rows["between compiled"]["graph_breaks"] == 0
    assert "runtime.fused=on is for CUDA" in rows["fused+ahead"]["failed"]
    assert rows["block compiled, graph"]["failed"] == f"ConfigError: {trials.NEEDS_CUDA}"
    assert capsys.readouterr().out.count("\n| 64x64x5 |") == len(trials.WAYS)


def test_a_way_that_failed_is_not_tried_again_and_none_is_begun_late(tmp_path, monkeypatch):
    out = tmp_path / "trials.json"
    monkeypatch.setattr(trials, "WAYS", trials.WAYS[:2])
    assert trials.main([*SMALL, "--shapes", "64x64x5,64x64x22", "--json", str(out)]) == 0
    assert [key for key in rows_of(out) if key[1] == "fused"] == [("64x64x5", "fused")]
    assert trials.main([*SMALL, "--shapes", "64x64x5", "--limit", "-1", "--json", str(out)]) == 0
    assert {row["failed"] for row in rows_of(out).values()} == {"left out: the time was up"}
