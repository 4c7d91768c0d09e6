"""A matrix whose cells make their figures up: what is skipped, kept, resumed, set aside, compared, summed up."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from h3dist import matrix, provenance
from h3dist.cli.commands import main
from h3dist.config import conf_dir
from h3dist.errors import ConfigError, OutputError, RequestError
from h3dist.matrix import cell as rank_of_cells
from h3dist.matrix import environment, results, scaling
from h3dist.matrix.cells import Cell
from h3dist.matrix.clip_run import clip_settings
from h3dist.matrix.config import WAYS, Shape, compose_matrix, exchange_of
from h3dist.matrix.prepare import prepare, starter
from h3dist.matrix.records import ended, waiting
from h3dist.matrix.run import run_matrix
from h3dist.matrix.table import line, table
from h3dist.matrix.transport import transport
from h3dist.processes import Outcome
from h3dist.report.load import load
from h3dist.status import Cause
from h3dist.topology import Device, Link, Topology
from tests.planted import TESTS, make_up, run_planted

SCHEMA = json.loads((TESTS.parent / "h3dist/matrix/schema.json").read_text())
CPU = ["matrix=smoke", "runtime.device=cpu", "shapes=[64x64x5]", "request.steps=3", "results=m.json"]
FIGURES = {"*": ("figures", 60)}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a matrix of made-up cells in a folder of its own: gives the exit code and the document."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def go(*words, parts=FIGURES):
        code = run_planted([*CPU, *words], parts)
        document = json.loads(Path("m.json").read_text())
        jsonschema.validate(document, SCHEMA)
        return code, document

    return go


def states(document):
    return {f"{cell['asked']} {cell['ranks']}": cell["state"] for cell in document["cells"]}


# Going on, and what is not trusted


def test_done_cells_are_kept_and_the_others_tried_again(run, monkeypatch):
    _, first = run("layouts=[ulysses]", parts={"ulysses 1": ("figures", 60), "ulysses 2": ("lost", 60)})
    assert states(first) == {"ulysses 1": "done", "ulysses 2": "failed"}
    code, second = run("layouts=[ulysses]", parts={"ulysses 1": ("lost", 60), "ulysses 2": ("figures", 60)})
    assert code == 0
    assert states(second) == {"ulysses 1": "done", "ulysses 2": "done"}
    assert second["cells"][0] == first["cells"][0]
    assert second["created"] == first["created"]


def test_a_matrix_can_grow_and_another_one_is_not_mixed_with_it(run):
    run("layouts=[ulysses]", "worlds=[1]")
    _, grown = run("layouts=[ulysses]", "worlds=[1,2]", parts={"ulysses 2": ("figures", 60), "ulysses 1": ("lost", 1)})
    assert states(grown) == {"ulysses 1": "done", "ulysses 2": "done"}
    _, other = run("layouts=[ulysses]", "worlds=[2]", "request.steps=2")
    steps = [(cell["settings"]["steps"], cell["speedup"]) for cell in other["cells"]]
    assert steps == [(2, None), (3, 1.0), (3, pytest.approx(2, rel=0.02))]  # no gain over another schedule's rank


def test_a_cut_file_is_set_aside(run, capsys):
    run("layouts=[ulysses]", "worlds=[1]")
    text = Path("m.json").read_text()
    for number, wrong in enumerate((text[: len(text) // 2], "[]", text.replace('"efficiency"', '"x"', 1), ""), 1):
        Path("m.json").write_text(wrong.replace('"parity"', '"parties"') if number == 3 else wrong)
        code, document = run("layouts=[ulysses]", "worlds=[1]")
        assert code == 0 and states(document) == {"ulysses 1": "done"}
        assert "is not trusted: it" in capsys.readouterr().err
    assert {path.name for path in Path().glob("m.json.broken*")} == {
        "m.json.broken", "m.json.broken-2", "m.json.broken-3", "m.json.broken-4",
    }  # fmt: skip
    assert Path("m.json.broken").read_text() == text[: len(text) // 2]


def test_a_newer_version_is_set_aside_too():
    document = {"schema": "h3dist.matrix", "schema_version": 2, "cells": [], "environment": {}}
    assert results._fault(document) == "it has schema version 2, this is 1"


def test_resume_false_begins_anew(run, capsys):
    run("layouts=[ulysses]", "worlds=[1]")
    before = Path("m.json").read_text()
    run("layouts=[ulysses]", "worlds=[1]", "resume=false")
    assert Path("m.json.old").read_text() == before
    assert capsys.readouterr().err.count("is now m.json.old") == 1


def test_figures_of_two_machines_are_not_mixed(run, monkeypatch):
    run("layouts=[ulysses]", "worlds=[1]")
    monkeypatch.setattr(environment, "cores", lambda: 96)
    with pytest.raises(ConfigError, match=r"measured elsewhere: cores was \d+ and is 96; .* results=, or resume=false"):
        run("layouts=[ulysses]", "worlds=[1]")


def test_a_signal_stops_the_matrix_and_not_its_file(run):
    code, document = run("layouts=[ulysses]", parts={"ulysses 1": ("figures", 60), "ulysses 2": ("interrupted", 60)})
    assert code == 130
    assert states(document) == {"ulysses 1": "done", "ulysses 2": "pending"}
    assert not document["finished"]
    code, document = run("layouts=[ulysses]")
    assert (code, document["finished"]) == (0, True)


def test_what_cannot_be_read_back_fails_one_cell_alone(run, monkeypatch):
    monkeypatch.setattr(matrix.batch.parity, "fingerprint", lambda path: (_ for _ in ()).throw(OutputError("no disk")))
    code, document = run("layouts=[ulysses]")
    assert code == 1
    assert set(states(document).values()) == {"failed"}
    assert {cell["cause"]["message"] for cell in document["cells"]} == {"no disk"}


def test_a_full_disk_ends_the_matrix(run, monkeypatch):
    monkeypatch.setattr(results.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match="No space left"):
        run("layouts=[ulysses]", "worlds=[1]")
    assert [path.name for path in Path().iterdir() if "json" in path.name] == []


# Latents


def test_latents_are_kept_or_not_as_asked(run, monkeypatch):
    monkeypatch.setenv("H3_SAVE_LATENTS", "0")
    _, document = run("layouts=[tensor]", "repeats=2")
    assert not Path("m.json.latents").exists()
    assert {cell["latents"]["file"] for cell in document["cells"]} == {None}
    errors = {f"{cell['ranks']} #{cell['repeat']}": cell["parity"]["relative_error"] for cell in document["cells"]}
    assert errors == {
        "1 #1": 0,
        "2 #1": pytest.approx(1e-3, rel=1e-3),
        "1 #2": 0,
        "2 #2": pytest.approx(1e-3, rel=1e-3),
    }
    assert [entry["repeats_equal"] for entry in document["summary"]] == [True, True]
    monkeypatch.setenv("H3_SAVE_LATENTS", "1")
    _, more = run("layouts=[tensor]", "repeats=2", "worlds=[1,2,3]")
    added = [cell for cell in more["cells"] if cell["ranks"] == 3]
    assert all(Path(cell["latents"]["file"]).is_file() for cell in added)
    assert {cell["parity"]["relative_error"] for cell in added} == {None}  # the first cell's were not kept
    assert {cell["parity"]["equal"] for cell in added} == {False}


# What is skipped


def test_cells_that_cannot_be_are_skipped_with_the_reason(run):
    _, document = run("layouts=[single,ulysses,hybrid,2x2]", "worlds=[1,2,4,15]")
    reasons = {f"{cell['asked']} {cell['ranks']}": cell["reason"] for cell in document["cells"] if cell["reason"]}
    assert reasons["ulysses 1"] == "sp 1 x tp 1 is the layout of single 1"
    assert reasons["hybrid 2"] == "sp 2 x tp 1 is the layout of ulysses 2"
    assert "runs on 1" in reasons["single 4"]
    assert reasons["2x2 4"] == "sp 2 x tp 2 is the layout of hybrid 4"
    assert "use --gpus 4" in reasons["2x2 2"]
    assert "14 heads" in reasons["ulysses 15"]
    assert states(document)["hybrid 4"] == "done"


def gpus(*free):
    return tuple(Device(i, "H200", 141 << 30, size, (9, 0), f"GPU-{i}") for i, size in enumerate(free))


def planned(words, monkeypatch, devices, tmp_path):
    monkeypatch.setattr("h3dist.planner.visible_devices", lambda: devices)
    config, words = compose_matrix(words)
    return {f"{p.cell.asked} {p.cell.ranks}": p.reason for p in prepare(config, words, tmp_path / "m.json").cells}


def test_counts_above_the_visible_devices_are_skipped(monkeypatch, tmp_path):
    words = ["shapes=[864x480x141]", "layouts=[ulysses]", "worlds=[1,2,4]"]
    reasons = planned(words, monkeypatch, gpus(100 << 30, 100 << 30), tmp_path)
    assert reasons == {"ulysses 1": None, "ulysses 2": None, "ulysses 4": "4 ranks, 2 GPUs visible"}
    shared = planned([*words, "runtime.backend=gloo"], monkeypatch, gpus(100 << 30, 100 << 30), tmp_path)
    assert set(shared.values()) == {None}


def test_what_does_not_fit_the_least_free_device_is_skipped(monkeypatch, tmp_path):
    words = ["shapes=[864x480x141]", "layouts=[ulysses,tensor]", "worlds=[2]"]
    reasons = planned(words, monkeypatch, gpus(100 << 30, 12 << 30), tmp_path)
    assert "rank 1 needs about" in reasons["ulysses 2"] and reasons["tensor 2"] is None


def test_ranks_take_the_gpus_that_the_planner_gives_them(monkeypatch, tmp_path):
    """Two pairs of neighbours that CUDA does not number together: the pairs are the tp groups, as in a run."""
    monkeypatch.setattr("h3dist.planner.visible_devices", lambda: gpus(*[100 << 30] * 4))
    near = {(0, 2), (1, 3)}
    links = tuple(Link(*pair, "PIX" if pair in near else "SYS", True, True) for pair in combinations(range(4), 2))
    monkeypatch.setattr("h3dist.planner.read_topology", lambda: Topology((), links, 0, 0))
    config, words = compose_matrix(["shapes=[864x480x141]", "layouts=[2x2,ulysses]", "worlds=[4]"])
    matrix = prepare(config, words, tmp_path / "m.json")
    starts = (matrix.start([planned], tmp_path, None) for planned in matrix.cells)
    pairs, rows = (start.environ.get("CUDA_VISIBLE_DEVICES") for start in starts)
    assert (pairs, rows) == ("GPU-0,GPU-2,GPU-1,GPU-3", None)
    record = waiting(matrix.cells[0])["predicted"]
    assert record["gpus"] == [0, 2, 1, 3]
    assert record["step_seconds"] == pytest.approx(sum(record["terms"].values()), rel=1e-3)


def test_no_gpu_at_all_is_no_matrix(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="no GPU is visible"):
        planned(["runtime.device=cuda"], monkeypatch, (), tmp_path)


def test_under_torchrun_there_is_no_matrix(monkeypatch, tmp_path):
    config, words = compose_matrix([*CPU, f"results={tmp_path}/m.json"][:-2])
    for name, value in {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "x"), monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="without torchrun"):
        run_matrix(config, words)


# What was typed


def test_ways_to_move_heads_are_an_axis(run):
    words = ["layouts=[ulysses,tensor]", "exchanges=[heads,hidden/2,auto]"]
    code, document = run(*words)
    cells = {cell["name"].removeprefix("64x64x5 ").removesuffix(" sdpa #1"): cell for cell in document["cells"]}
    told = {name: cell["reason"] or cell["plan"]["exchange"] for name, cell in cells.items()}
    assert code == 0 and told == {
        "ulysses 1": "heads/1",
        "ulysses 1 hidden/2": "hidden/2 changes nothing in sp 1 x tp 1: it is the run of heads",
        "ulysses 1 auto": "auto changes nothing in sp 1 x tp 1: it is the run of heads",
        "tensor 1": "sp 1 x tp 1 is the layout of ulysses 1",
        "tensor 1 hidden/2": "hidden/2 changes nothing in sp 1 x tp 1: it is the run of heads",
        "tensor 1 auto": "auto changes nothing in sp 1 x tp 1: it is the run of heads",
        "ulysses 2": "heads/1",
        "ulysses 2 hidden/2": "hidden/2",
        "ulysses 2 auto": "heads/1",
        "tensor 2": "heads/1",
        "tensor 2 hidden/2": "hidden/2 changes nothing in sp 1 x tp 2: it is the run of heads",
        "tensor 2 auto": "auto changes nothing in sp 1 x tp 2: it is the run of heads",
    }
    sent = cells["ulysses 2 hidden/2"]["bytes"]
    assert sent["counted"]["hidden.gather"] > 0 == sent["counted"]["heads.to"] and sent["as_planned"]
    assert [entry["exchange"] for entry in document["summary"]] == ["heads", "heads", "hidden/2", "auto", "heads"]
    assert all(entry["speedup"] for entry in document["summary"])
    rows = load(Path("m.json")).rows
    assert {row.layout for row in rows} == {"ulysses", "ulysses hidden/2", "ulysses auto", "tensor"}


LISTED = [
    "64x64x5/3 ulysses 2 heads/2",
    "64x64x5/3 single 1",
    "64x64x22/2 ulysses 2 hidden/3+auto",
    "64x64x5/3 tensor 2",
    "64x64x5/3 ulysses 2",
]


def test_cells_may_be_listed_and_share_a_start(run, monkeypatch):
    """Batches in the order of their first cell, each cell with its own evaluations; gains over one rank of its own."""
    begun, make = [], matrix.batch.run_folder
    monkeypatch.setattr(matrix.batch, "run_folder", lambda: begun.append(1) or make())
    code, document = run("cells=[" + ",".join(f"'{each}'" for each in LISTED) + "]", "together=true")
    assert code == 0 and document["finished"] and document["matrix"]["cells"] == LISTED and len(begun) == 3
    cells = document["cells"]
    assert [cell["state"] for cell in cells] == ["done"] * 5
    assert [cell["settings"]["steps"] for cell in cells] == [3, 3, 2, 3, 3]
    assert [cell["exchange"] for cell in cells] == ["heads/2", "heads", "hidden/3+auto", "heads", "heads"]
    assert [cell["speedup"] is None for cell in cells] == [False, False, True, False, False]
    code, document = run("cells=['64x64x5/3 single 1','64x64x5/3 ulysses 2 hidden']", "together=true")
    assert code == 0 and len(begun) == 4, "what is done is not run again"


def test_one_that_fails_in_a_start_takes_no_other_with_it(tmp_path, monkeypatch):
    """Ranks die when one of three cells is done: it stays so, the next one failed, the last has a start of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = "layouts=[ulysses]", "worlds=[2]", "exchanges=[heads,heads/2,hidden]", "together=true"
    config, words = compose_matrix([*CPU, *words])
    real, starts = starter(config, words), []

    def start(batch, folder, until):
        begun = real(batch, folder, until)
        starts.append([planned.cell.exchange for planned in batch])
        for planned in batch if len(starts) > 1 else batch[:1]:
            make_up(planned.plan, folder, folder / planned.cell.key)
        ends = ["cp", *map(str, folder.glob("rank*.json")), str(folder / "status")] if len(starts) > 1 else ["false"]
        return replace(begun, command=ends)

    assert run_matrix(config, words, start) == 1
    cells = json.loads(Path("m.json").read_text())["cells"]
    assert [cell["state"] for cell in cells] == ["done", "failed", "done"]
    assert starts == [["heads", "heads/2", "hidden"], ["hidden"]]


