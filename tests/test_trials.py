"""The trials of compilation run: the same velocity every way, and what cannot be here is told."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import trials
from h3dist.errors import ConfigError

SMALL = ["--device", "cpu", "--size", "small", "--blocks", "1", "--repeats", "1", "--compiler", "eager"]
pytestmark = pytest.mark.usefixtures("one_thread")


def rows_of(path: Path) -> dict:
    return {(row["shape"], row["way"]): row for row in json.loads(path.read_text())["rows"]}


def test_every_way_gives_the_plain_velocity_or_says_why_not(tmp_path, monkeypatch, capsys):
    out = tmp_path / "trials.json"
    monkeypatch.setattr(
        trials, "WAYS", tuple(way for way in trials.WAYS if way.name != "block compiled as it is")
    )  # slow
    assert trials.main([*SMALL, "--shapes", "64x64x5", "--json", str(out)]) == 0
    rows = {way: row for (_, way), row in rows_of(out).items()}
    assert rows.keys() == {way.name for way in trials.WAYS}
    done = {way for way, row in rows.items() if row["failed"] is None}
    assert done == {way.name for way in trials.WAYS if not (way.fused or way.graph)}
    assert all(rows[way]["error"] < 1e-6 and rows[way]["seconds"] > 0 for way in done)
    assert rows["block compiled"]["graph_breaks"] == rows["between compiled"]["graph_breaks"] == 0
    assert "runtime.fused=on is for CUDA" in rows["fused"]["failed"]
    assert rows["block compiled: graph"]["failed"] == f"ConfigError: {trials.NEEDS_CUDA}"
    assert capsys.readouterr().out.count("\n| 64x64x5 |") == len(trials.WAYS)


def test_ways_are_chosen_by_name_and_what_is_told_is_against_the_first_that_ran(tmp_path):
    out = tmp_path / "trials.json"
    words = [*SMALL, "--shapes", "64x64x5", "--ways", "fused,between compiled,plain", "--json", str(out)]
    assert trials.main(words) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["fused", "between compiled", "plain"]
    assert rows[0]["failed"] and rows[1]["to_first"] == 1 and rows[1]["error"] == 0 and 0 < rows[2]["error"] < 1e-6
    with pytest.raises(ConfigError, match=r"--ways 'fused graph'.*did you mean"):
        trials.main([*words[:-4], "--ways", "fused graph"])


def test_a_first_call_that_takes_too_long_is_given_up_whoever_swallows_the_first_signal(tmp_path, monkeypatch):
    def endless(*_):
        try:
            time.sleep(20)
        except BaseException:
            time.sleep(20)

    out, begun = tmp_path / "trials.json", time.monotonic()
    monkeypatch.setattr(trials, "made", endless)
    monkeypatch.setattr(trials, "AGAIN", 0.2)
    words = ["--shapes", "64x64x5", "--ways", "plain,block compiled", "--first", "0.2", "--json", str(out)]
    assert trials.main([*SMALL, *words]) == 0
    told = {row["failed"] for row in rows_of(out).values()}
    assert told == {"given up: its first call took more than 0.2 s"} and time.monotonic() - begun < 15


def test_blocks_are_compiled_once(monkeypatch):
    found = []
    monkeypatch.setattr(trials, "line", lambda row: found.append(trials.torch._dynamo.utils.counters["stats"].copy()))
    words = ["--blocks", "3", "--shapes", "64x64x5", "--ways", "block compiled"]
    assert trials.main([*SMALL, *words]) == 0
    assert found[0]["unique_graphs"] == 1


@pytest.mark.gpu
def test_a_graph_gives_what_it_was_captured_from(tmp_path):
    out = tmp_path / "trials.json"
    words = ["--device", "cuda", "--size", "small", "--shapes", "64x64x22", "--repeats", "3", "--json", str(out)]
    assert trials.main([*words, "--ways", "plain,reused,fused,fused: graph"]) == 0
    rows = {way: row for (_, way), row in rows_of(out).items()}
    assert {row["failed"] for row in rows.values()} == {None}
    assert 0 < rows["fused"]["error"] < 0.05
    assert rows["fused: graph"]["error"] == pytest.approx(rows["fused"]["error"])


def test_a_way_that_failed_is_not_tried_again_and_none_is_begun_late(tmp_path, monkeypatch):
    out = tmp_path / "trials.json"
    monkeypatch.setattr(trials, "WAYS", trials.WAYS[:3])
    assert trials.main([*SMALL, "--shapes", "64x64x5,64x64x22", "--json", str(out)]) == 0
    assert [key for key in rows_of(out) if key[1] == "fused"] == [("64x64x5", "fused")]
    assert trials.main([*SMALL, "--shapes", "64x64x5", "--limit", "-1", "--json", str(out)]) == 0
    assert {row["failed"] for row in rows_of(out).values()} == {"left out: the time was up"}
