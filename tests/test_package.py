"""What is shipped and typed: the wheel, the pinned set, the launch scripts, the time limit of tests."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from h3dist import launcher
from h3dist.cli.commands import main
from h3dist.request import parse_request, resolve
from h3dist.text.tokenizer import REPOSITORY, REVISION, SUBFOLDER

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]
T2VA = ROOT / "launch" / "run_distributed_t2va.sh"
ECHO = """#!{python}
import json, os, sys
words = sys.argv[1:]
prompt = open(words[words.index("--prompt-file") + 1]).read() if "--prompt-file" in words else None
print(json.dumps([words, prompt, os.environ["H3_OUTPUT_PATH"]]))
"""


def test_the_wheel_holds_the_configuration(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    shipped = {path.relative_to(tmp_path / "site/h3dist") for path in (tmp_path / "site/h3dist/conf").rglob("*.yaml")}
    assert shipped == {path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")}
    schema = "h3dist/request/schema.json"
    assert (tmp_path / "site" / schema).read_bytes() == (ROOT / schema).read_bytes()
    code = "from h3dist.config import compose, conf_dir; compose(['preset=reference']); print(conf_dir())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == str(tmp_path / "site/h3dist/conf")


def requirements(extra=None):
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    names = (re.match(r"[A-Za-z0-9_.-]+(\[\w+\])?", line)[0] for line in lines)
    return [name for name in names if not name.startswith("h3dist[")]


@pytest.mark.parametrize("extra", [None, "dev", "runpod", "plots"])
def test_what_ci_installs_is_pinned(extra):
    pinned = {name.lower().replace("_", "-") for name in PINNED}
    assert {name.lower().replace("_", "-") for name in requirements(extra)} <= pinned


def test_torch_is_the_one_that_ci_uses():
    assert PINNED["torch"] == "2.13.0"
    assert "torch>=2.11" in PROJECT["dependencies"]
    assert "diffusers>=0.42.1,<0.43" in PROJECT["dependencies"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_can_be_started(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.name == "setup.sh" or os.access(script, os.X_OK)


@pytest.mark.parametrize("name", ["test.sh", "quickstart.sh", "run_distributed_t2va.sh"])
def test_scripts_tell_their_use_from_any_folder(name, tmp_path):
    told = subprocess.run([ROOT / "launch" / name, "--help"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert len(told.stdout + told.stderr) > 50


@pytest.fixture
def t2va(tmp_path):
    """Run the script with a command that tells what it was called with."""
    fake = tmp_path / "h3dist"
    fake.write_text(ECHO.format(python=sys.executable))
    fake.chmod(0o755)

    def start(*words, **environment):
        told = subprocess.run(
            [T2VA, *words],
            cwd=tmp_path,
            env=os.environ | {"H3DIST": str(fake)} | environment,
            capture_output=True,
            text=True,
        )
        return json.loads(told.stdout) if told.returncode == 0 else told.returncode

    return start


def test_t2va_uses_the_reference_cell_and_all_gpus(t2va):
    words, prompt, output = t2va("ulysses")
    assert words[:5] == ["generate", "--mode", "ulysses", "--gpus", "auto"]
    assert words[-1] == "preset=reference"
    assert len(prompt) > 20
    assert output == "h3dist-ulysses.mp4"


def test_t2va_passes_what_it_was_given(t2va):
    words, prompt, output = t2va(
        "hybrid",
        "6",
        "sdpa_cudnn",
        "--",
        "-o",
        "a b.mp4",
        "parallel.sp=3",
        PROMPT='-x "é" $y\n ',
        H3_OUTPUT_PATH="o.mp4",
    )
    assert words[:7] == ["generate", "--mode", "hybrid", "--gpus", "6", "--attention", "sdpa_cudnn"]
    assert words[-3:] == ["-o", "a b.mp4", "parallel.sp=3"]
    assert prompt == '-x "é" $y\n \n'
    assert output == "o.mp4"


def test_t2va_takes_a_prompt_file_or_a_request(t2va, tmp_path):
    (tmp_path / "p.txt").write_text("a fox")
    assert t2va("tensor", PROMPT_FILE="p.txt")[1] == "a fox"
    words, prompt, _ = t2va("tensor", "2", "--", "--request", "r.json")
    assert prompt is None
    assert "preset=reference" not in words


@pytest.mark.parametrize("words", [[], ["--"], ["tensor", "2", "sdpa", "extra"]])
def test_t2va_refuses_other_arguments(words, t2va):
    assert t2va(*words) == 2


def test_t2va_refuses_two_prompts(t2va):
    assert t2va("tensor", PROMPT="a", PROMPT_FILE="b") == 2


def test_set_up_wants_python_3_11(tmp_path):
    """With only old interpreters in reach, the message names the version and the way out."""
    folder = tmp_path / "repository" / "launch"
    folder.mkdir(parents=True)
    old, tools = tmp_path / "old", tmp_path / "tools"
    old.mkdir(), tools.mkdir()
    for name in ("python3", "python"):
        (old / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\nexit 1\n')
        (old / name).chmod(0o755)
    for tool in ("bash", "dirname", "head", "sed"):
        (tools / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    for name in ("test.sh", "setup.sh"):
        (folder / name).write_text((ROOT / "launch" / name).read_text())
    told = subprocess.run(
        ["bash", folder / "test.sh"],
        env={"PATH": f"{old}:{tools}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert told.returncode != 0
    assert "needs Python 3.11 or newer; python3 here is Python 3.9.2" in told.stderr
    assert "PYTHON=" in told.stderr


HANGING = """
import subprocess, sys, pytest

@pytest.mark.limit(1)
def test_hangs():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60) # {marker}"], start_new_session=True)

def test_the_next_one():
    pass
"""


def test_a_hanging_test_fails_alone_and_leaves_nothing(tmp_path):
    marker = f"hang-{os.getpid()}"
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_hanging.py").write_text(HANGING.format(marker=marker))
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 1
    assert "1 failed, 1 passed" in told.stdout
    assert "over its limit of 1 s" in told.stdout
    assert "in test_hangs" in told.stderr  # the stacks
    alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if marker.encode() in read(path)]
    assert alive == []


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def shown(kind):
    """The words of every command of this kind that the README shows, but for arrays that a shell would put in."""
    lines = re.findall(rf"^{kind} .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return [[word for word in shlex.split(line, comments=True)[1:] if "[@]" not in word] for line in lines]


def shown_requests():
    """The commands that say a whole request in words; others measure for minutes or read files of the user's."""
    return [words for words in shown("h3dist") if words[0] in ("generate", "plan") and "--request" not in words]


@pytest.mark.parametrize("words", shown_requests(), ids=" ".join)
def test_requests_in_the_readme_are_legal(words, monkeypatch):
    """All the way to the job or the plan; `test_run_docs` parses every command."""
    monkeypatch.setattr(launcher, "run_generate", lambda job: 0 if resolve(parse_request(job.request)) else 1)
    monkeypatch.setattr(sys, "argv", ["h3dist", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0


def test_the_first_commands_in_the_readme_are_the_scripts():
    commands = re.findall(r"^\./(\S+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["launch/quickstart.sh", "launch/test.sh"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


def test_the_readme_names_the_pinned_tokenizer():
    told = (ROOT / "README.md").read_text()
    assert all(part in told for part in (REPOSITORY, REVISION, SUBFOLDER))
