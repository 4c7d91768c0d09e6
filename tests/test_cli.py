"""The command line: what is typed reaches the launcher byte for byte; an error is one line and a code."""

import json
import subprocess
import sys
from functools import cache
from importlib.metadata import version

import pytest

from h3dist import errors, launcher, planner
from h3dist.cli import typed
from h3dist.cli.commands import main
from h3dist.config import compose
from h3dist.request import FIELDS, TASKS, json_schema, parse_request, resolve
from tests.prompts import PROMPTS

NAMES = [
    "a,b",
    "a=b",
    "(1)",
    "#",
    "'",
    "é",
    "null",
    "123",
    "${x}",
    "???",
    "a b.mp4",
    "[a]",
    "-x.mp4",
    "你" * 83 + ".mp4",
]


@cache
def composed(*overrides):
    """One composition for all tests that type the same overrides."""
    return compose(overrides)


@pytest.fixture
def run(monkeypatch, capsys):
    """Type words after `h3dist`: gives the exit code, the job that the launcher got, stdout and stderr."""

    def type_words(*words):
        jobs = []
        monkeypatch.setattr(typed, "compose", lambda overrides: composed(*overrides))
        monkeypatch.setattr(launcher, "run_generate", lambda job: jobs.append(job) or 0)
        monkeypatch.setattr(sys, "argv", ["h3dist", *words])
        with pytest.raises(SystemExit) as left:
            main()
        told = capsys.readouterr()
        return left.value.code, jobs[0] if jobs else None, told.out, told.err

    return type_words


