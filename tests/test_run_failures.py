"""What goes wrong in a run: every rank leaves with the first cause, nothing half is left, finished latents are kept."""

import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from safefiles import edited
from safetensors.torch import load_file
from stages import Break, Run, on_one_core, prepare_run, run_whole
from world import World

from h3dist import launcher, pipeline
from h3dist.checkpoint.tiny import write_tiny
from h3dist.cli.commands import main
from h3dist.config import as_override
from h3dist.errors import CheckpointError, H3Error, NumericsError, OutputError
from h3dist.topology import Ranks
from h3dist.vae import VideoVae

REQUEST = {"prompt": "A boat.", "width": 64, "height": 64, "frames": 22, "steps": 2, "seed": 7}
STAGES = {  # stage: where it breaks
    "start": Break(0, "read_job", CheckpointError("the tokenizer is not there")),
    "plan": Break(1, "plan_for", MemoryError("no memory to plan in")),
    "encode": Break(1, "load_denoiser", CheckpointError("the disk went away")),
    "denoise": Break(1, "denoiser", OSError("a device fell off"), late=True),
    "decode": Break(0, "deliver", OutputError("the disk is full")),
}
pytestmark = [pytest.mark.limit(300), pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("set"), seed=3)


@pytest.fixture(scope="module", autouse=True)
def one_core():
    with on_one_core():
        yield


@pytest.fixture(scope="module")
def world():
    with World(2) as world:
        yield world


# --- an exception on one rank


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_on_one_rank_in_any_stage_is_everybodys(stage, paths, world, tmp_path):
    broken = STAGES[stage]
    ends = world.outcomes(run_whole, prepare_run(paths, REQUEST, tmp_path), broken, limit=200)
    own, others = ends[broken.rank].error, ends[1 - broken.rank].error
    assert (type(own), str(own)) == (type(broken.error), str(broken.error)), ends[broken.rank].trace
    assert type(others) is (type(own) if isinstance(own, H3Error) else H3Error), ends[1 - broken.rank].trace
    assert f"rank {broken.rank}, {stage}: " in str(others) and str(own) in str(others)
    assert (others.rank, others.stage) == (broken.rank, stage)
    assert not list(tmp_path.iterdir())


# --- numbers that are none


def alone(run: Run) -> None:
    pipeline.run(run.config, run.job, Ranks())


def with_nan(source: Path, target: Path, *names: str) -> Path:
    """A copy of a checkpoint whose tensors of these names begin with NaN."""

    def edit(tensors):
        for name in names:
            dtype, shape, data = tensors[name]
            nan = {"F32": struct.pack("<f", float("nan")), "F16": b"\x00\x7e", "BF16": b"\xc0\x7f"}[dtype]
            tensors[name] = dtype, shape, nan + data[len(nan) :]

    return edited(source, target, edit)


@pytest.mark.parametrize(
    ("name", "stream"),
    [("blocks.1.norm1.weight", "video"), ("final_layer.audio_out.bias", "audio")],
)
def test_nan_from_the_model_names_stream_and_step(name, stream, paths, tmp_path):
    denoiser = with_nan(paths["denoiser"], tmp_path / "nan.safetensors", name)
    (tmp_path / "out").mkdir()
    run = prepare_run(paths, REQUEST, tmp_path / "out", f"model.denoiser={denoiser}")
    with pytest.raises(NumericsError, match=rf"step 1 of 2: \d+ of \d+ values of the model's {stream} velocity") as why:
        alone(run)
    assert why.value.exit_code == 6
    assert not list((tmp_path / "out").iterdir())


def test_ranks_that_fail_together_have_one_cause(paths, world, tmp_path):
    denoiser = with_nan(paths["denoiser"], tmp_path / "nan.safetensors", "blocks.1.norm1.weight")
    run = prepare_run(paths, REQUEST, tmp_path, f"model.denoiser={denoiser}")
    first, second = (end.error for end in world.outcomes(run_whole, run, limit=200))
    assert type(first) is type(second) is NumericsError
    own, told = (first, second) if first.rank is None else (second, first)
    assert own.rank is None and told.rank is not None and str(own) in str(told)


# --- a decode that fails


