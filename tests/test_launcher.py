"""Runs that end well or badly, with real torchrun, real processes and real signals; no model, hence no torch.

The ranks act (`acting.py`) under a launcher that is a process of its own (`acting_launcher.py`). All runs of
this file start at once, as torchrun takes seconds to load, and each test then looks at its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from h3dist.config import compose
from h3dist.errors import NumericsError, OutputError, PlanError, RankError, RequestError
from h3dist.job import make_job, read_job, write_job
from h3dist.launcher import check_devices, report
from h3dist.outputs import Outputs
from h3dist.processes import Outcome, _cause, first_culprit, launch_ranks
from h3dist.status import Cause, Status, StatusFile, birth, load_rank
from h3dist.torchrun import torchrun

TESTS = Path(__file__).parent
PYTHONPATH = f"{TESTS.parent}:{TESTS}"
LIMIT = 10.0  # seconds from a failure to the end of the last process

CAST = {  # run: the part of each rank
    "well": "well,well",
    "killed": "sleep,killed",
    "interrupted": "sleep,sleep",
    "terminated": "sleep,sleep",
    "deaf": "deaf,raise,mute,sleep",
    "orphaned": "sleep,sleep",
}


class Run:
    """One launcher process, the processes below it, and what it said."""

    def __init__(self, home: Path, parts: str, *words: str) -> None:
        self.scratch = home / "scratch"
        self.scratch.mkdir()
        self.world = parts.count(",") + 1
        (self.scratch / "video.part").touch()
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "acting_launcher.py"), "scratch", parts, *words],
            cwd=home,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_up(self) -> None:
        """Every rank has started and is at work."""
        while len(list(self.scratch.glob("pid*"))) < self.world:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        time.sleep(0.5)

    def end(self) -> tuple[int, str, str]:
        """Wait for the launcher; no process of the run may be left. Gives exit code, stdout and stderr."""
        said, complained = self.process.communicate(timeout=60)
        assert self.left() == []
        return self.process.returncode, said, complained

    def left(self) -> list[int]:
        """The ranks, and the torchrun above them, that still run."""
        born = {}
        for file in self.scratch.glob("pid*"):
            born |= {int(pid): int(at) for pid, at in json.loads(file.read_text()).items()}
        assert len(born) == self.world + 1
        return [pid for pid, at in born.items() if birth(pid) == at]

    @property
    def folder(self) -> Path:
        return Path((self.scratch / "folder").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    started = {name: Run(tmp_path_factory.mktemp(name), parts, "$$5", "${local_rank}") for name, parts in CAST.items()}
    yield started
    for run in started.values():
        run.process.kill()
        run.process.communicate()


def test_a_run_among_others_from_another_folder(runs):
    """All runs of this file are under way at once: each meets at a port of its own."""
    code, said, complained = runs["well"].end()
    assert code == 0
    assert said == "said by rank 0 ['$$5', '${local_rank}']\n"  # rank 1 is silent, arguments are untouched
    assert complained == ""
    assert not runs["well"].folder.exists()


def test_a_killed_rank_is_named_with_its_signal(runs):
    code, _, complained = runs["killed"].end()
    pid = next(iter(json.loads((runs["killed"].scratch / "pid1").read_text())))
    assert code == 7
    assert complained.splitlines()[0] == f"h3dist: error: RankError on rank 1: process {pid} was killed by SIGKILL"
    assert complained.splitlines()[1:] == [f"h3dist: logs of this run: {runs['killed'].folder}"]
    assert list(runs["killed"].folder.glob("logs/*/attempt_0/1/stderr.log"))
    assert not (runs["killed"].scratch / "video.part").exists()


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [("interrupted", signal.SIGINT, 130), ("terminated", signal.SIGTERM, 143)],
)
def test_a_signal_ends_every_process(runs, name, number, expected):
    run = runs[name]
    run.wait_until_up()
    run.process.send_signal(number)
    started = time.monotonic()
    assert run.end() == (expected, "", "")
    assert time.monotonic() - started < LIMIT / 2  # ranks leave by themselves, nobody waits to kill them
    assert list(run.scratch.glob("*.part")) == []
    assert not run.folder.exists()


def test_an_exception_on_one_rank_ends_all_and_is_told_once(runs):
    """Here it ends ranks that hear no signal, as well as one that leaves when torchrun asks.

    Rank 0 holds the interpreter's lock; rank 2 has not reported yet, and ignores SIGTERM.
    """
    run = runs["deaf"]
    code, said, complained = run.end()
    failed = json.loads((run.scratch / "status" / "rank1.json").read_text())["ended"]
    ended = float((run.scratch / "ended").read_text())
    assert (code, said) == (5, "")
    assert complained.splitlines() == ["h3dist: error: OutputError on rank 1: the disk is full"]
    assert not run.folder.exists(), "an error that was foreseen is told whole"
    assert 7 < ended - failed < LIMIT
    assert not (run.scratch / "video.part").exists()


def test_ranks_leave_when_the_launcher_is_killed(runs):
    run = runs["orphaned"]
    run.wait_until_up()
    assert len(run.left()) == 3
    run.process.kill()
    started = time.monotonic()
    while run.left():
        assert time.monotonic() - started < LIMIT
        time.sleep(0.05)
    assert list(run.scratch.glob("rank*.part")) == []


def acting(tmp_path, part):
    """The command, environment and status folder of one acting rank without torchrun."""
    command = [sys.executable, "-m", "acting", str(tmp_path), str(tmp_path / "status"), part]
    return command, tmp_path / "status", {"PYTHONPATH": PYTHONPATH}


def test_an_unexpected_exception_keeps_its_traceback(tmp_path, capfd):
    command, status_dir, environ = acting(tmp_path, "bug")
    outcome = launch_ranks(command, status_dir, 1, [], environ=environ, log=tmp_path / "log")
    assert report(outcome, tmp_path, 1, verbose=False) == 1
    complained = capfd.readouterr().err
    assert complained.splitlines()[0] == "h3dist: error: KeyError: 'nobody foresaw this'"
    assert complained.count("nobody foresaw this") == 1
    assert "in act\n" in (status_dir / "rank0.traceback").read_text()
    assert report(outcome, tmp_path, 1, verbose=True) == 1
    assert "in act\n" in capfd.readouterr().err


def test_a_command_that_starts_no_rank(tmp_path):
    log = tmp_path / "log"
    log.write_text("something\nImportError: no torch\n\n======\n  -----\n")
    outcome = launch_ranks(["false"], tmp_path / "status", 2, [], environ={}, log=log)
    assert outcome.exit_code == 7
    assert "code 1" in outcome.cause.message and "ImportError: no torch" in outcome.cause.message


def test_a_run_over_its_limit_is_ended(tmp_path):
    started = time.monotonic()
    outcome = launch_ranks(["sleep", "60"], tmp_path / "status", 2, [], environ={}, log=tmp_path / "log", limit=0.5)
    assert time.monotonic() - started < 4
    assert outcome.overdue and outcome.exit_code == 7
    assert outcome.cause.message.startswith("still running after 0.5 s: rank 0 in its start, without a word, rank 1")


def test_a_second_signal_kills_at_once(tmp_path):
    command, status_dir, environ = acting(tmp_path, "deaf")
    code = (
        "import sys; from pathlib import Path; from h3dist.processes import launch_ranks; "
        f"launch_ranks({command}, Path({str(status_dir)!r}), 1, [], environ={environ}, log=Path('none'))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": PYTHONPATH})
    while not (tmp_path / "pid0").exists():
        time.sleep(0.01)
    started = time.monotonic()
    for _ in range(2):
        time.sleep(0.5)
        launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=30)
    assert time.monotonic() - started < 4


def test_plain_torchrun_tells_the_first_cause_too(tmp_path):
    """Without a launcher the failing rank speaks itself, and the others leave as torchrun asks."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "acting", str(tmp_path), "", "sleep,raise"),
        ],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.count("h3dist: error: OutputError on rank 1: the disk is full\n") == 1
    assert done.stderr.count("h3dist: error") == 1
    assert list(tmp_path.glob("*.part")) == []


