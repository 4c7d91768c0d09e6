"""Runs that are refused before a rank starts, from the command line: the exit code, the cause, and what would do."""

import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from h3dist import launcher
from h3dist.checkpoint.tiny import write_tiny
from h3dist.cli.commands import main
from h3dist.outputs import claimed

FILES = ("denoiser", "text_encoder", "video_vae", "audio_vae")


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    return write_tiny(tmp_path_factory.mktemp("set"), seed=4)


@pytest.fixture
def run(paths, monkeypatch, capsys, tmp_path):
    """Type words after `h3dist`, over a tiny set in an empty folder: exit code, stdout, stderr, whether work began."""
    lines = paths["overrides"].read_text().replace("@", str(paths["overrides"].parent)).splitlines()
    monkeypatch.chdir(tmp_path)

    def type_words(*words: str, tiny: bool = True):
        begun = []
        monkeypatch.setattr(launcher, "_run", lambda *_: begun.append(True) or 0)
        monkeypatch.setattr(sys, "argv", ["h3dist", *words[:2], *(lines if tiny else ()), *words[2:]])
        with pytest.raises(SystemExit) as left:
            main()
        told = capsys.readouterr()
        return left.value.code, told.out, told.err, bool(begun)

    return type_words


def test_a_tokenizer_that_is_not_there_is_fetched_by_the_line_that_is_said(run, tmp_path):
    code, _, told, begun = run("generate", "x", "model.tokenizer=nowhere/tokenizer")
    assert (code, begun) == (3, False)
    command = shlex.split(next(line for line in told.splitlines() if line.startswith("  ")))
    assert command[:2] == ["hf", "download"] and "--revision" in command and "FL2VA/tokenizer/*" in command
    assert "H3_TOKENIZER_PATH" in told and "about 11 MB" in told


@pytest.mark.parametrize("slot", FILES)
def test_every_slot_refuses_what_is_absent_cut_short_or_another_model(slot, run, paths, tmp_path):
    other = paths["text_encoder" if slot != "text_encoder" else "denoiser"]
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(paths[slot].read_bytes()[:-1])
    for path, why in ((tmp_path / "absent", "no such file"), (cut, "cut.safetensors"), (other, "it is the ")):
        code, _, told, begun = run("generate", "x", f"model.{slot}={path}")
        assert (code, begun) == (3, False)
        assert why in told and told.startswith("h3dist: error: ") and told.count("\n") == 1


def test_vaes_in_each_others_slot_are_put_right_and_said(run, paths):
    swap = [f"model.video_vae={paths['audio_vae']}", f"model.audio_vae={paths['video_vae']}"]
    code, _, told, begun = run("generate", "x", *swap)
    assert (code, begun) == (0, True)
    assert "the two VAEs were swapped" in told


def test_more_ranks_than_heads_names_the_limit(run):
    for mode in ("ulysses", "tensor"):
        code, _, told, begun = run("generate", "x", "--gpus", "15", "--mode", mode)
        assert (code, begun) == (4, False)
        assert "14 heads" in told


def test_memory_that_is_too_small_names_a_layout_that_is_taken(run):
    """At the released sizes, no files needed; the words that the refusal names are then accepted as they stand."""
    asked = ["plan", "A boat.", "--gpu-memory", "8GiB"]
    code, _, told, _ = run(*asked, "--gpus", "4", "--mode", "ulysses", tiny=False)
    assert code == 4 and "to denoise and 8.0 GiB are free" in told
    advice = re.search(r"the nearest that fits is ((?:\S+ )*?\S+), [\d.]+ GiB", told)[1].split()
    options = advice[:2] if advice[0] == "--gpus" else ["--gpus", "4"]
    taken = [word for word in advice if "=" in word]
    assert taken and run(*asked, *options, *taken, tiny=False)[0] == 0


def test_memory_that_no_layout_makes_enough_names_less_to_make(run):
    large = ["request.width=2048", "request.height=2048", "request.frames=362"]
    asked = ["plan", "A boat.", "--gpu-memory", "8GiB", "--gpus", "8"]
    code, _, told, _ = run(*asked, *large, tiny=False)
    assert code == 4 and "no layout of up to 8 ranks fits; what fits is request." in told
    for words in re.findall(r"(?:what fits is|or) (request[^,]*), [\d.]+ GiB", told):
        taken = [word for word in large if word.split("=")[0] not in words] + words.split()
        assert run(*asked, *taken, tiny=False)[0] == 0


def test_a_plan_names_the_paths_that_are_not_there(run):
    absent = ["model.denoiser=/nowhere/h3.safetensors", "model.tokenizer=/nowhere/t"]
    code, _, told, _ = run("plan", "A boat.", "--gpu-memory", "96GiB", *absent)
    assert code == 0
    assert "planned without what is not there: model.denoiser=/nowhere/h3.safetensors\n" in told
    assert "no tokenizer at /nowhere/t: " in told


def test_gpus_without_a_name_are_called_that(run):
    code, said, _, _ = run("plan", "A boat.", "--gpu-memory", "96GiB", tiny=False)
    assert code == 0 and "no time is predicted: these GPUs have no name (say one with --gpu)" in said


def test_a_file_of_the_tokenizers_is_not_replaced(run, paths):
    for name in ("tokenizer.json", "tokenizer.mp4", "tokenizer_config.json"):  # of the second, NAME.json is
        before = (paths["tokenizer"] / "tokenizer.json").read_bytes()
        code, _, told, begun = run("generate", "x", "-o", str(paths["tokenizer"] / name))
        assert (code, begun) == (5, False) and "this run reads" in told
        assert (paths["tokenizer"] / "tokenizer.json").read_bytes() == before
    assert run("generate", "x", "-o", str(paths["tokenizer"] / "new.mp4"))[0] == 0


def test_two_runs_do_not_write_the_same_files_at_once(run, tmp_path):
    with claimed([str(tmp_path / "o.json")]):
        code, _, told, begun = run("generate", "x", "-o", "o.mp4")
        assert (code, begun) == (5, False) and f"another run is writing {tmp_path}/o.json now" in told
        assert run("generate", "x", "-o", "p.mp4")[0] == 0
    assert run("generate", "x", "-o", "o.mp4")[0] == 0


def test_a_clip_that_is_made_has_its_path_on_stdout_alone(run, tmp_path):
    assert run("generate", "x", "-o", "o.mp4")[1] == f"{tmp_path}/o.mp4\n"


def test_nothing_is_left_of_a_run_that_ends_before_its_ranks(paths, monkeypatch, tmp_path):
    """A signal or an error between the folder of a run and its ranks takes the folder along."""
    lines = paths["overrides"].read_text().replace("@", str(paths["overrides"].parent)).splitlines()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launcher, "launch_ranks", lambda *_, **__: (_ for _ in ()).throw(SystemExit(143)))
    job = launcher.Job({"prompt": "x", "seed": 1}, lines, 1, {"path": str(tmp_path / "o.mp4")})
    with pytest.raises(SystemExit):
        launcher.run_generate(job)
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_checked_before_the_checkpoints_are_looked_at(run, tmp_path):
    for path in ("absent/o.mp4", "你" * 84 + ".mp4", "."):
        code, _, told, begun = run("generate", "x", "-o", path, "model.denoiser=absent")
        assert (code, begun) == (5, False)
        assert told.startswith("h3dist: error: cannot write ")
    assert not list(tmp_path.iterdir())
