"""Latents saved by one run, decoded by another: what is refused, and what the new sidecar may claim."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from h3dist.checkpoint.tiny import write_tiny
from h3dist.config import compose
from h3dist.deliver import decode_file
from h3dist.errors import RequestError
from h3dist.saved import REQUEST_KEY, save_tensors
from h3dist.vae.fast import FastDecoder

REQUEST = {"prompt": "a fox", "width": 32, "height": 32, "frames": 5, "seed": 1, "steps": 2}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    lines = (folder / "overrides.txt").read_text().splitlines()
    return compose([line.replace("@", str(folder)) for line in lines])


@pytest.fixture
def saved(tmp_path):
    """Latents of a clip of 32x32 pixels and 5 frames, said to be of the request or metadata given."""

    def save(request=REQUEST):
        path = tmp_path / "clip.latents.safetensors"
        text = request if isinstance(request, str) else json.dumps(request)
        tensors = {"video_latents": torch.zeros(1, 24, 2, 2, 2), "audio_latents": torch.zeros(1, 32, 2, 8)}
        save_file(tensors, path, metadata={REQUEST_KEY: text})
        return path

    return save


def test_more_steps_than_the_beta_schedule_has_still_decode(config, saved):
    path = saved({**REQUEST, "steps": 200})
    clip = decode_file(config, path, {})
    told = json.loads(path.with_name("clip.json").read_text())
    assert clip.endswith("clip.mp4") and told["request"]["steps"] == 200


def test_the_sidecar_claims_no_sampler_or_layout_for_latents_that_were_given(config, saved, monkeypatch):
    """And tells that the fast decoder was asked for, which was used."""
    path, used = saved(), []
    monkeypatch.setattr(
        FastDecoder, "__call__", lambda self, tiles: used.append(tiles) or tiles.new_zeros(1, 3, 22, 32, 32)
    )
    quick = replace(config, decode=replace(config.decode, fast="on", batch=3))
    decode_file(quick, path, {"latents": str(path.with_name("again.safetensors"))})
    assert path.with_name("again.safetensors").exists()
    told = json.loads(path.with_name("clip.json").read_text())["config"]
    assert set(told) == {"model", "runtime", "decode"}
    assert told["decode"]["fast"] == "on" and [tiles.shape for tiles in used] == [(1, 24, 7, 2, 2)], "a chunk is a tile"


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000], ids=["cut", "list", "null", "deep"])
def test_metadata_that_is_no_request_is_refused(config, saved, text):
    with pytest.raises(RequestError, match="is no JSON object"):
        decode_file(config, saved(text), {})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"frames": 22}, r"video_latents are \[1, 24, 2, 2, 2\].* 22 frames, has \[1, 24, 7, 2, 2\]"),
        ({"width": 96}, r"96x32 pixels"),
    ],
    ids=["frames", "width"],
)
def test_latents_of_another_size_than_their_request_are_refused_before_work(config, saved, changed, words):
    path = saved({**REQUEST, **changed})
    with pytest.raises(RequestError, match=words):
        decode_file(config, path, {})
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_saved_tensors_are_as_readable_as_any_new_file(tmp_path):
    save_tensors(str(tmp_path / "x.safetensors"), {"a": torch.zeros(1)}, {})
    (tmp_path / "plain").touch()
    modes = {(tmp_path / name).stat().st_mode for name in ("x.safetensors", "plain")}
    assert len(modes) == 1