# The first cause, from what the ranks have written


def write_status(folder, rank, error=None):
    file = StatusFile.of(folder, rank)
    file.start()
    if error:
        file.failed(error)
    return file


def vanish(folder, rank):
    """Let the file of `rank` be that of a process that is gone."""
    code = f"from h3dist.status import StatusFile; StatusFile.of({str(folder)!r}, {rank}).start()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": PYTHONPATH}, check=True)


def test_the_earliest_failure_is_the_cause(tmp_path):
    write_status(tmp_path, 2, OutputError("first"))
    write_status(tmp_path, 0, OutputError("second"))
    write_status(tmp_path, 1)
    assert first_culprit(tmp_path, 3).cause.message == "first"


def test_a_vanished_rank_comes_before_what_its_peers_say_of_it(tmp_path):
    write_status(tmp_path, 0, RuntimeError("connection closed by peer"))
    write_status(tmp_path, 2, RankError("rank 1 does not answer"))
    vanish(tmp_path, 1)
    assert first_culprit(tmp_path, 3).rank == 1


def test_every_killed_rank_finds_its_signal_in_torchruns_log(tmp_path):
    """The first failure stands there in one form, the others in another."""
    log = tmp_path / "log"
    log.write_text(
        "api.py:1002] failed (exitcode: -11) local_rank: 0 (pid: 17715) of binary: python\n"
        "Failures:\n  exitcode  : -9 (pid: 17716)  (SIGKILL)\n  exitcode  : 1 (pid: 17717)\n"
    )
    told = [_cause(Status(rank, 17715 + rank, 0), log).message for rank in range(3)]
    assert told == [
        "process 17715 was killed by SIGSEGV",
        "process 17716 was killed by SIGKILL",
        "process 17717 ended without a word",
    ]


def test_the_ranks_own_word_comes_before_its_peers(tmp_path):
    passed_on = OutputError("rank 1, mux: disk full")
    passed_on.rank, passed_on.stage = 1, "mux"
    write_status(tmp_path, 0, passed_on)
    assert first_culprit(tmp_path, 2).cause.text(world=2).startswith("OutputError on rank 1 in mux: ")
    write_status(tmp_path, 1, OutputError("disk full"))
    assert first_culprit(tmp_path, 2).cause.message == "disk full"


