"""encode=tp: the text encoder over several ranks gives one rank's states, from its own rows, with the planned bytes."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from golden import GOLDEN, needs_golden
from mediafiles import tone, write_film
from PIL import Image
from safetensors.torch import load_file, save_file
from stages import on_one_core, one_core, prepare_run, walk
from torch.nn import functional
from world import World

from h3dist.checkpoint.comfy import open_text_encoder
from h3dist.checkpoint.text_shard import TextStored
from h3dist.checkpoint.tiny import write_tiny
from h3dist.errors import CheckpointError, NumericsError
from h3dist.plan import ENCODE_LABELS, EncodePlan, Layout, Plan, make_plan, released_dims
from h3dist.plan.encode import share_text
from h3dist.request import Resolved
from h3dist.text import together
from h3dist.text.encoder import TextEncoder
from h3dist.text.presentation import Presentation
from h3dist.text.together import Told, encode_together, load_layers
from h3dist.text.vision import Vision, patches_of

pytestmark = pytest.mark.limit(200)
PLAIN = Presentation((3, 17, 60, 5, 5, 41, 0, 62, 8, 59, 23, 33, 12), (1,) * 13)


@dataclass(frozen=True)
class Case:
    """A presentation, what it shows, and the plan's two numbers for it."""

    presentation: Presentation
    vision: dict[str, Vision] | None = None

    @property
    def shown(self) -> int:
        return sum(len(seen.patches) // 4 for seen in (self.vision or {}).values())

    def plan(self, state: Any, ranks: int, encode: str = "tp") -> Plan:
        resolved = Resolved("t2va", "x", 64, 64, 5, 5, 7, 1, True)
        stored, rows = TextStored.of(state), len(self.presentation.ids)
        options = {"dtype": "float32", "attention": "sdpa", "steps": 1, "files": {"text_encoder": stored.nbytes}}
        options |= {"text": stored, "shown_rows": self.shown, "encode": encode, "device": "cpu"}
        return make_plan(resolved, released_dims(), rows, Layout(sp=ranks), **options)


@pytest.fixture(scope="module")
def world():
    with World(5) as world:
        yield world


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> tuple[str, str]:
    paths = write_tiny(tmp_path_factory.mktemp("set"), seed=5)
    return str(paths["text_encoder"]), str(paths["text_encoder_config"])


@pytest.fixture(scope="module")
def cases(paths) -> list[Case]:
    """Text alone; a picture and a film among text."""
    tokens = json.loads(Path(paths[1]).read_text())
    start, image, video = (tokens[f"{name}_token_id"] for name in ("vision_start", "image", "video"))
    generator = np.random.default_rng(3)
    still, film = (generator.integers(0, 256, (frames, 64, 96, 3), dtype=np.uint8) for frames in (1, 4))
    parts = {"image": patches_of(still, "official", still=True), "video": patches_of(film, "official", still=False)}
    vision = {pad: Vision(part.flatten(0, 2), (tuple(part.shape[:3]),)) for pad, part in parts.items()}
    blocks = {pad: seen.patches.shape[0] // 4 for pad, seen in vision.items()}
    pairs = parts["video"].shape[0]
    ids = (5, start, *[image] * blocks["image"], 9, *(start, *[video] * (blocks["video"] // pairs)) * pairs, 7, 11)
    return [Case(PLAIN), Case(Presentation(ids, (1,) * len(ids)), vision)]


def encode_cases(
    seat: Any, paths: tuple[str, str], cases: list[Case], backend: str | None = None
) -> list[tuple[np.ndarray, dict, dict, int, int]]:
    """On the CPU, or with a backend on GPUs: over gloo one for all, over NCCL each its own."""
    one_core(seat.rank)
    on = {"device": f"cuda:{seat.rank if backend == 'nccl' else 0}", "backend": backend} if backend else {}
    comm = seat.connect(Layout(sp=seat.world), stage_timeout=100, **on)  # the first case imports transformers
    found = []
    for case in cases:
        state = open_text_encoder(*paths)
        share = case.plan(state, seat.world).shares[seat.rank]
        comm.counted.update(dict.fromkeys(ENCODE_LABELS, 0))
        plan = EncodePlan("tp", shares=share_text(state.dims, seat.world))
        with comm.stage("encode"):
            vision = case.vision if seat.rank == 0 else None
            states = encode_together(state, paths[1], plan, comm, case.presentation, vision)
        sent, planned = ({label: of[label] for label in ENCODE_LABELS} for of in (comm.counted, share.sent))
        found.append((states.cpu().numpy(), sent, planned, state.file.bytes_read, share.text_bytes))
    return found


@pytest.fixture(scope="module")
def alone(paths, cases) -> list[torch.Tensor]:
    with on_one_core():
        state = open_text_encoder(*paths)
        encoder = TextEncoder.load(state, paths[1], "cpu")
        assert state.file.bytes_read == TextStored.of(state).nbytes == cases[0].plan(state, 1).shares[0].text_bytes
        return [encoder.encode(case.presentation, case.vision)[0] for case in cases]


@pytest.mark.parametrize("ranks", [2, 5])  # three make the golden clip below
def test_states_are_one_ranks_and_bytes_those_of_the_plan(world, paths, cases, alone, ranks):
    """Five ranks are more than the four heads, and than the seven units of 16 hidden columns divide by."""
    of_ranks = world.run(encode_cases, paths, cases, ranks=ranks, limit=150)
    for case, expected, *seen in zip(cases, alone, *of_ranks, strict=True):
        for rank, (states, sent, planned, read, asked) in enumerate(seen):
            error = (torch.from_numpy(states) - expected).norm() / expected.norm()
            assert error <= 1e-6, (rank, error)
            assert np.array_equal(states, seen[0][0])
            assert sent == planned and read == asked
        assert seen[0][1]["encode.inputs"] == 4 * 112 * (len(case.presentation.ids) + 3 * case.shown) * (ranks - 1)
        assert seen[1][1]["encode.inputs"] == 0 < seen[1][1]["encode.heads"]


@needs_golden
def test_the_golden_clip_comes_of_a_text_encoder_over_three_ranks(world, tmp_path):
    request = json.loads((GOLDEN / "request.json").read_text())
    run = prepare_run({"overrides": GOLDEN / "overrides.txt"}, request, tmp_path, "encode=auto", trace="t.safetensors")
    run.job["encode"] = "tp"  # as the launcher tells of what it chose
    ranks = world.run(walk, run, Layout(sp=3), ranks=3, limit=150)
    expected = load_file(GOLDEN / "expected.safetensors")
    for name in ("text_states", "video_latents", "audio_latents"):
        want = expected[name].double()
        assert (torch.from_numpy(ranks[0].trace[name]).double() - want).norm() <= 1e-5 * want.norm(), name
    for rank in ranks:
        assert rank.sent == rank.planned and rank.sent["encode.ffn"] and rank.file_bytes[0] == rank.file_bytes[1]


def test_pictures_and_sound_are_seen_and_heard_as_by_one_rank(world, tmp_path):
    """The pipeline with all that is encoded over ranks, of the VAEs' own modules: rows of pictures to the last bit."""
    paths, source = write_tiny(tmp_path / "set", seed=5), np.random.default_rng(1)
    Image.fromarray(source.integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    film = [source.integers(0, 256, (96, 128, 3), dtype=np.uint8) for _ in range(53)]
    write_film(tmp_path / "walk.mkv", film, sound=tone(53 / 24, hertz=330.0))
    request = {"prompt": "A boat.", "width": 96, "height": 64, "frames": 39, "steps": 1, "seed": 7}
    request["references"] = [{"image": str(tmp_path / "a.png")}, {"video": str(tmp_path / "walk.mkv")}]
    how = ["encode=rank0"], ["encode=tp", "encode.conditions=parallel"]
    runs = [prepare_run(paths, request, tmp_path, *words, trace="t.safetensors") for words in how]
    (alone, _), (first, second) = (world.run(walk, run, Layout(tp=2), ranks=2, limit=150) for run in runs)
    assert first.kept == alone.kept and alone.kept.keys() == {"kept video", "kept audio"}
    for name, want in alone.trace.items():
        assert np.linalg.norm(first.trace[name] - want) <= 1e-6 * np.linalg.norm(want), name
    assert first.sent == first.planned and second.sent == second.planned
    assert first.sent["encode.inputs"] and first.sent["encode.pixels"] and second.sent["encode.moments"]
    assert first.hashes == second.hashes


def test_layers_with_keys_of_their_own_ask_for_no_grouped_queries(paths, cases, alone):
    """What the plan's scores follow from: grouped queries, which float32 on CUDA has with scores alone."""
    state = open_text_encoder(*paths)
    whole, asked = TextEncoder.load(state, paths[1], "cpu"), []
    one = SimpleNamespace(join=lambda label, mine, widths: mine)
    layers = load_layers(
        state, paths[1], EncodePlan("tp", shares=share_text(state.dims, 1)), 0, one, torch.device("cpu")
    )
    attend = functional.scaled_dot_product_attention

    def listen(q, k, v, **options):
        asked.append((q.shape[1], k.shape[1], options.get("enable_gqa", False), options["is_causal"]))
        return attend(q, k, v, **options)

    rows = whole.model.get_input_embeddings()(torch.tensor([PLAIN.ids]))
    with mock.patch.object(functional, "scaled_dot_product_attention", listen), torch.no_grad():
        whole.encode(PLAIN)
        states = layers(inputs_embeds=rows, use_cache=False).last_hidden_state[0]
    assert set(asked[:50]) == {(4, 2, True, True)} and set(asked[50:]) == {(4, 4, False, True)} and len(asked) == 100
    assert (states - alone[0]).norm() <= 1e-6 * alone[0].norm()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_scale_is_found_by_the_rank_that_reads_it(paths, tmp_path, rank):
    """Of 144 rows rank 0 has the first 128, whose scales lie together."""
    tensors = load_file(paths[0])
    layer = "model.layers.49.mlp.gate_proj"
    scales = tensors[f"{layer}.weight_scale"].view(torch.uint8).flatten()
    scales[len(scales) // 2 * rank] = 0x7F
    save_file(tensors, tmp_path / "torn.safetensors")
    state = open_text_encoder(str(tmp_path / "torn.safetensors"), paths[1])
    plan = EncodePlan("tp", shares=share_text(state.dims, 2))
    for index in range(2):
        load = partial(load_layers, state, paths[1], plan, index, None, torch.device("cpu"))
        if index == rank:
            with pytest.raises(CheckpointError, match=f"{layer}.weight_scale holds NaN"):
                load()
        else:
            load()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_on_gpus_states_are_the_cpus(world, paths, cases, alone, backend):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    of_ranks = world.run(encode_cases, paths, cases, backend, ranks=2, limit=150)
    for expected, *seen in zip(alone, *of_ranks, strict=True):
        for states, sent, planned, read, asked in seen:
            assert (torch.from_numpy(states) - expected).norm() <= 1e-5 * expected.norm()
            assert np.array_equal(states, seen[0][0]) and sent == planned and read == asked


def fail(seat: Any, error: Exception | None) -> None:
    """Rank 1 cannot read its layers, or without `error` gets NaN from them; nothing else of the encoder is real."""
    comm = seat.connect(Layout(sp=seat.world))
    states = torch.full((1, 3, 4), float("nan") if seat.rank == 1 else 1.0)
    layers = mock.Mock(return_value=SimpleNamespace(last_hidden_state=states))
    load = mock.Mock(return_value=layers, side_effect=error if seat.rank == 1 else None)
    given = Told((3, 4), 3, None, None), torch.ones(3, 4)
    with (
        mock.patch.object(together, "_first_inputs", mock.Mock(return_value=given)),
        mock.patch.object(together, "load_layers", load),
        comm.stage("encode"),
    ):
        encode_together(None, None, EncodePlan("tp"), comm, PLAIN)


@pytest.mark.parametrize("error", [CheckpointError("a scale is torn"), None])
def test_a_rank_that_fails_ends_all(world, error):
    first, second, third = world.outcomes(fail, error, ranks=3)
    kind, words = (CheckpointError, "a scale is torn") if error else (NumericsError, "NaN or infinite")
    assert isinstance(second.error, kind) and words in str(second.error)
    for outcome in (first, third):
        assert (
            isinstance(outcome.error, kind) and "rank 1, encode" in str(outcome.error) and words in str(outcome.error)
        )