def test_what_does_not_fit_the_time_is_left_for_the_next_matrix(run, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(matrix.batch, "LEAST_SECONDS", 1e6)
        code, document = run("layouts=[ulysses]", "total_seconds=30")
    assert code == 75 and set(states(document).values()) == {"pending"} and not document["finished"]
    code, document = run("layouts=[ulysses]")
    assert code == 0 and set(states(document).values()) == {"done"}


def test_ranks_begin_no_cell_that_would_not_end_in_time(monkeypatch):
    """The first always; another by what is predicted and what that came to before: here twice as much."""
    now = [0.0]
    monkeypatch.setattr(rank_of_cells, "time", SimpleNamespace(time=lambda: now[0]))
    alone = SimpleNamespace(share=lambda value: value)
    cells = [{"expected": seconds} for seconds in (10.0, 16.0, 14.0, 1.0)]
    begun = []
    for _, plan in rank_of_cells.in_time(alone, {"cells": cells, "until": 60.0}, list("abcd")):
        begun.append(plan)
        now[0] += rank_of_cells.LOAD_SECONDS + 2 * cells["abcd".index(plan)]["expected"]
    assert begun == ["a", "c"] and now[0] == 58.0
    assert len(list(rank_of_cells.in_time(alone, {"cells": cells, "until": None}, list("abcd")))) == 4
    follower = SimpleNamespace(share=lambda value: False)
    assert not list(rank_of_cells.in_time(follower, {"cells": cells, "until": None}, list("abcd")))


def test_a_cell_keeps_the_key_that_it_had_before_there_were_exchanges():
    shape = Shape(64, 64, 5)
    plain = Cell(shape, "ulysses", 2, "sdpa", 1, {"steps": 3})
    told = ["64x64x5", "ulysses", 2, "sdpa", 1, {"steps": 3}]
    assert plain.key == sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    assert replace(plain, exchange="hidden").key != plain.key


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("auto", ("auto", "auto", "none", "collective")),
        ("heads", ("heads", "1", "none", "collective")),
        ("hidden/4", ("hidden", "4", "none", "collective")),
        ("heads/auto", ("heads", "auto", "none", "collective")),
        ("heads/7/int8", ("heads", "7", "int8", "collective")),
        ("heads/4+copy", ("heads", "4", "none", "copy")),
        ("auto+auto", ("auto", "auto", "none", "auto")),
        ("hidden/4+packed+copy", ("hidden", "4", "none", "copy")),
    ],
)
def test_an_exchange_in_one_word(text, fields):
    found = exchange_of(text)
    assert (found.variant, found.groups, found.codec, found.transport) == fields
    assert found.rows == ("packed" if "packed" in text else "plain") and found.chunks == 1


