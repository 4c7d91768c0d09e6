"""Rows that are gathered as FP4 codes: to the last bit what quantising the gathered rows gives, from fewer bytes.

Real ranks over gloo run a tiny NVFP4 denoiser with the FP4 product emulated.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fp4 import EMULATED, nvfp4
from world import World

from h3dist.attention.sdpa import dot_product_attention
from h3dist.checkpoint.comfy import open_denoiser
from h3dist.checkpoint.tiny import write_tiny
from h3dist.geometry import Geometry
from h3dist.model.denoiser import Denoiser
from h3dist.model.exchange import Alone
from h3dist.model.linear import Fp4Linear, dense_linear
from h3dist.model.modulation import tables
from h3dist.model.packed import PackedLinear, packing
from h3dist.model.weights import load_denoiser
from h3dist.packing import pack_t2va
from h3dist.plan import LABELS, ExchangePlan, Layout, Plan, make_plan

TEXT, TIMES = 5, ((0.4,), (0.7,))
CPU = torch.device("cpu")
CASES = [  # variant, layout, clip: few rows leave ranks without any
    ("heads", Layout(tp=3), Geometry(32, 64, 22)),
    ("hidden", Layout(sp=2, tp=2), Geometry(32, 64, 22)),
    ("hidden", Layout(sp=7), Geometry(32, 32, 5)),
]


@pytest.fixture(scope="module")
def world():
    with World(7) as world:
        yield world


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("nvfp4"), "curve")["denoiser"]


def plan_of(path: Path, layout: Layout, clip: Geometry, exchange: ExchangePlan) -> Plan:
    dfile = open_denoiser(path)
    linears = 4 * dfile.dims.layers
    options = {"dtype": "float32", "attention": "sdpa", "steps": 1, "dfile": dfile}
    asked = SimpleNamespace(geometry=clip, notes=())
    return make_plan(asked, dfile.dims, TEXT, layout, fp4=linears, amax=linears, exchange=exchange, **options)


def velocities(seat, path: Path, plan: Plan) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """What a step gives on this rank, and the bytes that it counted."""
    comm, dfile, share = seat.connect(plan.layout), open_denoiser(path), plan.shares[seat.rank]
    draw = torch.Generator().manual_seed(3)
    clip, moves = plan.geometry, comm.exchange(plan)
    video = torch.randn(1, 24, clip.latent_t, clip.latent_h, clip.latent_w, generator=draw)
    audio = torch.randn(1, 32, 2, clip.audio_latents, generator=draw)
    text = torch.randn(TEXT, dfile.dims.hidden, generator=draw)
    weights = load_denoiser(dfile, share, device=CPU, dtype=torch.float32)
    modulation = tables(dfile, *TIMES, device=CPU, dtype=torch.float32)
    linear = packing(Fp4Linear(moves, EMULATED), plan)
    sequence = pack_t2va(clip, [1] * TEXT)
    denoiser = Denoiser(weights, sequence, share, modulation, moves, dot_product_attention, text, linear)
    return *denoiser(video, audio, 0), dict(comm.counted)


@pytest.mark.parametrize(("variant", "layout", "clip"), CASES, ids=str)
def test_packed_rows_give_the_same_bits_from_fewer_bytes(world, path, variant, layout, clip):
    made = []
    for rows in ("plain", "packed"):
        plan = plan_of(path, layout, clip, ExchangePlan(variant, 1, "none", rows))
        assert plan.packs_rows == (rows == "packed")
        ranks = world.run(velocities, path, plan, ranks=layout.world, limit=120)
        for share, (_, _, counted) in zip(plan.shares, ranks, strict=True):
            assert counted == share.sent | {"text": 0}
        made.append(ranks)
    (plain_video, plain_audio, plain), (video, audio, packed) = (ranks[0] for ranks in made)
    assert torch.equal(video, plain_video) and torch.equal(audio, plain_audio)
    assert open_denoiser(path).dims.hidden == 208, "no multiple of 32, as the codes' columns are"
    label = "hidden.gather" if variant == "hidden" else "rows.gather"
    assert plain[label] * 224 * 9 / 16 == packed[label] * 208 * 4
    assert all(plain[name] == packed[name] for name in set(LABELS) - {"rows.gather", "hidden.gather"})


def test_fp4_sums_by_runs_of_columns_are_near_those_of_the_whole(world, path):
    layout, clip = Layout(tp=3), Geometry(32, 64, 22)
    plans = [plan_of(path, layout, clip, ExchangePlan(rows="packed", chunks=chunks)) for chunks in (1, 3)]
    (want, _, sent), (got, _, counted) = (world.run(velocities, path, plan, ranks=3, limit=120)[0] for plan in plans)
    assert ((got - want).norm() / want.norm()).item() <= 1e-5
    assert counted == sent


def test_only_fp4_products_take_packed_rows(path):
    plan = plan_of(path, Layout(tp=2), Geometry(32, 32, 5), ExchangePlan(rows="packed"))
    assert packing(dense_linear, plan) is dense_linear
    linear = packing(Fp4Linear(Alone(), EMULATED), plan)
    assert isinstance(linear, PackedLinear)
    x, weight = torch.randn(3, 48), nvfp4(torch.randn(32, 48))
    packed = linear.gather(x, weight, lambda rows: rows)
    assert packed.bytes_pw.shape == (3, 64 // 2 + 64 // 16), "48 columns are padded to 64"
    assert torch.equal(linear(packed, weight), linear(x, weight))
    dense = make_plan(
        SimpleNamespace(geometry=plan.geometry, notes=()), plan.dims, TEXT, Layout(tp=2), dtype="float32",
        attention="sdpa", steps=1, exchange=ExchangePlan(rows="packed"),
    )  # fmt: skip
    assert not dense.packs_rows and any("packed changes nothing" in note for note in dense.notes)
    assert dense.shares[0].sent["rows.gather"] == dense.shares[0].sent["rows.reduce"]
