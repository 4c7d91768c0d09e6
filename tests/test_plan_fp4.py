"""Which linears run as FP4 products and agree on a scale: the plan says so, and the run does as the plan says."""

from types import SimpleNamespace

import pytest
import torch
from safefiles import edited, scalar, text

from h3dist import pipeline
from h3dist.checkpoint.comfy import open_denoiser
from h3dist.checkpoint.tiny import write_tiny
from h3dist.model.elementwise import PLAIN
from h3dist.model.linear import Fp4Linear, dense_linear
from h3dist.plan import Layout, fp4_linears, make_plan, released_dims
from h3dist.plan.weights import block_linears
from h3dist.request import Resolved

BLACKWELL, HOPPER = (12, 0), (9, 0)
CLIP = Resolved("t2va", "a quiet shot", 96, 64, 5, 5, 7, 3, True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))["denoiser"]


def counts(path, capability=BLACKWELL, dtype="bfloat16") -> tuple[int, int]:
    dfile = open_denoiser(path)
    return fp4_linears(dfile.dims, dfile, capability, dtype)


def is_linear(part) -> bool:
    return part is dense_linear or isinstance(part, Fp4Linear)


def prefixed(tensors: dict, layer: str) -> str:
    """The layer's name as it stands in the file."""
    return min((name for name in tensors if name.endswith(f"{layer}.weight")), key=len).removesuffix(".weight")


def test_a_released_file_agrees_on_every_linear():
    dims = released_dims()
    assert len(block_linears(dims)) == 200
    assert fp4_linears(dims, None, BLACKWELL, "bfloat16") == (200, 200)


@pytest.mark.parametrize(
    ("capability", "dtype"), [(None, "bfloat16"), (HOPPER, "bfloat16"), ((9, 9), "bfloat16"), (BLACKWELL, "float32")]
)
def test_there_are_no_fp4_products_before_blackwell_nor_with_32_bit_results(tiny, capability, dtype):
    assert counts(tiny, capability, dtype) == (0, 0)
    assert fp4_linears(released_dims(), None, capability, dtype) == (0, 0)


def test_markers_and_stored_scales_decide_layer_by_layer(tiny, tmp_path):
    everything, agreeing = counts(tiny)
    assert everything == agreeing > 2

    def edit(tensors):
        tensors[prefixed(tensors, "blocks.1.mlp.fc1") + ".input_scale"] = scalar(0.25)
        marker = {"format": "nvfp4", "full_precision_matrix_mult": True}
        tensors[prefixed(tensors, "blocks.0.attn.out_proj") + ".comfy_quant"] = text(marker)

    assert counts(edited(tiny, tmp_path / "edited.safetensors", edit)) == (everything - 1, everything - 2)


def test_the_bytes_of_agreements_are_counted_by_linear():
    options = {"dtype": "bfloat16", "attention": "sdpa", "steps": 3}
    plan = make_plan(CLIP, released_dims(), 7, Layout(sp=2, tp=2), fp4=150, amax=37, **options)
    assert {share.sent["amax"] for share in plan.shares} == {3 * 37 * 4 * 3}


@pytest.mark.parametrize(
    ("dtype", "fp4", "amax", "kind"),
    [
        (torch.bfloat16, 12, 12, Fp4Linear),
        (torch.bfloat16, 12, 0, Fp4Linear),  # every layer stores its scale: no agreement, yet FP4
        (torch.bfloat16, 0, 0, None),
    ],
)
def test_the_run_computes_as_the_plan_says(monkeypatch, dtype, fp4, amax, kind):
    seen = []
    monkeypatch.setattr(pipeline, "Denoiser", lambda *parts: seen.extend(filter(is_linear, parts)))
    monkeypatch.setattr(pipeline, "lowest_capability", lambda device: BLACKWELL)
    plan = SimpleNamespace(shares=(None,), fp4=fp4, amax=amax, packs_rows=False, gemm="nvfp4" if kind else "dense")
    rows = {"modulation": None, "rows_LC": None, "kept": {}, "elementwise": PLAIN}
    prepared = SimpleNamespace(started=SimpleNamespace(plan=plan), weights=SimpleNamespace(dtype=dtype), **rows)
    site = SimpleNamespace(
        comm=SimpleNamespace(exchange=lambda plan, forms: "exchange"),
        ranks=SimpleNamespace(rank=0),
        device=torch.device("cpu"),
    )
    pipeline.denoiser(site, SimpleNamespace(prepared=prepared, packing=None), attention=None)
    assert isinstance(seen[0], kind) if kind else seen[0] is dense_linear
