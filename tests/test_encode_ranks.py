"""encode=parallel: the rows of keyframes and references are those of rank 0 alone to the last bit, on any ranks."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stages import on_one_core
from torch import Tensor
from world import World

from h3dist import conditioning
from h3dist.conditions import Condition
from h3dist.encoding import MediaWork, assist_media, encode_media
from h3dist.errors import H3Error, NumericsError
from h3dist.material import Material
from h3dist.plan import ENCODE_LABELS, Layout, Plan, make_plan, released_dims
from h3dist.plan.media import MEDIA_LABELS
from h3dist.request import Resolved
from h3dist.saved import sha256

STILL = Condition("image", 288, 320, 1, shown=1)  # 2 x 2 tiles
FILM = Condition("video", 288, 32, 39, 52000, shown=39)  # 3 clips of 2 tiles, and its sound
VOICE, SMALL = Condition("audio", samples=16001), Condition("keyframe", 64, 32, 1, shown=1)
CASES = [(STILL, FILM, VOICE), (SMALL,), (VOICE,), (SMALL, STILL, SMALL)]
CLIP = Resolved("t2va", "x", 64, 64, 39, 39, 7, 1, True)
pytestmark = [pytest.mark.limit(200), pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")]


class Same:
    """Statistics that change nothing."""

    @staticmethod
    def normalise(latents: Tensor) -> Tensor:
        return latents


@dataclass
class Camera:
    """In the place of the video VAE's encoder: what it gives depends on pixels, and on the tile that they are in."""

    trouble: str | None = None
    statistics: type[Same] = Same
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def load(cls, _file: Any, _config: Any, device: torch.device, **_: Any) -> "Camera":
        return cls(device=device)

    def encode_job(self, pixels: Tensor) -> Tensor:
        if self.trouble == "raise":
            raise MemoryError("no memory for a tile")
        seen = pixels[:, :, ::4, ::16, ::16].repeat(1, 16, 1, 1, 1) * (1 + 0.1 * pixels[0, 0, 0, 0, 0])
        return seen * float("nan") if self.trouble == "nan" else seen


class Ear(Camera):
    """In the place of the audio VAE's."""

    @staticmethod
    def encode(sound: Tensor) -> Tensor:
        latents = torch.nn.functional.pad(sound, (0, -sound.shape[1] % 800)).unflatten(1, (-1, 800))[..., :32]
        return latents.permute(2, 0, 1)[None].contiguous()


@dataclass(frozen=True)
class Watched(MediaWork):
    """The work, with stand-ins for the VAEs."""

    trouble: str | None = None
    read: list[str] = field(default_factory=list)

    def video_vae(self, *, encoder: bool) -> Any:
        self.read.append("video" if encoder else "statistics")
        return Camera(self.trouble, device=self.comm.device)

    def audio_vae(self) -> Any:
        self.read.append("audio")
        return Ear(device=self.comm.device)


def material_of(conditions: tuple[Condition, ...]) -> list[Material]:
    source = np.random.default_rng(11)
    made = []
    for one in conditions:
        size = (one.frames, one.height, one.width, 3)
        frames = source.integers(0, 256, size, dtype=np.uint8) if one.frames else None
        sound = source.standard_normal((2, one.samples)).astype(np.float32) if one.samples else None
        made.append(Material(one, frames, sound))
    return made


def plan_of(conditions: tuple[Condition, ...], ranks: int, how: str = "parallel", device: str = "cpu") -> Plan:
    options = {"dtype": "float32", "attention": "sdpa", "steps": 1, "device": device, "conditions": conditions}
    files = {"video_vae": 5 << 30, "audio_vae": 1 << 30}
    return make_plan(CLIP, released_dims(), 3, Layout(sp=ranks), encode_conditions=how, files=files, **options)


def encode_all(
    seat: Any, cases: list[tuple[Condition, ...]], troubles: dict[int, str], backend: str | None = None
) -> list[Any]:
    """The hashes of the rows on rank 0, what was sent and planned, and what was read, of each case.

    On the CPU, or with a backend on GPUs: over gloo one for all, over NCCL each its own.
    """
    on = {"device": f"cuda:{seat.rank if backend == 'nccl' else 0}", "backend": backend} if backend else {}
    comm, found = seat.connect(Layout(sp=seat.world), **on), []
    for conditions in cases:
        plan = plan_of(conditions, seat.world)
        comm.counted.update(dict.fromkeys(ENCODE_LABELS, 0))
        work = Watched(plan, comm, None, None, troubles.get(seat.rank))
        rows = None
        with comm.stage("encode"):
            if seat.rank == 0:
                made = encode_media(work, material_of(conditions), contract="official", seed=3)
                rows = {kind: sha256(tensor) for kind, tensor in made.items()}
            else:
                assist_media(work)
        sent, planned = (
            {label: of[label] for label in ENCODE_LABELS} for of in (comm.counted, plan.shares[seat.rank].sent)
        )
        found.append((rows, sent, planned, work.read))
    return found


