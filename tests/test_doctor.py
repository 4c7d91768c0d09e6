"""The doctor as a whole: on this machine, and on machines and faults that stand in the place of its children."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from h3dist.checkpoint.tiny import write_tiny
from h3dist.config import compose
from h3dist.doctor import children
from h3dist.doctor.examine import examine
from h3dist.doctor.files import checkpoints, outputs, temporary
from h3dist.doctor.recording import write_recording
from h3dist.errors import ConfigError, OutputError
from h3dist.topology import load_topology
from tests.test_doctor_checks import told
from tests.test_doctor_children import ACTING, alive

WATCHED = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "H3_")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(WATCHED)]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The overrides of a whole set of tiny checkpoints."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return (folder / "overrides.txt").read_text().replace("@", str(folder)).split()


# All of it, in a process of its own, as a user starts it.


@pytest.fixture(scope="module")
def here(tiny, tmp_path_factory):
    """`h3dist doctor --json --record FILE` on this machine, without its GPUs: exit code, report, FILE, stderr."""
    file = tmp_path_factory.mktemp("doctor") / "this machine.json"
    code = "import sys; from h3dist.cli.commands import main\n"
    code += "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, "doctor", "--json", "--record", str(file), "runtime.device=cpu", *tiny]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout), file, done.stderr


def test_this_machine_is_examined_to_the_end(here):
    code, report, _, _ = here
    levels = {finding["level"] for finding in report["findings"]}
    checks = "gpus memory shm environment packages torch encoders files disk exchange port"
    assert set(checks.split()) <= {finding["check"] for finding in report["findings"]}
    assert not [finding for finding in report["findings"] if finding["level"] == "error"]
    assert code == report["exit_code"] == int("warning" in levels)


def test_the_exchange_of_this_machine_is_real(here):
    exchange = next(f for f in here[1]["findings"] if f["check"] == "exchange")
    assert exchange["what"].startswith("2 ranks over gloo: every byte of an all-to-all right, in ")


def test_every_tiny_file_is_found_whole(here):
    found = [finding["what"] for finding in here[1]["findings"] if finding["check"] == "files"]
    for name in ("denoiser", "text_encoder", "tokenizer", "video_vae"):
        good = "loads, and has MiniMax H3's tokens" if name == "tokenizer" else "its header is whole and fits"
        assert any(what.startswith(f"model.{name} ") and what.endswith(good) for what in found)


def test_this_machine_is_recorded(here):
    topology = load_topology(here[2])
    assert topology.to_dict()["devices"] == here[1]["topology"]["devices"]
    assert topology.host_memory == here[1]["topology"]["host_memory"]


def test_the_parent_never_imports_torch(here):
    assert here[3].splitlines()[-1] == "False"


# Other machines, and children that misbehave: quick ones in the place of those that are not looked at.


def act(*words):
    return (sys.executable, "-S", "-E", ACTING, *words)  # quick to start on a busy machine


def quick(machine="no-gpu", **tasks):
    gpus = len(load_topology(Path(ACTING).parent / "fixtures" / "topology" / f"{machine}.json").devices)
    named = {"machine": f"recording {machine}", "files": "nothing", "encoders": "nothing", "torch": f"torch {gpus}"}
    named |= {"copies": "nothing", "exchange": "exchange well"} | tasks
    return {task: act(*words.split()) for task, words in named.items()}


def examined(limit=20.0, machine="no-gpu", **tasks):
    begun = time.monotonic()
    report = examine([], limit=limit, tasks=quick(machine, **tasks))
    return report, time.monotonic() - begun


def test_a_good_machine_of_two_gpus():
    report, _ = examined(machine="rtxpro6000-sys-x2", exchange="exchange well", copies="copy well")
    assert report.exit_code == 0, report.text()
    assert "GPU0  X     SYS" in report.text()
    assert "2 ranks over NCCL: every byte of an all-to-all right, in 2.0 ms, seen to go by P2P/CUMEM" in report.text()
    assert "2 ways between GPUs copied and compared" in report.text()
    assert report.as_dict()["transport"] == {"predicted": "P2P/CUMEM for 1 pair", "seen": ["P2P/CUMEM"]}
    assert len(report.as_dict()["visible"]) == 2


def test_one_gpu_exchanges_over_gloo():
    report, _ = examined(machine="h200-x1")
    assert "2 ranks over gloo" in report.text()
    assert report.transport == {"predicted": "none: there is no second GPU", "seen": []}


def test_hidden_gpus_are_not_probed(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,1")
    report, _ = examined(machine="h200-x2", copies="hang", torch="torch 0")
    assert report.exit_code == 1 and "hides every GPU" in report.text() and "over gloo" in report.text()


def test_a_copy_that_hangs_is_named_in_time():
    report, seconds = examined(limit=5.0, machine="h200-x2", copies="copy hang")
    assert report.exit_code == 2 and seconds < 30
    assert "from GPU 1 to GPU 0: no answer within 5 s" in told(report.findings, "error")


def test_an_exchange_that_hangs_with_p2p_is_tried_without():
    report, _ = examined(limit=5.0, machine="rtxpro6000-node-x2", exchange="exchange hang")
    found = told(report.findings, "error")
    assert "2 ranks over NCCL: an all-to-all fails: rank 0: no answer within 5 s; without P2P it works" in found
    assert "export NCCL_P2P_DISABLE=1" in found and report.exit_code == 2
    assert "NCCL_P2P_DISABLE" not in os.environ


def test_an_exchange_that_never_works_is_said_to():
    report, _ = examined(machine="rtxpro6000-node-x2", exchange="exchange broken")
    assert "and without P2P too" in told(report.findings, "error")


def test_ranks_whose_port_was_taken_meet_at_another(tmp_path):
    tried = tmp_path / "tried"
    report, _ = examined(machine="h200-x1", exchange=f"exchange taken {tried} 2")
    assert report.exit_code == 0 and "every byte of an all-to-all right" in report.text(), report.text()
    assert len(set(tried.read_text().split())) == 3
    report, _ = examined(machine="h200-x1", exchange=f"exchange taken {tried} 9")
    assert "failed to listen on any local network address" in told(report.findings, "error")
    assert len(tried.read_text().split()) == 6


def test_no_second_try_where_p2p_is_off_already(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    report, _ = examined(machine="rtxpro6000-node-x2", exchange="exchange broken")
    found = told(report.findings)
    assert "an all-to-all fails" in found and "without P2P too" not in found
    assert "warning environment: NCCL_P2P_DISABLE=1" in found


def test_the_rank_that_died_is_named_not_the_one_that_waited(monkeypatch):
    monkeypatch.setattr(children, "GRACE_SECONDS", 0.3)
    report, seconds = examined(limit=60.0, machine="rtxpro6000-node-x2", exchange="exchange die")
    assert "rank 1: failed: RankError: rank 1: NCCL error 3; without P2P it works" in told(report.findings, "error")
    assert seconds < 40


def test_wrong_elements_are_an_error():
    report, _ = examined(machine="h200-x2", exchange="exchange wrong")
    assert "5 elements arrive wrong at rank 1, without any error; without P2P it works" in told(
        report.findings, "error"
    )


def test_a_driver_that_hangs_does_not_stop_the_rest():
    report = examine([], limit=5.0, tasks=quick() | {"machine": act("hang")})
    found = told(report.findings)
    assert "error gpus: the driver cannot be asked: no answer within 5 s" in found
    assert "ok exchange" in found and report.topology is None and report.as_dict()["topology"] is None
    with pytest.raises(ConfigError, match="nothing to record"):
        write_recording(report.recording, "x.json")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("torch", "error torch: torch cannot be used: ended by SIGSEGV: the last word"),
        ("encoders", "error encoders: no film can be written: ended by SIGSEGV"),
        ("files", "error files: the model files or folders cannot be looked at: ended by SIGSEGV"),
    ],
)
def test_a_child_that_crashes_is_a_finding(task, words):
    report, _ = examined(**{task: "crash"})
    assert words in told(report.findings) and report.exit_code == 2


def test_a_recording_that_cannot_be_replayed_is_a_finding(tmp_path):
    lost = json.loads((Path(ACTING).parent / "fixtures" / "topology" / "h200-x2.json").read_text())
    lost["nvml"]["nvmlDeviceGetUUID"]["gpu1"] = {"error": 15, "text": "GPU is lost"}
    (tmp_path / "say.py").write_text(f"print({json.dumps(json.dumps({'recording': lost}))})")
    report = examine([], limit=20, tasks=quick() | {"machine": (sys.executable, str(tmp_path / "say.py"))})
    assert "error gpus: GPU 1 does not answer: GPU is lost" in told(report.findings)
    assert report.recording is not None


@pytest.mark.gpu
@pytest.mark.limit(300)
def test_the_gpus_of_this_machine_copy_and_exchange():
    named = {task: act("nothing") for task in ("files", "encoders")}
    report = examine([], limit=120, tasks=named)
    assert told(report.findings, "error") == "", report.text()
    assert report.topology.devices and "copies" in {finding.check for finding in report.findings}
    if len(report.shown.devices) > 1:
        assert report.transport["seen"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_doctor_and_its_children(number, tmp_path):
    code = (
        "import sys; from h3dist.doctor import examine as e\n"
        "e.CHILD = (sys.executable, sys.argv.pop(1)); e.Examination._child = lambda self, task, *_, **__: "
        "e.Child((sys.executable, e.CHILD[1], 'hang'))\n"
        "from h3dist.cli.commands import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, ACTING, "doctor"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline, below = time.monotonic() + 60, []
    while len(below) < 4 and time.monotonic() < deadline:
        below = _children(process.pid)
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert len(below) == 4 and not any(map(alive, below))


def _children(pid):
    path = Path(f"/proc/{pid}/task")
    return [int(word) for task in path.glob("*/children") for word in task.read_text().split()]


# The command line.


def test_a_wrong_override_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "h3dist", "doctor", "runtime.devise=cpu"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "did you mean 'runtime.device'" in done.stderr and done.stdout == ""


# The files' task.


def slots(overrides):
    return told(checkpoints(compose(overrides).model))


def test_missing_files_are_each_named():
    names = ("denoiser", "text_encoder", "tokenizer", "video_vae", "audio_vae")
    found = slots([f"model.{name}=/nowhere/{name}" for name in names])
    assert found.count("error files") == 5
    assert "there is no /nowhere/denoiser | name another: export H3_MODEL_PATH=..." in found
    assert "hf download" in found  # how to get the tokenizer


def test_a_file_cut_short_and_one_in_the_wrong_place(tiny, tmp_path):
    given = dict(override.split("=", 1) for override in tiny)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(Path(given["model.denoiser"]).read_bytes()[:-5])
    found = slots([*tiny, f"model.denoiser={cut}", f"model.text_encoder={given['model.video_vae']}"])
    assert found.count("error files: model.") == 2
    assert "error files: model.denoiser" in found and "error files: model.text_encoder" in found


def test_swapped_vaes_are_a_note(tiny):
    given = dict(override.split("=", 1) for override in tiny)
    swapped = [f"model.video_vae={given['model.audio_vae']}", f"model.audio_vae={given['model.video_vae']}"]
    found = slots([*tiny, *swapped])
    assert "note files: model.video_vae: the two VAEs were swapped" in found and "error" not in found


def test_an_output_that_cannot_be_written(tmp_path):
    assert "there is no folder" in told(outputs(compose([f"output.path={tmp_path}/no/out.mp4"])), "error")
    assert "has" in told(outputs(compose([f"output.path={tmp_path}/out.mp4"])), "ok")
    assert list(tmp_path.iterdir()) == []


def test_temporary_files(monkeypatch):
    assert temporary().level == "ok"
    monkeypatch.setattr("h3dist.doctor.files.TEMPORARY_BYTES", 1 << 62)
    assert temporary().level == "warning" and "TMPDIR" in temporary().remedy


def test_a_recording_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(OutputError, match="cannot write"):
        write_recording({"recording": 1}, str(tmp_path / "no" / "x.json"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot write"):
        write_recording({"recording": 1}, str(tmp_path / "folder"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
