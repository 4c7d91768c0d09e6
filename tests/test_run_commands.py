"""Whole runs as a user starts them: processes of their own, real signals, real files, several at once on one machine.

Each takes seconds to import what it needs, so they are few, start together, and every test looks at its own.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
from golden import GOLDEN, check_golden, needs_golden
from safetensors.torch import load_file

from h3dist.checkpoint.tiny import write_tiny
from h3dist.media import probe
from h3dist.saved import sha256
from h3dist.status import birth

ROOT = Path(__file__).parents[1]
NAME = "你" * 83  # with .mp4 253 of the 255 bytes that a name may take
PROMPT = "  a=b, ${oops} ??? \"x\" 'y' $HOME\n<d>[English] Hi.</d> 雨 🌧\n"
LIMIT = 10.0  # seconds from a death or signal to the end of the last process
SET_UP = 'root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)\nvenv=$root/.venv\nset_up() { :; }\n'
MODULES = """
import atexit, json, os, sys

def tell():
    kept = sorted({"torch", "transformers", "diffusers", "av"} & sys.modules.keys())
    with open(os.path.join(os.environ["MODULES"], str(os.getpid())), "w") as file:
        json.dump({"rank": os.environ.get("RANK"), "argv": sys.argv, "modules": kept}, file)

def tell_and_leave(code, leave=os._exit):
    tell()
    leave(code)

atexit.register(tell)
os._exit = tell_and_leave  # how ranks leave
"""

pytestmark = pytest.mark.limit(300)


class Command:
    """A command in a folder of its own, with the temporary files of its runs below that folder.

    All its processes share one core, the next command's the next: threads of many processes would wait for each other.
    """

    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))

    def __init__(self, home: Path, *words: str, cwd: Path | None = None) -> None:
        self.home = home
        self.modules, self.temporary = home / "modules", home / "temporary"
        for folder in (home, self.modules, self.temporary, home / "site"):
            folder.mkdir(exist_ok=True)
        (home / "site" / "sitecustomize.py").write_text(MODULES)
        paths = {"PYTHONPATH": f"{ROOT}:{home}/site", "TMPDIR": str(self.temporary), "MODULES": str(self.modules)}
        self.stderr = home / "stderr"
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                words,
                cwd=cwd or home,
                env={**os.environ, **paths},
                preexec_fn=partial(os.sched_setaffinity, 0, {next(self.cores)}),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def ended(self) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr."""
        said = self.process.communicate(timeout=280)[0]
        return self.process.returncode, said, self.stderr.read_text()

    def pid(self, rank: int) -> int:
        (status,) = self.temporary.glob(f"h3dist-*/status/rank{rank}.json")
        return json.loads(status.read_text())["pid"]


class Stopped(Command):
    """A command of two ranks that is stopped by `deed` as soon as it denoises, whoever waits for it."""

    def __init__(self, home: Path, deed: Callable[["Stopped"], None], *words: str) -> None:
        super().__init__(home, *words)
        self.deed, self.born, self.taken = deed, {}, 0.0
        self.thread = Thread(target=self.watch)
        self.thread.start()

    def watch(self) -> None:
        while "step 2/" not in self.stderr.read_text():
            if self.process.poll() is not None:
                return
            time.sleep(0.05)
        pids = (self.process.pid, self.pid(0), self.pid(1))
        self.born, since = {pid: birth(pid) for pid in pids}, time.monotonic()
        self.deed(self)
        self.process.wait()
        self.taken = time.monotonic() - since

    def ended(self) -> tuple[int, str, str]:
        """The same; it must have left in time, with nothing behind it but its logs."""
        ended = super().ended()
        self.thread.join()
        assert self.born, ended
        assert self.taken < LIMIT
        assert [pid for pid, at in self.born.items() if birth(pid) == at is not None] == []
        assert not [path for path in self.home.iterdir() if "mp4" in path.name or path.name.startswith(".h3dist-")]
        return ended


def h3dist(home: Path, *words: str, cwd: Path | None = None) -> Command:
    return Command(home, sys.executable, "-m", "h3dist", *words, cwd=cwd)


def overrides(folder: Path, path: str) -> list[str]:
    """A set's overrides with `path` in the place of its folder."""
    return (folder / "overrides.txt").read_text().replace("@", path).split()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(home):
    """All commands that need nothing of each other."""
    tiny = write_tiny(home / "tiny", "full", seed=5)["overrides"].parent
    long = [sys.executable, "-m", "h3dist", "generate", PROMPT, "--gpus", "2", "-o", "long.mp4", "sampler=official"]
    long += ["request.width=192", "request.height=192", "request.steps=200", *overrides(tiny, str(tiny))]
    started = {
        "quickstart": quickstart(home / "quickstart"),
        "killed": Stopped(home / "killed", kill_rank_1, *long, "--mode", "tensor"),
        "interrupted": Stopped(home / "interrupted", interrupt, *long, "--mode", "ulysses"),
    }
    if GOLDEN.is_dir():
        asked = ["generate", "--request", str(GOLDEN / "request.json"), "-o", "golden.mp4", "--gpus", "3"]
        asked += ["--mode", "ulysses", "output.intermediates=golden.safetensors", *overrides(GOLDEN, str(GOLDEN))]
        started["golden"] = h3dist(home / "golden", *asked)
    yield started
    for command in started.values():
        command.process.kill()
        command.process.communicate()