@pytest.fixture(scope="module")
def world():
    with World(5) as world:
        yield world


@pytest.fixture(scope="module")
def expected():
    return alone("cpu")


def alone(device: str) -> list[dict[str, str]]:
    """The hashes of the rows of every case, as rank 0 alone makes them."""
    slots = SimpleNamespace(video_vae=None, audio_vae=None)
    model = SimpleNamespace(video_vae_config=None, audio_vae_config=None)
    how = {"contract": "official", "seed": 3, "device": torch.device(device)}
    with pytest.MonkeyPatch.context() as patch, on_one_core():
        patch.setattr(conditioning, "VideoVae", Camera)
        patch.setattr(conditioning, "AudioVae", Ear)
        made = [conditioning.encode_conditions(material_of(case), slots, model, **how) for case in CASES]
    return [{kind: sha256(rows) for kind, rows in each.items()} for each in made]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_rows_are_those_of_one_rank_and_bytes_those_of_the_plan(world, expected, ranks):
    of_ranks = world.run(encode_all, CASES, {}, ranks=ranks)
    for conditions, rows, *seen in zip(CASES, expected, *of_ranks, strict=True):
        plan = plan_of(conditions, ranks)
        assert seen[0][0] == rows and len(rows) == 1 + (conditions == CASES[0])
        for rank, (_, sent, planned, read) in enumerate(seen):
            assert sent == planned
            assert ("video" in read, "audio" in read) == (plan.encode.tiles[rank] > 0, plan.encode.sounds[rank] > 0)
    first = of_ranks[0][0][1]
    assert first["encode.pixels"] and not first["encode.moments"] and of_ranks[1][0][1]["encode.moments"]
    assert not any(of_ranks[1][1][1].values()), "one tile is rank 0's"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_on_gpus_rows_are_those_of_one(world, backend):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    rows = alone("cuda:0")
    for expected, first, second in zip(rows, *world.run(encode_all, CASES, {}, backend, ranks=2), strict=True):
        assert first[0] == expected and first[1] == first[2] and second[1] == second[2]


@pytest.mark.parametrize(("trouble", "kind"), [("raise", MemoryError), ("nan", NumericsError)])
def test_trouble_on_one_rank_is_everybodys(world, trouble, kind):
    outcomes = world.outcomes(encode_all, CASES[:1], {1: trouble}, ranks=3)
    told = outcomes[1 if trouble == "raise" else 0].error
    assert isinstance(told, kind)
    assert all(isinstance(outcome.error, H3Error) or outcome.error is told for outcome in outcomes)
    assert all(str(told) in str(outcome.error) for outcome in outcomes)


def test_every_job_is_given_out_once_and_costs_are_even():
    for ranks in range(2, 9):
        plan = plan_of(CASES[0], ranks)
        assert sum(plan.encode.tiles) == 4 + 3 * 2 and sum(plan.encode.sounds) == 2
        assert plan.digest != plan_of(CASES[0], ranks, "rank0").digest
    long = plan_of((Condition("video", 1344, 768, 124, 0, shown=124),), 4)
    assert sum(long.encode.tiles) == 8 * 28 and max(long.encode.tiles) == 56 and long.encode.speedup > 3.9
    assert plan_of(CASES[0], 1).encode.tiles == () == plan_of((), 4).encode.tiles


def test_bytes_are_those_of_the_formulas():
    """A still and its moments: 4 tiles of 256 x 256, two for each rank."""
    plan = plan_of((STILL, VOICE), 2)
    first, second = (share.sent for share in plan.shares)
    owners = plan.encode.tiles[1], plan.encode.sounds[1]
    assert first["encode.pixels"] == owners[0] * 3 * 256 * 256 and first["encode.sounds"] == owners[1] * 2 * 16001 * 4
    assert second["encode.moments"] == 4 * (owners[0] * 48 * 16 * 16 + owners[1] * 2 * 32 * 21)
    assert not any(plan_of((STILL,), 2, "rank0").shares[0].sent[label] for label in MEDIA_LABELS)


def test_a_rank_needs_a_vae_only_where_it_has_work_for_it():
    alone, spread = plan_of((STILL,), 8, "rank0").memory, plan_of((STILL,), 8).memory
    waits = alone[1]["encode"]
    assert spread[0]["encode"] == pytest.approx(alone[0]["encode"], rel=0.01)
    assert [stages["encode"] - waits > 5 << 30 for stages in spread] == [True] * 4 + [False] * 4
    assert [stages["encode"] for stages in spread[4:]] == [waits] * 4


def test_the_table_shows_who_encodes():
    text = plan_of(CASES[0], 5).text()
    assert all(label in text for label in MEDIA_LABELS) and "all ranks encode the conditions" in text
    assert max(map(len, text.splitlines())) <= 120
