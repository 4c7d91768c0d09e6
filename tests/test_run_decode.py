"""decode=parallel in whole runs of two ranks, by the fast decoder with FP8 products, two tiles a call: the same film,
the bytes told, and latents that outlive it.
"""

import json
import os
import signal
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from stages import Break, on_one_core, prepare_run, run_whole
from world import World

from h3dist.checkpoint.tiny import write_tiny
from h3dist.errors import CheckpointError, H3Error, RankError

REQUEST = {"prompt": "A boat.", "width": 288, "height": 64, "frames": 39, "steps": 1, "seed": 7}  # 2 chunks of 2 tiles
pytestmark = [pytest.mark.limit(300), pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")]


class Killed:
    """In the place of `assist`: the end of the process."""

    rank, name = 1, "assist"

    def __call__(self, *_):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("set"), seed=3)


@pytest.fixture(scope="module")
def world():
    with World(2) as world:
        yield world


@pytest.fixture(scope="module")
def films(paths, world, tmp_path_factory):
    """By where it was decoded: the film's bytes, everything that was kept, and the sidecar."""
    found = {}
    for where in ("rank0", "parallel"):
        folder = tmp_path_factory.mktemp(where)
        words = f"decode={where}", "decode.fast=on", "decode.gemm=fp8", "decode.batch=2"
        run = prepare_run(paths, REQUEST, folder, *words, intermediates="i.safetensors")
        with on_one_core():
            world.run(run_whole, run, limit=200)
        told = json.loads((folder / "o.json").read_text())
        found[where] = (folder / "o.mp4").read_bytes(), load_file(folder / "i.safetensors"), told
    return found


def test_the_film_is_the_same_bytes_and_so_is_what_it_was_made_of(films):
    (one, kept_one, _), (all_of_them, kept_all, _) = films["rank0"], films["parallel"]
    assert one == all_of_them
    assert kept_one.keys() == kept_all.keys()
    assert all(kept_one[name].equal(kept_all[name]) for name in kept_one)


def test_the_sidecar_tells_who_decoded_and_what_that_sent(films):
    told = films["parallel"][2]
    assert told["config"]["decode"] == {"mode": "parallel", "fast": "on", "gemm": "fp8", "batch": 2}
    plan = told["plan"]["decode"]
    assert plan["fast"] and plan["gemm"] == "fp8" and plan["batch"] == 2
    assert plan["parallel"] and sum(plan["tiles"]) == 4 and min(plan["tiles"]) > 0
    for rank in told["ranks"]:
        assert rank["sent"]["planned"] == rank["sent"]["counted"]
        assert 0 < rank["decode_seconds"] <= told["seconds"]["decode"] + 1
    assert told["ranks"][0]["sent"]["counted"]["decode.tiles"] == 0
    assert told["ranks"][1]["sent"]["counted"]["decode.tiles"] == plan["tiles"][1] * 3 * 22 * 256 * 64 * 4
    assert len(told["chunk_seconds"]) == 2 and min(told["chunk_seconds"]) > 0.005, "the first one's work too"
    alone = films["rank0"][2]
    assert not alone["plan"]["decode"]["parallel"]
    assert not any(rank["sent"]["counted"]["decode.tiles"] for rank in alone["ranks"])


BROKEN = {"err": Break(1, "assist", CheckpointError("the VAE is torn")), "dead": Killed()}


@pytest.mark.parametrize("how", BROKEN)
def test_latents_outlive_a_helper_that_fails(how, paths, world, tmp_path):
    broken = BROKEN[how]
    run = prepare_run(paths, REQUEST, tmp_path, "decode=parallel")
    first, second = world.outcomes(run_whole, run, broken, limit=200)
    if isinstance(broken, Killed):
        assert second.exit == -signal.SIGKILL
        assert isinstance(first.error, RankError) and "no answer from rank 1" in str(first.error)
    else:
        assert str(second.error) == "the VAE is torn"
        assert isinstance(first.error, CheckpointError) and "rank 1, decode: the VAE is torn" in str(first.error)
    assert isinstance(first.error, H3Error)
    assert [path.name for path in tmp_path.iterdir()] == ["o.latents.safetensors"]


class Swapped(Break):
    """On its rank the VAEs' files have other headers."""

    def __call__(self, *_):
        return [SimpleNamespace(file=SimpleNamespace(header_hash="another"))] * 2


def test_ranks_whose_vaes_differ_are_refused_before_work(paths, world, tmp_path):
    run = prepare_run(paths, REQUEST, tmp_path, "decode=parallel")
    for outcome in world.outcomes(run_whole, run, Swapped(1, "vaes_for", OSError()), limit=200):
        assert isinstance(outcome.error, RankError), outcome
        assert "the ranks differ in the VAEs' headers" in str(outcome.error)
    assert not list(tmp_path.iterdir())