def quickstart(home: Path) -> Command:
    """The script itself, with an environment that is there already."""
    (home / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "quickstart.sh", home / "launch")
    (home / "launch" / "setup.sh").write_text(SET_UP)
    (home / ".venv" / "bin").mkdir(parents=True)
    script = home / ".venv" / "bin" / "h3dist"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m h3dist "$@"\n')
    script.chmod(0o755)
    return Command(home, "bash", "launch/quickstart.sh")


def kill_rank_1(command: Stopped) -> None:
    os.kill(command.pid(1), signal.SIGKILL)


def interrupt(command: Stopped) -> None:
    command.process.send_signal(signal.SIGINT)


def test_a_signal_ends_every_process_and_leaves_no_file(runs):
    code, said, complained = runs["interrupted"].ended()
    assert (code, said) == (130, "")
    assert "error" not in complained and "Traceback" not in complained


def test_a_rank_killed_at_work_is_named_once(runs):
    code, said, complained = runs["killed"].ended()
    assert (code, said) == (7, "")
    (told,) = [line for line in complained.splitlines() if "error" in line]
    assert told.startswith("h3dist: error: RankError on rank 1 in denoise: process ") and "SIGKILL" in told
    folder = Path(complained.splitlines()[-1].removeprefix("h3dist: logs of this run: "))
    assert list(folder.glob("logs/**/stderr.log"))
    assert json.loads((folder / "job.json").read_text())["request"]["prompt"] == PROMPT


def test_the_quickstart_prints_a_film_that_plays(runs):
    code, said, complained = runs["quickstart"].ended()
    assert code == 0, complained
    made = Path(said.splitlines()[-1])
    assert made == runs["quickstart"].home / "outputs" / "quickstart" / "quickstart.mp4"
    film = probe(made)
    assert (film.frames, film.width, film.height, film.audio_rate, film.audio_channels) == (39, 192, 128, 32000, 2)
    assert abs(film.audio_samples - 39 * 4000 // 3) <= 1
    assert "step 4/4" in complained
    assert not list(runs["quickstart"].temporary.glob("h3dist-*")), "logs of a run that went well"


def test_only_rank_0_imports_what_encodes_and_decodes(runs):
    runs["quickstart"].ended()
    told = [json.loads(path.read_text()) for path in runs["quickstart"].modules.iterdir()]
    ranks = {process["rank"]: set(process["modules"]) for process in told if process["rank"]}
    assert ranks == {"0": {"torch", "transformers", "diffusers", "av"}, "1": {"torch"}}
    (launcher,) = [process for process in told if "generate" in process["argv"]]
    assert launcher["modules"] == [], "planning and launching are light"


@pytest.fixture(scope="module")
def again(runs, home):
    """The quickstart's sidecar as a request, from another folder, with all that can be asked for beside the film."""
    runs["quickstart"].ended()
    made = runs["quickstart"].home / "outputs" / "quickstart"
    out = home / "again" / "(1), a=b # é"
    out.mkdir(parents=True)
    asked = ["generate", "--request", "../../quickstart/outputs/quickstart/quickstart.json", "-o", f"{NAME}.mp4"]
    asked += ["--gpus", "2", "--mode", "ulysses", "request.mux_audio=false", "output.latents=l.safetensors"]
    asked += ["output.intermediates=i.safetensors", "output.trace=t.safetensors"]
    path = "../../quickstart/outputs/quickstart/tiny"
    command = h3dist(home / "again", *asked, *overrides(made / "tiny", path), cwd=out)
    code, said, complained = command.ended()
    assert (code, said) == (0, f"{out / NAME}.mp4\n"), complained
    return json.loads((made / "quickstart.json").read_text()), out


def test_a_sidecar_makes_the_same_latents_again(again):
    first, out = again
    (sidecar,) = out.glob("*.json")
    second = json.loads(sidecar.read_text())
    assert first["sha256"] == second["sha256"]
    assert first["plan_digest"] == second["plan_digest"]
    assert second["request"] == first["request"] | {"mux_audio": False}


def test_every_file_that_was_asked_for_is_whole_under_its_name(again):
    _, out = again
    names = {path.name for path in out.iterdir()}
    shortened = {name for name in names if name.startswith("你")} - {f"{NAME}.mp4", f"{NAME}.wav"}
    assert names - shortened == {f"{NAME}.mp4", f"{NAME}.wav", "l.safetensors", "i.safetensors", "t.safetensors"}
    (sidecar,) = shortened
    hashes = json.loads((out / sidecar).read_text())["sha256"]
    for file in "lit":
        found = load_file(out / f"{file}.safetensors")
        assert {name: sha256(found[name]) for name in hashes} == hashes
    steps = {f"step.{step:03d}.{kind}_latents" for step in (1, 2, 3, 4) for kind in ("video", "audio")}
    assert load_file(out / "t.safetensors").keys() == steps | hashes.keys()
    film = probe(out / f"{NAME}.mp4")
    assert (film.frames, film.audio_channels) == (39, 0)
    frames = load_file(out / "i.safetensors")["frames"]
    assert (frames.shape, frames.dtype) == ((39, 128, 192, 3), torch.uint8)


def test_every_rank_sent_and_asked_what_was_planned(again):
    for told in (again[0], json.loads(next(again[1].glob("*.json")).read_text())):
        assert len(told["ranks"]) == 2
        for rank in told["ranks"]:
            assert rank["sent"]["counted"] == rank["sent"]["planned"]
            assert rank["file_bytes"]["counted"] == rank["file_bytes"]["planned"]


@needs_golden
def test_three_ranks_make_what_other_software_made(runs):
    code, _, complained = runs["golden"].ended()
    assert code == 0, complained
    check_golden(runs["golden"].home / "golden.safetensors")