@pytest.fixture
def refused(run):
    """Type words that are refused: gives the one line on stderr."""

    def type_words(*words):
        code, job, out, err = run(*words)
        assert (code, job, out) == (2, None, "")
        assert err.startswith("h3dist: error: ")
        assert err.count("\n") == 1
        return err

    return type_words


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_typed_prompt_arrives_untouched(prompt, run):
    code, job, _, _ = run("generate", "--gpus", "1", "--", prompt, "request.seed=7")
    assert code == 0
    assert job.request == {"prompt": prompt, "seed": 7}
    assert job.overrides == ["request.seed=7"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_in_a_file_arrives_untouched(prompt, run, tmp_path):
    text, request = tmp_path / "p, #1.txt", tmp_path / "r=1.json"
    text.write_bytes(prompt.encode() + b"\n")
    request.write_text(json.dumps({"prompt": prompt, "seed": 1}))
    assert run("generate", "--prompt-file", str(text))[1].request == {"prompt": prompt}
    assert run("generate", "--request", str(request), "request.seed=2")[1].request == {
        "prompt": prompt,
        "seed": 2,
    }


def test_a_prompt_arrives_untouched_from_a_real_process(tmp_path):
    stub = (
        "import json, sys; from h3dist import launcher; from h3dist.cli.commands import main\n"
        "launcher.run_generate = lambda job: print(json.dumps([job.request, job.output])) or 0\n"
        "main()"
    )
    prompt = "  <d>[English] Hi.</d>\n${oops}, 'a' \"b\" ??? 中文 🦊 "
    command = [sys.executable, "-c", stub, "generate", prompt, "-o", "é, (1) #.mp4"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
    assert json.loads(told) == [{"prompt": prompt}, {"path": "é, (1) #.mp4", "clobber": None}]


@pytest.mark.parametrize("name", NAMES)
def test_an_output_name_arrives_untouched(name, run):
    code, job, _, _ = run("generate", "a fox", "-o", name)
    assert code == 0
    assert job.output["path"] == name
    assert job.overrides == []


def test_an_option_with_an_equals_sign_is_no_file_of_that_name(run, refused):
    assert "write -o x.mp4, or -o ./=x.mp4 for such a name" in refused("generate", "a fox", "-o=x.mp4")
    assert run("generate", "a fox", "--output=x.mp4")[1].output["path"] == "x.mp4"
    assert run("generate", "a fox", "-o", "./=x.mp4")[1].output["path"] == "./=x.mp4"


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir", "hydra.output_subdir", "hydra.job.chdir"])
def test_a_folder_of_hydras_is_refused_naming_the_output(key, refused):
    told = refused("generate", "a fox", f"{key}=true")
    assert f"{key}=true: runs have no folder of Hydra's; output.path= says where to write" in told


def test_the_first_word_is_the_prompt_even_with_an_equals_sign(run):
    _, job, _, err = run("generate", "request.seed=7", "request.seed=8")
    assert job.request == {"prompt": "request.seed=7", "seed": 8}
    assert "the first word is the prompt" in err


def test_with_a_file_every_word_is_an_override(run, refused, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("a fox")
    job = run("generate", "request.seed=7", "--prompt-file", str(path), "parallel=tensor")[1]
    assert job.request == {"prompt": "a fox", "seed": 7}
    assert job.overrides == ["request.seed=7", "parallel=tensor"]
    assert "is no override" in refused("generate", "a prompt", "--prompt-file", str(path))


def test_a_sidecar_of_another_configuration_is_told(run, tmp_path):
    """Its request is repeated, and its sampler and number format are not."""
    path = tmp_path / "earlier.json"
    sampler = vars(composed("sampler=official").sampler)
    made = {"sampler": sampler, "runtime": {"dtype": "auto", "gemm": "fp8"}, "exchange": {"codec": "int8"}}
    path.write_text(json.dumps({"request": {"prompt": "a fox"}, "config": made}))
    _, job, _, err = run("generate", "--request", str(path))
    assert job.request == {"prompt": "a fox"}
    assert f"{path} repeats its run's request, not its configuration, which had sampler.name=official (here " in err
    assert "sampler.noise=official (here comfy)" in err and "dtype" not in err
    assert "runtime.gemm=fp8 (here auto), exchange.codec=int8 (here none)" in err
    same = "sampler=official", "runtime.gemm=fp8", "exchange.codec=int8"
    assert run("generate", "--request", str(path), *same)[3] == ""
    path.write_text(json.dumps({"prompt": "a fox"}))
    assert run("generate", "--request", str(path))[3] == ""


def test_media_arrive_as_absolute_paths(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["request.first_frame=a.png", "request.keyframes=[{image: 'b, (1).png', frame: 7}]"]
    request = run("generate", "a fox", *words)[1].request
    assert request["first_frame"] == str(tmp_path / "a.png")
    assert request["keyframes"] == [{"image": str(tmp_path / "b, (1).png"), "frame": 7}]
    assert parse_request(request).task == "fl2va"


def test_overrides_pass_untouched(run):
    words = ["model.denoiser='/a b,c'", 'output.latents="x y"', "hydra.verbose=true", "runtime.timeout=5"]
    assert run("generate", "a fox", *words)[1].overrides == words


def test_options_of_the_run(run):
    job = run("generate", "-v", "a fox", "--gpus", "6", "--mode", "hybrid", "--attention", "sdpa", "parallel.sp=3")[1]
    assert job.overrides == ["parallel=hybrid", "attention=sdpa", "parallel.sp=3"]
    assert (job.gpus, job.verbose, job.output) == (6, True, {"path": None, "clobber": None})
    job = run("-v", "generate", "a fox", "--no-clobber", "--allow-untrained", "--gpus", "auto")[1]
    assert job.overrides == ["runtime.allow_untrained=true"]
    assert (job.gpus, job.verbose, job.output) == (None, True, {"path": None, "clobber": False})


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["--mode", "ulyses"], "did you mean 'ulysses'"),
        (["--mode", "a,b"], "must be one of"),
        (["--attention", "spda"], "did you mean 'sdpa'"),
        (["--gpus", "0"], "whole number above 0"),
        (["--gpus", "two"], "whole number above 0"),
        (["runtime.devise=cpu"], "did you mean 'runtime.device'"),
        (["--mode", "tensor", "parallel=ulysses"], "given twice"),
        (["-o", "a.mp4", "output.path=b.mp4"], "give one of them"),
        (["request.prompt=abc"], "--prompt-file"),
        (["request.width=496"], "480 and 512"),
        (["request.frames='124'"], "the nearest is 124"),
        (["request.frames=124.5"], "the nearest is 124"),
        (["request.frames=0"], "the nearest is 5"),
        (["request.frames=-5"], "the nearest is 5"),
        (["request.mux_audio='false'"], "without quotes"),
        (["request.steps=1e999"], "steps="),
        (["request.seed=true"], "seed=true"),
        (["request.upscale=true"], "unknown request field 'upscale'"),
        (["request.negative_prompt='x'"], "guidance-distilled"),
        (["--request", "no.json"], "No such file"),
        (["job=no.json"], "the launcher writes the job file"),
        (["runtime.timeout=inf"], "a finite number above 0"),
        (["sampler.audio_shift=1e-30"], "from 0.001 to 1000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_is_said_on_one_line(words, near, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert near in refused("generate", *(["a fox"] if "--request" not in words else []), *words)


def test_what_the_launcher_gets_resolves(run):
    job = run("generate", "a fox", "request.frames=121")[1]
    assert resolve(parse_request(job.request)).frames == 124


@pytest.mark.parametrize("kind", [errors.H3Error, *errors.H3Error.__subclasses__()])
def test_every_error_has_its_own_line_and_code(kind, monkeypatch, capsys):
    def fail(_job):
        raise kind("why")

    monkeypatch.setattr(launcher, "run_generate", fail)
    monkeypatch.setattr(sys, "argv", ["h3dist", "generate", "a fox"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == kind.exit_code
    assert capsys.readouterr().err == "h3dist: error: why\n"


def test_a_traceback_comes_with_v_alone(run):
    assert "Traceback" not in run("generate", "a fox", "parallel=x")[3]
    assert "Traceback" in run("-v", "generate", "a fox", "parallel=x")[3]
    assert "Traceback" in run("generate", "-v", "a fox", "parallel=x")[3]


def test_interruption(monkeypatch):
    monkeypatch.setattr(launcher, "run_generate", lambda job: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(sys, "argv", ["h3dist", "generate", "a fox"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130


def test_the_code_of_the_run_is_the_code_of_the_command(monkeypatch):
    monkeypatch.setattr(launcher, "run_generate", lambda job: 7)
    monkeypatch.setattr(sys, "argv", ["h3dist", "generate", "a fox"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 7


def test_small_commands(run):
    assert run("--version")[2] == f"h3dist {version('h3dist')}\n"
    told = run("tasks")[2]
    assert told.startswith("t2va ") and all(name in told for name in (*TASKS, *FIELDS, "9 images", "89 million"))
    assert json.loads(run("tasks", "--json")[2]) == json_schema()
    assert run("attention")[2].startswith("sdpa ")
    assert run("tiny", "x", "--form", "curved")[3].endswith("did you mean 'curve'?\n")
    assert run("nothing")[0] == 2
    assert run("generate", "--nothing")[0] == 2


def test_help_needs_nothing_heavy():
    code = (
        "import sys; from h3dist.cli.commands import app; app(['--help'], standalone_mode=False)\n"
        "sys.exit(bool({'torch', 'hydra', 'pydantic'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_plan_takes_what_generate_takes(monkeypatch, run):
    seen = {}

    class Decision:
        notes = ("a note",)

        @staticmethod
        def text():
            return "the plan"

        @staticmethod
        def as_dict():
            return {"world": 6}

    def decide_ahead(config, request, ahead):
        seen.update(config=config, request=request, ahead=ahead)
        return Decision

    monkeypatch.setattr(planner, "decide_ahead", decide_ahead)
    machine = ["--gpus", "6", "--gpu-memory", "96GiB", "--gpu", "RTX PRO 6000", "--links", "links.json"]
    words = [*machine, "--mode", "tensor", "-o", "x.mp4", "request.frames=22"]
    code, _, out, err = run("plan", "a fox", *words)
    assert (code, out, err) == (0, "the plan\n", "h3dist: a note\n")
    assert seen["request"] == {"prompt": "a fox", "frames": 22}
    assert seen["ahead"] == planner.Ahead(6, "RTX PRO 6000", 96 * 2**30, "links.json")
    assert seen["config"].parallel.mode == "tensor"
    assert json.loads(run("plan", "--json")[2]) == {"world": 6}
    assert seen["request"]["prompt"] and seen["ahead"] == planner.Ahead()
    assert "96GiB or 80GB" in run("plan", "--gpu-memory", "96")[3]


@pytest.mark.parametrize(
    ("words", "near"),
    [(["x", "--seed", "-1"], "2^32 - 1"), (["x", "--seed", "9" * 30], "2^32 - 1"), ([""], "DIR is empty")],
    ids=["below", "beyond", "no folder"],
)
def test_tiny_refuses_before_it_writes(words, near, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert near in refused("tiny", *words)
    assert not list(tmp_path.iterdir())