def test_chunks_and_packed_rows_are_ways_of_a_tp_group(run):
    words = ["layouts=[ulysses,tensor]", "worlds=[2]", "exchanges=[heads,heads+chunks4,heads+packed]"]
    code, document = run(*words)
    told = {
        f"{cell['asked']} {cell['exchange']}": cell["reason"] or cell["plan"]["exchange"] for cell in document["cells"]
    }
    assert code == 0 and told == {
        "ulysses heads": "heads/1",
        "ulysses heads+chunks4": "heads+chunks4 changes nothing in sp 2 x tp 1: it is the run of heads",
        "ulysses heads+packed": "heads+packed changes nothing in sp 2 x tp 1: it is the run of heads",
        "tensor heads": "heads/1",
        "tensor heads+chunks4": "heads/1+chunks4",
        "tensor heads+packed": "heads/1+packed",
    }


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "matrix").glob("*.yaml")))
def test_every_matrix_composes(name):
    config, words = compose_matrix([f"matrix={name}"])
    assert (config.name, config.results, words) == (name, f"h3dist-matrix-{name}.json", [])
    assert config.request.seed == 440420
    assert config.request.steps == (4 if name == "smoke" else 12)
    assert [str(Shape.of(shape)) for shape in config.shapes] == config.shapes


