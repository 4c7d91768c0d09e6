"""The whole way: create, wait, set up, run under tmux, follow, fetch, destroy. Real HTTP, real sshd, loopback."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from fake_runpod import FakeRunpod
from runpod_desk import Desk, needs_sshd, python

pytestmark = [needs_sshd, pytest.mark.waits]

CELLS = """
import json, pathlib, sys, time
print('cells of', sys.argv[1:], flush=True)
file = pathlib.Path('scaling.json')
done = json.loads(file.read_text()) if file.exists() else []
for cell in range(4):
    if cell in done: continue
    done.append(cell)
    file.with_suffix('.new').write_text(json.dumps(done))
    file.with_suffix('.new').rename(file)
    print('cell', cell, 'done', flush=True)
    time.sleep(0.05)
pathlib.Path('plots').mkdir(exist_ok=True)
pathlib.Path('plots/a b.bin').write_bytes(bytes(range(256)) * 4096)
"""


@pytest.fixture(params=["v1", "v2"])
def cloud(request, tmp_path):
    with FakeRunpod(tmp_path / "cloud", request.param) as cloud:
        yield cloud


def test_matrix_from_key_to_json(cloud: FakeRunpod, tmp_path: Path) -> None:
    desk = Desk(cloud, tmp_path)
    recipe = cloud.recipe(matrix=[sys.executable, "-c", CELLS])
    done = desk.process(
        "matrix", "--gpu", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "--gpus", "8", "--budget", "20",
        "--recipe", str(recipe), "--out", "out", "--yes", "--", "matrix=scaling",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cells of ['matrix=scaling', 'attentions=[sdpa]']" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("cell ")] == [
        f"cell {i} done" for i in range(4)
    ]
    assert json.loads((desk.out / "scaling.json").read_text()) == [0, 1, 2, 3]
    blob = (desk.out / "plots" / "a b.bin").read_bytes()
    assert blob == bytes(range(256)) * 4096
    sums = (desk.out / "SHA256SUMS").read_text()
    assert f"{hashlib.sha256(blob).hexdigest()}  plots/a b.bin" in sums
    assert "cell 3 done" in (desk.out / "run.log").read_text()
    assert cloud.posts() == 1 and len(cloud.pods) == 1
    pod = next(iter(cloud.pods.values()))
    assert (pod.count, pod.terminated) == (8, True)
    desk.given_back()
    ledger = json.loads((desk.state / "runpod" / "ledger.jsonl").read_text())
    assert ledger["cause"] == "done" and ledger["dollars"] >= 0


def test_price_is_asked_for_and_no_means_no(cloud: FakeRunpod, tmp_path: Path) -> None:
    desk = Desk(cloud, tmp_path)
    done = desk.pod_py("generate", "--recipe", str(cloud.recipe()), "--", "h3dist", "--version", stdin="n\n")
    assert done.returncode == 2 and "nothing was rented" in done.stderr
    assert "an hour" in done.stdout and "at most $" in done.stdout
    silent = desk.pod_py("generate", "--recipe", str(cloud.recipe()), "--", "h3dist", "--version")
    assert silent.returncode == 2 and "--yes" in silent.stderr
    assert cloud.posts() == 0


def test_generate_sends_files_and_passes_the_exit_code_on(cloud: FakeRunpod, tmp_path: Path) -> None:
    desk = Desk(cloud, tmp_path)
    (tmp_path / "p.txt").write_text("un château, « 雨 »\n")
    code = (
        "import sys, pathlib; text = pathlib.Path(sys.argv[2]).read_bytes();"
        "pathlib.Path('got.txt').write_bytes(text); print('half done'); sys.exit(4)"
    )
    words = [*python(code), "--prompt-file", "p.txt"]
    done = desk.pod_py("generate", "--yes", "--recipe", str(cloud.recipe()), "--out", "out", "--", *words)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "exit code 4" in done.stderr
    assert (desk.out / "got.txt").read_bytes() == (tmp_path / "p.txt").read_bytes()
    assert "half done" in (desk.out / "run.log").read_text()
    desk.given_back()


@pytest.mark.parametrize("cloud", ["v2"], indirect=True)
def test_the_real_doctor_and_the_real_matrix(cloud: FakeRunpod, tmp_path: Path) -> None:
    """A tiny matrix on the processor, through the commands that a GPU pod runs."""
    desk = Desk(cloud, tmp_path)
    recipe = cloud.recipe(doctor=["h3dist", "doctor", "--json"])
    words = [
        "matrix=smoke",
        "runtime.device=cpu",
        "worlds=[1]",
        "layouts=[single]",
        "shapes=[64x64x5]",
        "request.steps=1",
    ]
    done = desk.pod_py("matrix", "--yes", "--gpu", "5090", "--recipe", str(recipe), "--out", "out", "--", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((desk.out / "h3dist-matrix-smoke.json").read_text())["cells"]
    assert [cell["state"] for cell in cells] == ["done"]
    facts = json.loads((desk.out / "pod.json").read_text())
    assert facts["pod"]["gpus"] == "1 x NVIDIA GeForce RTX 5090" and facts["pod"]["data_center"] == "US-TX-3"
    assert facts["command"][:3] == ["h3dist", "matrix", "matrix=smoke"] and facts["dollars_per_hour"] == 2.0
    desk.given_back()


def test_the_real_h3dist_runs_on_the_pod(cloud: FakeRunpod, tmp_path: Path) -> None:
    from h3dist import __version__

    desk = Desk(cloud, tmp_path)
    desk.do(["sh", "-c", "h3dist --version > version.txt"])
    assert __version__ in (desk.out / "version.txt").read_text()
    desk.given_back()
