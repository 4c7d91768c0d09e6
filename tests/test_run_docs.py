"""Every command that the documents show is one that works: run where it can be, else parsed by what would run it."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from typer.main import get_command

from h3dist.cli.commands import app
from h3dist.config import compose, conf_dir

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(ROOT.glob("*.md"))
OTHERS = {"cd", "docker", "git", "hf", "mapfile", "pip", "source", "ssh"}  # programs that are not ours


def blocks() -> list[tuple[str, str]]:
    """Every shell block, with its document's name."""
    found = []
    for path in DOCUMENTS:
        found += [(path.name, block) for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.M | re.S)]
    return found


def commands() -> list[tuple[str, dict[str, str], list[str]]]:
    """Every command of the blocks: its document, the variables before it, its words."""
    found = []
    for name, block in blocks():
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z][A-Z0-9_]*=", word)), len(words))
            if words:
                found.append((name, dict(word.split("=", 1) for word in words[:count]), words[count:]))
    return found


def shown(*programs: str) -> list:
    """Test parameters: the commands whose program's name matches one of the patterns."""
    return [
        pytest.param(variables, words, id=f"{name}-{' '.join(words)[:60]}")
        for name, variables, words in commands()
        if words and any(re.fullmatch(program, words[0]) for program in programs)
    ]


def overrides(words: list[str]) -> list[str]:
    return [word for word in words if re.match(r"[a-z_]+(\.[a-z_]+)*=", word)]


def test_blocks_are_shell():
    assert len(blocks()) >= 5
    for name, block in blocks():
        told = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert told.returncode == 0, f"{name}: {told.stderr}"


def test_every_command_is_looked_at_here():
    ours = {"h3dist", "torchrun", "python", "export"}
    unknown = {words[0] for *_, words in commands() if words and "/" not in words[0]} - ours - OTHERS
    assert not unknown, "add a test of these, or name them in OTHERS"


@pytest.mark.parametrize(("variables", "words"), shown("h3dist"))
def test_h3dist_takes_these_words(variables, words):
    group = get_command(app)
    with group.make_context("h3dist", ["tasks"]) as context:
        command = group.get_command(context, words[1])
        assert command is not None, words[1]
        parsed = command.make_context(words[1], list(words[2:]), parent=context).params
    if words[1] in ("generate", "plan", "decode"):
        compose(overrides(parsed.get("words") or []))


@pytest.mark.parametrize(("variables", "words"), shown("torchrun"))
def test_torchrun_takes_these_words(variables, words):
    parsed = get_args_parser().parse_args(words[1:])
    assert parsed.module and parsed.training_script == "h3dist.generate"
    assert overrides(parsed.training_script_args) == parsed.training_script_args
    compose(parsed.training_script_args)


@pytest.mark.parametrize(("variables", "words"), shown(r"(\./)?launch/.*"))
def test_scripts_are_there_and_hand_on_legal_words(variables, words, tmp_path):
    """What a script would run is taken down in its place; scripts that set up and test are left to be run by people."""
    script = ROOT / words[0]
    assert os.access(script, os.X_OK)
    if "run_distributed" not in script.name:
        assert words[1:] == []
        return
    noted = tmp_path / "noted"
    noted.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    noted.chmod(0o755)
    environ = {**os.environ, **variables, "H3DIST": str(noted)}
    told = subprocess.run([script, *words[1:]], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    test_h3dist_takes_these_words({}, ["h3dist", *told.stdout.splitlines()])


@pytest.mark.parametrize(("variables", "words"), shown("python"))
def test_programs_are_there(variables, words):
    if words[1] == "-m":
        assert words[2].split(".")[0] in ("h3dist", "pytest"), words
    else:
        assert (ROOT / words[1]).is_file(), words


def test_variables_are_read():
    exported = [word.split("=")[0] for *_, words in commands() if words and words[0] == "export" for word in words[1:]]
    read = (conf_dir() / "config.yaml").read_text()
    assert exported and all(f"oc.env:{name}," in read for name in exported)
