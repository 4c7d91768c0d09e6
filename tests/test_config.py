"""The configuration: composition, precedence, and one answer with the nearest name to what is mistyped."""

import subprocess
import sys
from dataclasses import fields

import pytest
from omegaconf import OmegaConf

from h3dist.config import CHOICES, RequestConfig, as_override, compose, conf_dir, group_choices
from h3dist.errors import ConfigError, RequestError
from h3dist.request import FIELDS, MAX_STEPS
from tests.prompts import PROMPTS


def refused(*overrides, kind=ConfigError):
    with pytest.raises(kind) as caught:
        compose(overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_the_documented_ones(monkeypatch):
    for name in ("MODEL", "TEXT_ENCODER", "TOKENIZER", "VIDEO_VAE", "AUDIO_VAE", "OUTPUT"):
        monkeypatch.delenv(f"H3_{name}_PATH", raising=False)
    config = compose([])
    assert config.model.denoiser == "/models/minimax_h3_fl2va_pruned_nvfp4.safetensors"
    assert config.model.text_encoder == "/text-encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors"
    assert config.model.tokenizer == "/text-encoders/tokenizer"
    assert (config.model.video_vae, config.model.audio_vae) == (
        "/vae/ae.safetensors",
        "/vae/mini_vae.safetensors",
    )
    assert (config.runtime.timeout, config.runtime.stage_timeout) == (300, 1800)
    assert (config.sampler.schedule, config.sampler.sampler, config.sampler.noise) == (
        "beta",
        "res_multistep",
        "comfy",
    )
    assert config.parallel.mode == "auto"
    assert vars(config.request) == dict.fromkeys(vars(config.request))


@pytest.mark.parametrize(
    ("variable", "key"),
    [
        ("H3_MODEL_PATH", "denoiser"),
        ("H3_TEXT_ENCODER_PATH", "text_encoder"),
        ("H3_TOKENIZER_PATH", "tokenizer"),
        ("H3_VIDEO_VAE_PATH", "video_vae"),
        ("H3_AUDIO_VAE_PATH", "audio_vae"),
    ],
)
def test_variables_win_over_files_and_overrides_over_variables(variable, key, monkeypatch):
    monkeypatch.setenv(variable, "/a b,c/${x} 'é'=#.safetensors")
    assert getattr(compose([]).model, key) == "/a b,c/${x} 'é'=#.safetensors"
    assert getattr(compose([f"model.{key}=/other"]).model, key) == "/other"


@pytest.mark.parametrize("group", ["parallel", "attention", "sampler"])
def test_every_choice_of_a_group_composes_to_its_name(group):
    field = "mode" if group == "parallel" else "name"
    assert group_choices(group)
    assert {getattr(getattr(compose([f"{group}={name}"]), group), field) for name in group_choices(group)} == {
        *group_choices(group)
    }


def test_there_is_a_file_for_every_mode():
    assert set(group_choices("parallel")) == set(CHOICES["parallel.mode"])


def test_the_reference_cell():
    request = compose(["preset=reference"]).request
    assert (request.width, request.height, request.frames, request.steps) == (864, 480, 141, 12)
    assert request.seed == 440420
    assert compose(["preset=reference", "request.seed=1"]).request.seed == 1


def test_request_fields_stand_in_the_configuration():
    assert {item.name for item in fields(RequestConfig)} == {*FIELDS, "file", "prompt_file"}
    assert "200" in FIELDS["steps"].description
    assert MAX_STEPS == 200


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("runtim.device=cpu", "runtime.device"),
        ("runtime.devise=cpu", "runtime.device"),
        ("paralel=tensor", "parallel"),
        ("parallel=ulises", "ulysses"),
        ("parallel.mode=hybird", "hybrid"),
        ("sampler=offical", "official"),
        ("sampler.schedule=betta", "beta"),
        ("attention=sdpa_cudn", "sdpa_cudnn"),
        ("preset=referense", "reference"),
        ("runtime.dtype=bfloat", "bfloat16"),
        ("+model.denoise=x", "model.denoiser"),
        ("~runtime.devices", "runtime.device"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(override, near):
    message = refused(override)
    assert f"did you mean {near!r}" in message


@pytest.mark.parametrize(
    "override",
    [
        "parallel.tp=x",
        "parallel.tp=0",
        "parallel.tp=1.5",
        "runtime.timeout=-1",
        "runtime.timeout=inf",
        "runtime.threads=none",
        "output.clobber=maybe",
        "output.path=a,b",
        "output.path=${oops}",
        "model.denoiser=null",
        "parallel=null",
        "request={prompt: x}",
        "request.prompt={a: b}",
        "no equals sign",
        "hydra/launcher=nothing",
    ],
)
def test_wrong_values_are_refused_on_one_line(override):
    refused(override)


def test_a_group_given_twice_is_refused():
    assert "given twice" in refused("parallel=tensor", "parallel=ulysses")


def test_request_fields_that_are_unknown():
    assert "did you mean 'frames'" in refused("request.frame=5", kind=RequestError)
    assert "guidance-distilled" in refused("request.negative_prompt='x'", kind=RequestError)
    assert "unknown request field" in refused("request.upscale=true", kind=RequestError)


@pytest.mark.parametrize("value", ["abc", "null", "5", "[a]", "${oops}"])
def test_a_prompt_override_must_be_quoted(value):
    assert "--prompt-file" in refused(f"request.prompt={value}")


@pytest.mark.parametrize("prompt", [prompt for prompt in PROMPTS if "\\" not in prompt])
def test_a_quoted_prompt_arrives_untouched(prompt):
    quoted = prompt.replace("'", "\\'")
    assert compose([f"request.prompt='{quoted}'"]).request.prompt == prompt


def test_values_of_the_request_keep_their_types():
    request = compose(
        ["request.frames='124'", "request.seed=true", "request.mux_audio='false'", "request.steps=1e999"]
    ).request
    assert (request.frames, request.seed, request.mux_audio, request.steps) == (
        "124",
        True,
        "false",
        float("inf"),
    )


def test_composing_needs_no_torch_and_no_working_directory(tmp_path):
    code = "import sys, h3dist.config as c; c.compose(['parallel=tensor']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []


def test_no_rank_makes_a_folder_or_a_log():
    hydra = OmegaConf.load(conf_dir() / "config.yaml").hydra
    assert hydra.output_subdir is None
    assert hydra.run.dir == "."
    assert hydra.job.chdir is False


@pytest.mark.parametrize(
    "path",
    [
        "/a/b.safetensors",
        "a b",
        "it's, (1)",
        "${x}",
        "a\\",
        "a\\'b",
        "\\\\",
        "null",
        "12",
        "{a: 1}",
        "[x]",
        "a=b",
        "~/é",
    ],
)
def test_any_path_becomes_an_override_that_gives_it(path):
    assert compose([as_override("model.video_vae", path)]).model.video_vae == path