def test_scaling_is_the_default_and_its_runs_take_the_rest():
    config, words = compose_matrix(["worlds=[1,2]", "runtime.timeout=60", "repeats=3"])
    assert (config.name, config.worlds, config.repeats, config.runtime.timeout) == ("scaling", [1, 2], 3, 60)
    assert words == ["runtime.timeout=60"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("matrix=scalin", "did you mean 'scaling'"),
        ("wordls=[1]", "did you mean 'worlds'"),
        ("layouts=[ulises]", "did you mean 'ulysses'"),
        ("layouts=[auto]", "auto is one of the others"),
        ("shapes=[864x480]", "864x480x141"),
        ("size=smal", "did you mean 'small'"),
        ("worlds=[0]", "above 0"),
        ("worlds=[]", "no cells"),
        ("cells=['64x64x5 ulysses']", "SHAPE[/STEPS] LAYOUT RANKS [EXCHANGE]"),
        ("cells=['64x64x5 ulises 2']", "did you mean 'ulysses'"),
        ("cells=['64x64x5 ulysses 2 head']", "did you mean 'heads'"),
        ("total_seconds=0", "above 0"),
        ("worlds=1,2", "[brackets]"),
        ("cell_seconds=nan", "above 0"),
        ("parallel=tensor", "use layouts="),
        ("attention.name=sdpa", "use attentions="),
        ("exchange.groups=4", "use exchanges="),
        ("exchanges=[head]", "did you mean 'heads'"),
        ("exchanges=[heads/many]", "VARIANT/GROUPS/CODEC"),
        ("exchanges=[heads/4/int8/x]", "VARIANT/GROUPS/CODEC"),
        ("exchanges=[heads/0]", "the least is 1"),
        ("exchanges=[heads/4+copies]", "did you mean 'copy'"),
        ("request.width=64", "use shapes="),
        ("output.path=x.mp4", "use results="),
        ("sampler=official", "denoise_only=false does"),
        ("model.denoiser=x", "denoise_only=false does"),
        ("request.first_frame=x.png", "denoise_only=false does"),
        ("runtime.gemm=fp8", "denoise_only=false does"),
        ("runtime.offload=blocks", "denoise_only=false does"),
        ("decode=parallel", "denoise_only=false does"),
    ],
)
def test_what_no_cell_would_read_is_refused(word, told):
    with pytest.raises(ConfigError) as caught:
        compose_matrix([word])
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_clips_computed_otherwise_are_other_cells():
    def settings(*words):
        return clip_settings(compose_matrix(["denoise_only=false", *words])[0], "cpu")

    plain = settings()
    assert settings("runtime.gemm=auto", "decode=auto") == plain and not plain.keys() & WAYS
    assert settings("runtime.gemm=fp8", "decode=parallel") == plain | {"runtime.gemm": "fp8", "decode.mode": "parallel"}