@contextmanager
def small_disk(path: Path, kibibytes: int):
    """A real file system of that size, where this user may mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(scope="module")
def film(paths, tmp_path_factory) -> Path:
    """The film of a run that went well, beside its latents."""
    folder = tmp_path_factory.mktemp("well")
    alone(prepare_run(paths, REQUEST, folder, latents="l.safetensors"))
    return folder / "o.mp4"


def type_words(monkeypatch, *words: str) -> int:
    """What `h3dist` with these words exits with, in this process."""
    monkeypatch.setattr(sys, "argv", ["h3dist", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


def overrides(paths: dict[str, Path]) -> list[str]:
    return paths["overrides"].read_text().replace("@", str(paths["overrides"].parent)).splitlines()


def test_latents_outlive_a_decode_that_fails_and_are_finished_from(paths, film, tmp_path, monkeypatch, capsys):
    damaged = with_nan(paths["video_vae"], tmp_path / "nan, (1)'s.safetensors", "decoder.norm_out.weight")
    out = tmp_path / "it's out"
    out.mkdir()
    asked = {"latents": "l.safetensors", "intermediates": "i.safetensors", "trace": "t.safetensors"}
    run = prepare_run(paths, REQUEST, out, as_override("model.video_vae", str(damaged)), **asked)
    with pytest.raises(NumericsError, match="NaN or infinity"):
        alone(run)
    kept = out / "o.latents.safetensors"
    assert list(out.iterdir()) == [kept]
    advice = capsys.readouterr().err.splitlines()[-1].partition("this goes on from them: ")[2]
    assert advice.startswith(f"h3dist decode {shlex.quote(str(kept))} ")
    shutil.copy(paths["video_vae"], damaged)  # what was wrong with it is put right

    monkeypatch.chdir(tmp_path)
    assert type_words(monkeypatch, *shlex.split(advice)[1:]) == 0
    assert (out / "o.mp4").read_bytes() == film.read_bytes()
    assert capsys.readouterr().out == f"{out}/o.mp4\n"
    assert sorted(path.name for path in out.iterdir()) == ["o.json", "o.latents.safetensors", "o.mp4"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_decode_that_is_stopped_leaves_nothing(number, code, paths, film, tmp_path, monkeypatch):
    def stopped(*_):
        os.kill(os.getpid(), number)
        yield from ()

    shutil.copy(film.with_name("l.safetensors"), tmp_path / "x.latents.safetensors")
    monkeypatch.setattr(VideoVae, "decode", stopped)
    monkeypatch.chdir(tmp_path)
    assert type_words(monkeypatch, "decode", "x.latents.safetensors", *overrides(paths)) == code
    assert [path.name for path in tmp_path.iterdir()] == ["x.latents.safetensors"]


def test_a_full_disk_is_named_and_what_fits_of_the_latents_is_kept(paths, tmp_path):
    """Room for the latents that were asked for, not for the film; then for the latents in its place."""
    disk = tmp_path / "disk"
    with small_disk(disk, 4096):
        run = prepare_run(paths, REQUEST, disk, latents="l.safetensors")
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(bytes(free - 40_000))
        with pytest.raises(OutputError, match=rf"^cannot write {disk}/o\.mp4: No space left on device"):
            alone(run)
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "o.latents.safetensors"]
        assert load_file(disk / "o.latents.safetensors").keys() == {"video_latents", "audio_latents"}


@pytest.mark.parametrize("role", ["latents", "sidecar"])
def test_whatever_cannot_be_written_is_named_as_it_was_asked_for(role, paths, tmp_path):
    """A folder takes the temporary file's place after the checks, as a full disk would come."""
    asked = {} if role == "sidecar" else {role: "asked.safetensors"}
    run = prepare_run(paths, REQUEST, tmp_path, **asked)
    Path(run.job["output"]["parts"][role]).mkdir()
    with pytest.raises(OutputError) as why:
        alone(run)
    named = tmp_path / ("o.json" if role == "sidecar" else "asked.safetensors")
    assert str(why.value).startswith(f"cannot write {named}: ")
    assert ".h3dist-" not in str(why.value)


# --- refused before any work


def test_no_output_takes_the_place_of_what_a_run_reads(paths, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "_run", lambda *_: pytest.fail("work began"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text('{"prompt": "x"}')
    (tmp_path / "p.mp4").write_text("a prompt in a file of an odd name")
    (tmp_path / "link.safetensors").symlink_to(paths["video_vae"])
    for words, named in (
        (["--request", "a.json", "-o", "a.mp4"], "a.json"),
        (["--prompt-file", "p.mp4", "-o", "p.mp4"], "p.mp4"),
        (["--request", "a.json", f"output.latents={paths['denoiser']}"], paths["denoiser"].name),
        (["--request", "a.json", f"output.trace={tmp_path}/link.safetensors"], "link.safetensors"),
        (["x", "request.file=a.json", "-o", "a.json"], "a.json"),
    ):
        assert type_words(monkeypatch, "generate", *words, *overrides(paths)) == 5
        told = capsys.readouterr().err
        assert f"{named} and would replace it" in told and "another output" in told
    assert (tmp_path / "a.json").read_text() == '{"prompt": "x"}'


def test_no_clobber_keeps_the_latents_of_an_earlier_run_too(paths, tmp_path):
    (tmp_path / "o.latents.safetensors").write_text("of an earlier run")
    with pytest.raises(OutputError, match=r"o\.latents\.safetensors exists, and --no-clobber keeps it"):
        prepare_run(paths, REQUEST, tmp_path, "output.clobber=false")
