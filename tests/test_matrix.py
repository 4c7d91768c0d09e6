"""A matrix over real processes: cells that measure, and cells planted among them that crash, hang or do not fit."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from h3dist.checkpoint.tiny import write_tiny
from h3dist.matrix import results
from tests.planted import TESTS

ROOT = TESTS.parent
SCHEMA = json.loads((ROOT / "h3dist/matrix/schema.json").read_text())
CPU = ["runtime.device=cpu", "runtime.threads=1"]
pytestmark = pytest.mark.limit(300)  # 20 s where two cores are free
PLANTED = """
import sys
from planted import run_planted
sys.exit(run_planted({overrides}, {parts}))
"""


def begin(home, code_or_words):
    """A matrix in a process of its own: `h3dist matrix WORDS`, or some code."""
    command = [sys.executable, "-m", "h3dist", "matrix", *code_or_words]
    if isinstance(code_or_words, str):
        command = [sys.executable, "-c", code_or_words]
    return subprocess.Popen(
        command,
        cwd=home,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{TESTS}", "TMPDIR": str(home), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two matrices at once: random weights with planted cells, and clips from tiny checkpoints."""
    home, clips = tmp_path_factory.mktemp("random"), tmp_path_factory.mktemp("clips")
    axes = ["matrix=smoke", *CPU, "layouts=[ulysses,tensor]", "worlds=[1,2,3]", "shapes=[64x64x5]", "request.steps=3"]
    parts = {"tensor 2": ("crash", 200), "ulysses 3": ("hang", 4), "tensor 3": ("lost", 60)}
    paths = write_tiny(clips / "tiny")
    words = paths["overrides"].read_text().replace("@", str(clips / "tiny")).split("\n")
    words = [word for word in words if word and not word.startswith(("runtime.", "parallel"))]
    small = ["matrix=clip", "layouts=[single]", "worlds=[1]", "shapes=[64x64x5]", "request.steps=2", "results=c.json"]
    processes = [begin(home, PLANTED.format(overrides=axes, parts=parts)), begin(clips, [*words, *small, *CPU])]
    told = [process.communicate(timeout=280) for process in processes]
    return home, clips, [process.returncode for process in processes], told


@pytest.fixture(scope="module")
def planted(runs):
    return json.loads((runs[0] / "h3dist-matrix-smoke.json").read_text())


def by_name(document):
    return {f"{cell['asked']} {cell['ranks']}": cell for cell in document["cells"]}


def test_it_ends_by_itself_with_every_cell_told(runs, planted):
    home, _, codes, told = runs
    assert codes[0] == 1, told[0]
    assert told[0][0].strip() == str(home / "h3dist-matrix-smoke.json")
    states = {name: cell["state"] for name, cell in by_name(planted).items()}
    assert states == {
        "ulysses 1": "done",
        "tensor 1": "skipped",
        "ulysses 2": "done",
        "tensor 2": "failed",
        "ulysses 3": "timeout",
        "tensor 3": "failed",
    }
    assert planted["finished"]
    jsonschema.validate(planted, SCHEMA)


def test_failures_are_told_with_their_cause(planted):
    cells = by_name(planted)
    assert "was killed by SIGSEGV" in cells["tensor 2"]["cause"]["message"]
    assert cells["ulysses 3"]["cause"]["message"].startswith("still running after 4 s: rank 0 in ")
    assert cells["tensor 3"]["cause"]["message"].startswith("torchrun ended with code 1 and left ranks undone")
    assert cells["tensor 1"]["reason"] == "sp 1 x tp 1 is the layout of ulysses 1"
    assert all(Path(cells[name]["logs"]).is_dir() for name in ("tensor 2", "ulysses 3"))


def test_no_rank_is_left(runs):
    mark = str(runs[0]).encode()
    alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in read(path)]
    assert alive == []


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_done_cells_hold_what_was_measured(planted):
    one, two = by_name(planted)["ulysses 1"], by_name(planted)["ulysses 2"]
    for cell in (one, two):
        seconds = cell["seconds"]
        assert len(seconds["steps"]) == 3 and seconds["warm"]["count"] == 2
        assert seconds["first_step"] == seconds["steps"][0]
        assert seconds["wall"] > seconds["load"] + sum(seconds["steps"])
        assert cell["bytes"]["as_planned"] and cell["bytes"]["planned"] == cell["bytes"]["counted"]
        assert min(cell["memory"]["peak"]) > 50e6
    assert one["speedup"] == 1
    medians = [cell["seconds"]["warm"]["median"] for cell in (one, two)]
    assert two["speedup"] == pytest.approx(medians[0] / medians[1], rel=1e-4)
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2, rel=1e-4)
    assert sum(two["bytes"]["counted"].values()) > 0 == sum(one["bytes"]["counted"].values())
    assert two["transport"]["backend"] == "gloo"


def test_layouts_are_held_against_the_first(runs, planted):
    one, two = by_name(planted)["ulysses 1"], by_name(planted)["ulysses 2"]
    assert one["parity"] == {"reference": one["key"], "equal": True, "relative_error": 0.0}
    assert two["parity"]["reference"] == one["key"]
    assert two["parity"]["relative_error"] < 1e-5
    assert all((runs[0] / cell["latents"]["file"]).is_file() for cell in (one, two))


def test_whole_clips_are_measured_from_their_sidecar(runs):
    _, clips, codes, told = runs
    assert codes[1] == 0, told[1]
    document = json.loads((clips / "c.json").read_text())
    jsonschema.validate(document, SCHEMA)
    (cell,) = document["cells"]
    assert cell["state"] == "done"
    assert {"encode", "denoise", "decode"} <= cell["seconds"]["stages"].keys()
    assert len(cell["seconds"]["steps"]) == 2
    assert cell["bytes"]["as_planned"]
    assert cell["settings"]["sampler"]["name"] == "beta_res"
    assert (clips / cell["latents"]["file"]).is_file()
    assert list(clips.glob("**/*.mp4")) == []


def test_one_file_takes_one_matrix(tmp_path):
    with results.hold(tmp_path / "m.json"):
        second = begin(tmp_path, ["matrix=smoke", *CPU, "results=m.json"])
        said, complained = second.communicate(timeout=60)
    assert (second.returncode, said) == (5, "")
    assert complained.startswith("h3dist: error: another matrix is at work on ")
    assert list(tmp_path.iterdir()) == []