def test_clips_refuse_what_only_random_weights_have():
    with pytest.raises(ConfigError, match="denoise_only=true does"):
        compose_matrix(["denoise_only=false", "size=small"])


def test_shapes_are_judged_before_any_run(tmp_path):
    config, words = compose_matrix([*CPU, "shapes=[100x64x5]"])
    with pytest.raises(RequestError, match="32"):
        prepare(config, words, tmp_path / "m.json")


def test_the_command_tells_one_line_and_a_code(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["h3dist", "matrix", *CPU[:-1], f"results={tmp_path}/none/m.json"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 5
    assert (
        capsys.readouterr().err
        == f"h3dist: error: cannot write {tmp_path}/none/m.json: there is no folder {tmp_path}/none\n"
    )


def test_it_is_a_hydra_app_too(tmp_path):
    command = [sys.executable, "-m", "h3dist.matrix", "matrix=smoke", "worlds=[3]", "--cfg", "job"]
    told = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(TESTS.parent)}
    )
    assert told.returncode == 0, told.stderr
    assert "size: small" in told.stdout and "worlds:\n- 3\n" in told.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_script_passes_its_words(tmp_path):
    script = TESTS.parent / "launch" / "run_distributed_matrix.sh"
    fake = tmp_path / "h3dist"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    told = subprocess.run(
        [script, "worlds=[1,2]", "results=a b.json"],
        capture_output=True,
        text=True,
        env={"H3DIST": str(fake), "PATH": os.environ["PATH"]},
    )
    assert told.stdout == "matrix\nworlds=[1,2]\nresults=a b.json\n"


