"""What the tests of rented pods share: the command line as a process, and the same work inside this process."""

import importlib.util
import io
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from fake_runpod import SSHD, USER_KEY, FakeRunpod

from h3dist.cloud import run, runpod
from h3dist.cloud.keys import Redactor
from h3dist.cloud.money import Limits
from h3dist.cloud.pace import Pace
from h3dist.cloud.quote import Ask
from h3dist.cloud.recipe import load_recipe
from h3dist.cloud.rental import Rental
from h3dist.cloud.signals import Gate

PACE = 0.02  # every wait of the product at a fiftieth
POD = Path(__file__).resolve().parent.parent / "runpod" / "pod.py"


def _load_pod() -> Any:
    spec = importlib.util.spec_from_file_location("runpod_pod_py", POD)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


POD_MODULE = _load_pod()

needs_sshd = pytest.mark.skipif(
    not (Path(SSHD).exists() and shutil.which("ssh") and shutil.which("tmux")),
    reason="needs openssh-server, openssh-client and tmux: apt-get install -y openssh-server openssh-client tmux",
)


def python(code: str) -> list[str]:
    """A small real command for the pod."""
    return [sys.executable, "-c", code]


QUICK = ["true"]
LONG = python("import time\nfor i in range(1200): print('tick', i, flush=True); time.sleep(0.05)")


class Desk:
    """One user at one machine, with a cloud of their own. Everything that was printed is in `said`."""

    def __init__(self, cloud: FakeRunpod, folder: Path) -> None:
        self.cloud, self.folder = cloud, folder
        self.out, self.state = folder / "out", folder / "state-dir"
        self.said: list[str] = []
        self.env = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
        self.env |= {"RUNPOD_API_KEY": USER_KEY, "H3_RUNPOD_API": cloud.url, "H3_STATE_DIR": str(self.state)}

    def office(self, pace: Pace | None = None) -> runpod.Office:
        redact = Redactor()
        say = lambda text: self.said.append(redact(text))  # noqa: E731
        return runpod.Office(say, redact, pace or Pace().scaled(PACE), environ=self.env, api=self.cloud.url)

    def do(
        self,
        command: list[str],
        *,
        pace: Pace | None = None,
        limits: Limits | None = None,
        ask: dict[str, Any] | None = None,
        recipe: dict[str, Any] | None = None,
        office: runpod.Office | None = None,
        **work: Any,
    ) -> Path:
        """Rent, run and give back, inside this process."""
        office = office or self.office(pace)
        client = office.client()
        wanted = Ask(**({"gpus": ("H200 NVL",), "count": 1} | (ask or {})))
        chosen = load_recipe(self.cloud.recipe(**(recipe or {})))
        quoted = runpod.quoted(office, wanted, chosen, limits or Limits(20.0, 3600.0), client)
        gate = Gate(office.say)
        with gate.caught():
            target = work.pop("target", self.out)
            desk = runpod.desk(office, client, quoted, gate)
            return run.carry_out(desk, quoted, run.Work(command, target, **work))

    def rent(
        self,
        *,
        pace: Pace | None = None,
        limits: Limits | None = None,
        during: Callable[[Rental], None] | None = None,
        **ask: Any,
    ) -> Rental:
        """Rent a pod and give it back, without ever going to it; `during` is done in between."""
        office = self.office(pace)
        client = office.client()
        wanted = Ask(**({"gpus": ("H200 NVL",), "count": 1} | ask))
        recipe = load_recipe(self.cloud.recipe())
        quoted = runpod.quoted(office, wanted, recipe, limits or Limits(20.0, 3600.0), client)
        desk = runpod.desk(office, client, quoted, Gate(office.say))
        with Rental(desk, quoted.wish, quoted.base, "test") as rental:
            if during:
                during(rental)
        return rental

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, str(POD), "--pace", str(PACE), *words]

    def pod_py(self, *words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """`runpod/pod.py` in this process, which is quicker: the same file, arguments, environment and exit code."""
        out, err, before = io.StringIO(), io.StringIO(), (os.environ.copy(), sys.stdin, Path.cwd())
        try:
            os.environ.clear()
            os.environ.update(self.env | env)
            os.chdir(self.folder)
            sys.stdin = io.StringIO(stdin)
            with redirect_stdout(out), redirect_stderr(err):
                code = POD_MODULE.run_command(["--pace", str(PACE), *words])
        finally:
            os.environ.clear()
            os.environ.update(before[0])
            sys.stdin = before[1]
            os.chdir(before[2])
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def process(self, *words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """`runpod/pod.py` as a user runs it."""
        return subprocess.run(
            self.argv(*words), env=self.env | env, cwd=self.folder, input=stdin, text=True, capture_output=True,
            timeout=100, check=False,
        )  # fmt: skip

    def start(self, *words: str) -> "Running":
        return Running(self.argv(*words), self.env, self.folder)

    def leases(self) -> list[Path]:
        return sorted(self.state.glob("runpod/h3dist-*"))

    def given_back(self) -> None:
        """Nothing costs money any more, and nothing is noted as if it did."""
        assert self.cloud.running == []
        assert self.leases() == []


class Running:
    """A `pod.py` that runs; its output is collected as it comes."""

    def __init__(self, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.process = subprocess.Popen(
            argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, part: str, seconds: float = 60.0) -> None:
        """Wait until a line holds `part`."""
        await_(lambda: any(part in line for line in list(self.lines)) or self.process.poll() is not None, seconds)
        assert part in self.text, f"no {part!r} in:\n{self.text}"

    def end(self, seconds: float = 60.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


def await_(true: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait until `true()` is."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