def test_an_error_of_its_own_comes_before_a_later_crash(tmp_path):
    write_status(tmp_path, 0, NumericsError("NaN in audio"))
    vanish(tmp_path, 1)
    assert first_culprit(tmp_path, 2).cause.exit_code == 6


def test_a_rank_at_work_or_done_is_no_culprit(tmp_path):
    write_status(tmp_path, 0).done()
    write_status(tmp_path, 1)
    assert first_culprit(tmp_path, 3) is None  # rank 2 has not spoken


def test_a_cause_names_rank_and_stage(tmp_path):
    file = write_status(tmp_path, 1)
    file.enter("mux")
    file.failed(OutputError("disk full"))
    cause = load_rank(tmp_path, 1).cause
    assert cause.text(world=2) == "OutputError on rank 1 in mux: disk full"
    assert cause.text(world=1) == "OutputError in mux: disk full"


def test_a_failure_is_reported_once_and_its_logs_kept_where_they_may_tell_more(tmp_path, capsys):
    outcome = Outcome(5, Cause("OutputError", "disk full", 5, 1, "mux"))
    for told, kept in ((outcome, True), (Outcome(7, Cause("RankError", "disk full", 7)), False)):
        assert report(told, tmp_path, 4, verbose=kept) == told.exit_code
        assert capsys.readouterr().err.count("disk full") == 1
        assert tmp_path.exists()
    folder = tmp_path / "foreseen"
    folder.mkdir()
    assert report(outcome, folder, 4, verbose=False) == 5 and not folder.exists()
    capsys.readouterr()
    assert report(Outcome(143), tmp_path, 4, verbose=True) == 143
    assert capsys.readouterr().err == ""
    assert not tmp_path.exists()


# What is refused before any rank starts


def test_more_ranks_than_gpus(monkeypatch):
    def check(*overrides, world, gpus):
        monkeypatch.setattr("h3dist.launcher.visible_devices", lambda: (None,) * gpus)
        check_devices(compose(list(overrides)), world)

    check(world=2, gpus=2)
    check(world=4, gpus=0)  # the processor
    check("runtime.device=cpu", world=4, gpus=2)
    check("runtime.backend=gloo", world=4, gpus=1)
    with pytest.raises(PlanError, match=r"4 GPUs asked, 2 visible; use --gpus 2"):
        check(world=4, gpus=2)
    with pytest.raises(PlanError, match="no GPU is visible"):
        check("runtime.device=cuda", world=1, gpus=0)


def test_torchrun_gets_arguments_untouched(tmp_path):
    command = torchrun(tmp_path, 3, "module", ["job=/x", "model.denoiser='/a/$b'"])
    assert command[-4:] == ["-m", "module", "job=/x", "model.denoiser='/a/$$b'"]
    assert "--redirects=0:0,1:3,2:3" in command
    assert command[0] == sys.executable


def test_a_job_survives_its_file(tmp_path):
    prompt = "  <d>[English] Hi, \"there\".</d> ${oops} ??? 雨\U0001f327\nnew line \\ 'q' "
    fields = {"prompt": prompt, "frames": 121, "width": 64, "height": 32}
    made = make_job(compose([]), fields, {"path": str(tmp_path / "a,b=(1)#'é.mp4")})
    write_job(made, tmp_path / "job.json")
    assert (tmp_path / "job.json").read_bytes().isascii()
    read = read_job(str(tmp_path / "job.json"))
    assert read["request"]["prompt"] == prompt
    assert read["request"]["frames"] == 124
    assert read["notes"][0] == "frames: 121 asked, 124 made (17k + 5, snapped up)"
    assert Outputs(**read["output"]).as_dict() == made["output"]


def test_output_options_win_over_the_configuration(tmp_path):
    config = compose([f"output.path={tmp_path}/config.mp4", f"output.latents={tmp_path}/l.safetensors"])
    fields = {"prompt": "x", "mux_audio": False}
    output = make_job(config, fields, {"path": str(tmp_path / "null"), "clobber": None})["output"]
    assert output["path"] == str(tmp_path / "null")
    assert output["latents"] == str(tmp_path / "l.safetensors")
    assert output["clobber"] is True
    assert output["sound"] == str(tmp_path / "null.wav")


def test_a_bad_request_is_refused_by_a_rank_alone(tmp_path):
    """A rank without launcher and torchrun, stopped before it loads anything."""
    done = subprocess.run(
        [sys.executable, "-m", "h3dist.generate", "request.width=496", "request.prompt='x'"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == RequestError.exit_code
    assert done.stderr.splitlines()[-1].startswith("h3dist: error: RequestError: width=496")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "shown"), [("--help", "parallel: auto"), ("--cfg=job", "denoiser:")])
def test_the_rank_is_a_hydra_app(tmp_path, option, shown):
    done = subprocess.run(
        [sys.executable, "-m", "h3dist.generate", option, "parallel=ulysses"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown in done.stdout
    assert list(tmp_path.iterdir()) == []