# Figures


@pytest.mark.parametrize("path", sorted((TESTS.parent / "benchmarks/results").glob("*-matrix-*.json")), ids=str)
def test_results_in_the_repository_are_whole(path):
    document = json.loads(path.read_text())
    jsonschema.validate(document, SCHEMA)
    assert results.load(path) == (document, None)
    assert document["finished"] and all(cell["bytes"]["as_planned"] for cell in scaling.done(document["cells"]))


def test_spreads_and_gains(run):
    _, document = run("layouts=[ulysses]", "worlds=[1,2,4]", "repeats=2")
    assert scaling.spread([3.0, 1.0, 2.0]) == {"min": 1.0, "median": 2.0, "max": 3.0, "count": 3}
    assert scaling.spread([]) is None
    two = next(cell for cell in document["cells"] if cell["ranks"] == 2)
    assert two["seconds"]["steps"] == [1.0, 0.251, 0.251]  # the slower of two ranks
    assert two["seconds"]["stages"]["load"] == {"min": 3.0, "median": 3.5, "max": 4.0, "count": 2}
    assert two["seconds"]["load"] == 4.0
    gains = [(entry["ranks"], entry["speedup"], entry["efficiency"]) for entry in document["summary"]]
    assert gains == [(1, 1.0, 1.0), (2, 1.992032, 0.996016), (4, 3.90625, 0.976562)]
    assert [entry["step_seconds"]["count"] for entry in document["summary"]] == [4, 4, 4]
    assert document["summary"][1]["bytes_planned"] == two["bytes"]["counted"]
    assert document["summary"][2]["peak_memory"] == 1003


