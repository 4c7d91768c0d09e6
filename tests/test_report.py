"""Reports: a matrix whose figures are made up, what others published, and files that are neither."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from PIL import Image

from h3dist.cli.commands import main
from h3dist.errors import MissingDependency, RequestError
from h3dist.report.load import load
from h3dist.report.rows import Row, apart, with_gains
from h3dist.report.write import report_text, write_report
from tests.planted import TESTS, run_planted

sys.path.insert(0, str(TESTS.parent / "benchmarks"))
from points import keep

PUBLISHED = sorted((TESTS.parent / "benchmarks" / "published").glob("*.json"))
SCHEMA = json.loads((TESTS.parent / "h3dist/report/published.schema.json").read_text())
ORIGIN = (
    "rtxpro6000-server-vs-gb10-sdpa-864x480-141f-base12-seed440420",
    "rtxpro6000-server-1v2-sdpa-scaling-seed440420",
)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """The JSON of a matrix with two repeats, a failure and skipped cells."""
    path = tmp_path_factory.mktemp("matrix") / "m.json"
    words = ["matrix=smoke", "runtime.device=cpu", "shapes=[64x64x5,96x64x22]", "worlds=[1,2,4]", "request.steps=3"]
    run_planted(
        [*words, "layouts=[single,ulysses,tensor]", "repeats=2", f"results={path}", "save_latents=false"],
        {"*": ("figures", 60), "tensor 4": ("lost", 60)},
    )
    return path


def lines(text, start):
    return [line for line in text.splitlines() if line.startswith(start)]


def test_a_matrix_as_markdown(matrix):
    text = report_text([matrix])
    assert re.fullmatch(r"## Matrix smoke on \d+ CPU cores", text.splitlines()[0])
    assert lines(text, "| shape") == [
        "| shape | layout | ranks | attention | step s (min to max) | predicted s | first s | run s | speed-up "
        "| efficiency | latents | peak GiB | sent GB |"
    ]
    one, ulysses, tensor, four = lines(text, "| 64x64x5")
    assert re.match(r"\| 64x64x5 \| single \| 1 \| sdpa \| 0.500 \(0.500 to 0.500\) \| \d.\d{3} \| 1.000 \|", one)
    assert "| 1.00 | 100.0% | equal |" in one
    assert "| 1.99 | 99.6% | equal |" in next(x for x in (ulysses, tensor) if "ulysses" in x)
    assert "| 1.99 | 99.6% | 1.0e-03 |" in next(x for x in (ulysses, tensor) if "tensor" in x)
    assert "| 3.91 | 97.7% |" in four
    assert len(lines(text, "| 96x64x22")) == 4
    assert "- settings: random weights, small, float32, 3 steps, seed 440420" in text
    assert "- bytes: as planned on every rank in 16 of 16 cells" in text


def test_what_was_not_measured_is_told(matrix):
    text = report_text([matrix])
    assert len(lines(text, "- 64x64x5 tensor 4 sdpa #1 failed: torchrun ended with code 1")) == 1
    assert len(lines(text, "- skipped 64x64x5 ulysses 1 sdpa: sp 1 x tp 1 is the layout of single 1")) == 1


def test_pictures_are_drawn(matrix, tmp_path):
    report = write_report([matrix], tmp_path / "a" / "b")
    assert report == tmp_path / "a" / "b" / "report.md"
    names = ["speedup.png", "stages.png", "bytes.png"]
    assert sorted(path.name for path in report.parent.iterdir()) == sorted([*names, "report.md"])
    assert all(f"({name})" in report.read_text() for name in names)
    for name in names:
        with Image.open(report.parent / name) as picture:
            assert min(picture.size) > 200
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_files_stand_side_by_side(matrix, tmp_path):
    other = json.loads(matrix.read_text())
    for group in other["summary"]:
        group["step_seconds"] = {name: value * 2 for name, value in group["step_seconds"].items()}
    (tmp_path / "other.json").write_text(json.dumps(other))
    text = report_text([matrix, tmp_path / "other.json"])
    assert lines(text, "| shape")[-1] == "| shape | layout | ranks | A | B | A / B |"
    assert "| 64x64x5 | ulysses | 2 | 0.251 99.6% | 0.502 99.6% | 0.500 |" in text


def test_ours_stand_beside_other_peoples(matrix, tmp_path):
    report = write_report([matrix, *PUBLISHED], tmp_path)
    text = report.read_text()
    assert text.count("\n- not known: ") == len(PUBLISHED)
    assert lines(text, "| 1344x768x124 | hybrid | 8")[-1].count("%") == 3
    assert {"speedup.png", "stages-1.png", "bytes-1.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "bytes-2.png" not in {path.name for path in tmp_path.iterdir()}


# What others published


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_figures_are_whole(path):
    document = json.loads(path.read_text())
    jsonschema.validate(document, SCHEMA)
    source = load(path)
    assert len(source.rows) == len(document["points"])
    for point in document["points"]:
        denoise = point.get("stage_seconds", {}).get("denoise")
        if denoise:
            assert point["step_seconds"] == pytest.approx(denoise / point["evaluations"], rel=1e-3)


def test_the_origin_is_there_by_its_names():
    sources = {path.stem: load(path) for path in PUBLISHED}
    cards = {row.hardware: row.step for row in sources[ORIGIN[0]].rows}
    assert cards["GB10"] / cards["RTX PRO 6000 Blackwell Server"] == pytest.approx(4.44, abs=0.005)
    assert [row.speedup for row in sources[ORIGIN[1]].rows] == [1.21, 1.55, 1.72]


def test_gains_are_over_the_fewest_ranks_of_a_kind():
    two, four, other = (
        Row("H20", "tensor", 2, "1x1x1", step=8.0),
        Row("H20", "hybrid", 4, "1x1x1", step=5.0),
        Row("H20", "hybrid", 4, "1x1x1", step=4.0, runner="x"),
    )
    gains = [(row.speedup, row.efficiency, row.base, row.gained) for row in with_gains([two, four, other])]
    assert gains == [(1, 1, 2, False), (1.6, 0.8, 2, True), (1, 1, 4, False)]
    assert with_gains([two, four])[1].gain == 3.2
    assert apart([two, other]) == ["", "x"]


def test_single_points_are_reported_beside_a_matrix(matrix, tmp_path):
    """What the benchmarks keep: a point of the same kind takes the place of an older one."""
    path, shared = tmp_path / "rivals.json", {"hardware": "H200", "layout": "ulysses", "shape": "64x64x5"}
    for ranks, seconds in ((1, 9.0), (1, 1.0), (2, 0.6)):
        point = shared | {"ranks": ranks, "runner": "diffusers", "step_seconds": seconds, "note": "native"}
        keep(path, "diffusers beside us", point, torch="2.13.0", time_limit="20 s")
    text = report_text([path, matrix])
    assert "## diffusers beside us" in text and "- time limit: 20 s" in text and "- torch: 2.13.0" in text
    one, two = load(path).rows
    assert (one.step, two.step, two.efficiency) == (1.0, 0.6, pytest.approx(1 / 1.2))
    keep(tmp_path / "leave.json", "Killed", shared | {"ranks": 2, "total_seconds": 2.6, "note": "gone"})
    (row,) = load(tmp_path / "leave.json").rows
    assert (row.total, row.note, row.step) == (2.6, "gone", None)


# What is neither


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "no whole JSON file"),
        ("[]", "no file of measurements"),
        ('{"schema": "h3dist.matrix", "schema_version": 2}', "schema version 2"),
        ('{"schema": "h3dist.matrix", "schema_version": 1, "summary": [{}]}', "does not hold what its schema says"),
        ('{"schema": "h3dist.measured", "schema_version": 1}', "does not hold what its schema says"),
        ('{"schema": "h3dist.published", "schema_version": 1}', "does not hold what its schema says"),
    ],
)
def test_other_files_are_refused_in_one_line(text, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "x.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["h3dist", "report", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and told in said.err and said.err.count("\n") == 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RequestError, match="none"):
        load(tmp_path / "none.json")


def test_without_matplotlib_the_text_is_there_and_pictures_name_the_extra(matrix, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "## Matrix" in report_text([matrix])
    with pytest.raises(MissingDependency, match=r"pip install 'h3dist\[plots\]'"):
        write_report([matrix], tmp_path)


def test_reading_needs_neither_torch_nor_matplotlib():
    code = "import sys, h3dist.report.write; sys.exit(bool({'torch', 'matplotlib'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent).returncode == 0


def test_the_schemas_are_shipped_beside_the_code():
    package = TESTS.parent / "h3dist"
    for path in (package / "matrix" / "schema.json", package / "report" / "published.schema.json"):
        jsonschema.Draft202012Validator.check_schema(json.loads(Path(path).read_text()))