def test_one_step_is_cold_and_gives_no_gain(run):
    _, document = run("layouts=[ulysses]", "request.steps=1")
    assert [(cell["seconds"]["warm"], cell["speedup"]) for cell in document["cells"]] == [(None, None)] * 2


def test_the_table_and_the_lines_name_every_state(run):
    parts = {"ulysses 1": ("figures", 60), "tensor 2": ("lost", 60), "ulysses 2": ("figures", 60)}
    _, document = run("layouts=[ulysses,tensor]", parts=parts)
    lines = [line(cell) for cell in document["cells"]]
    assert lines[0] == "64x64x5 ulysses 1 sdpa #1: 0.500 s a step, 1.00 x one rank, 100%, latents first"
    assert lines[1].endswith("skipped: sp 1 x tp 1 is the layout of ulysses 1")
    assert lines[2] == "64x64x5 ulysses 2 sdpa #1: 0.251 s a step, 1.99 x one rank, 100%, latents equal"
    assert "tensor 2 sdpa #1: failed: torchrun ended with code" in lines[3]
    shown = table(document["cells"])
    assert (shown.row_count, shown.caption) == (3, "1 skipped")


def test_a_cell_is_known_by_all_that_its_figures_depend_on():
    cell = Cell(Shape(64, 64, 5), "ulysses", 2, "sdpa", 1, {"steps": 4})
    others = [
        replace(cell, shape=Shape(64, 64, 22)), replace(cell, asked="tensor"), replace(cell, ranks=3),
        replace(cell, attention="x"), replace(cell, repeat=2), replace(cell, settings={"steps": 5}),
    ]  # fmt: skip
    assert len({cell.key, *(other.key for other in others)}) == 7
    assert cell.key == replace(cell, settings=dict(cell.settings)).key


@pytest.mark.parametrize(
    ("kind", "message", "state"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB.", "oom"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 byte", "oom"),
        ("MemoryError", "", "oom"),
        ("PlanError", "2 ranks on this machine, 1 GPUs visible", "skipped"),
        ("ConfigError", "attention=sdpa_cudnn: not here", "skipped"),
        ("RankError", "process 7 was killed by SIGKILL", "failed"),
        ("NumericsError", "the latents hold NaN or infinity", "failed"),
    ],
)
def test_how_a_cell_ended(kind, message, state):
    told = ended(Outcome(1, Cause(kind, message, 1, 0, "load")), "/logs")
    assert told["state"] == state
    assert told["reason"] == (message if state == "skipped" else None)
    assert ended(Outcome(7, Cause(kind, message, 7), overdue=True), "/logs")["state"] == "timeout"


def test_the_transport_is_what_nccl_tells(tmp_path):
    (tmp_path / "nccl.1").write_text(
        "h:1:1 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\n"
        "h:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "h:1:1 [0] NCCL INFO Channel 01/0 : 0[1a000] -> 1[1b000] via P2P/CUMEM\n"
        "h:1:1 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0\n"
    )
    (tmp_path / "nccl.2").write_text("h:2:2 [1] NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct\n")
    assert transport(tmp_path, "nccl", 2) == {
        "backend": "nccl",
        "nccl": "2.27.5+cuda12.9",
        "channels": {"NET/Socket/0": 1, "P2P/CUMEM": 2, "SHM/direct/direct": 1},
    }
    assert transport(tmp_path, "nccl", 1)["backend"] is None


def test_the_commit_is_told_with_a_mark_for_changes(tmp_path):
    def git(*words):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert provenance.commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a"), git("commit", "-qm", "One")
    assert provenance.commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "a").write_text("2")
    assert provenance.commit(tmp_path) == git("rev-parse", "HEAD") + "+"


def test_no_secret_leaves_in_the_environment(monkeypatch):
    monkeypatch.setenv("RUNPOD_API_KEY", "secret"), monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    told = environment.environment(None, [])
    assert told["variables"]["NCCL_P2P_DISABLE"] == "1"
    assert "secret" not in json.dumps(told)
