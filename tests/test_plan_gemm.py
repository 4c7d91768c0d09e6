"""What the plan makes of `runtime.gemm`: memory, predictions where there are rates, and refusals."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from h3dist.bench.spec import Clip, parse_shape
from h3dist.config import compose
from h3dist.errors import ConfigError, PlanError
from h3dist.plan import Layout, Plan, check_memory, make_plan, released_dims
from h3dist.plan.cost import dequantised_bytes, missing_rate, product_flops, step_cost
from h3dist.plan.memory import CUDA_RESERVE
from h3dist.plan.rates import DeviceRates, load_rates
from h3dist.plan.wires import Wires
from h3dist.preflight import Facts, plan_on

CLIP = Clip(parse_shape("1344x768x124"))


def plan_of(layout: Layout = Layout(), **options) -> Plan:  # noqa: B008 (frozen)
    common = {"dtype": "bfloat16", "attention": "sdpa", "steps": 12}
    return make_plan(CLIP, released_dims(), 400, layout, **common | options)


def with_rate(name: str, value: float) -> DeviceRates:
    device = load_rates().named("H200")
    return DeviceRates(**vars(device) | {"product": dict(device.product) | {name: value}})


def test_narrow_weights_take_a_byte_each_and_nothing_is_made_dense() -> None:
    dense, narrow = plan_of(), plan_of(gemm="fp8")
    linears = dense.dims.layers * 5376 * (4 * 7168 + 3 * 14336)
    grown = narrow.shares[0].weight_bytes - dense.shares[0].weight_bytes
    assert grown == pytest.approx((1 - 9 / 16) * linears, rel=2e-3)
    assert (dense.gemm, narrow.gemm) == ("dense", "fp8") and dense.digest != narrow.digest
    assert dequantised_bytes(dense, dense.shares[0]) > 0 == dequantised_bytes(narrow, narrow.shares[0])
    assert narrow.as_dict()["stored"]["gemm"] == "fp8"
    assert plan_of(fp4=200, amax=200).gemm == "nvfp4"


def test_what_a_product_works_with_is_in_the_plan() -> None:
    """The MLP half: the residual and its rows four times, fc1's halves and the activation, and what narrows."""
    rows, wide, hidden = plan_of().rows, 14336, 5376
    common = CUDA_RESERVE + 2 * (4 * rows * hidden + 3 * rows * wide)
    for gemm, working in (("fp8", 3 * rows * wide), ("int8", rows * (hidden + 4 * 2 * wide))):
        plan = plan_of(gemm=gemm)
        assert plan.memory[0]["denoise"] - plan.shares[0].weight_bytes == common + working


def test_the_memory_in_which_weights_are_made_dense_is_the_largest_ones_wherever_a_block_is_widest() -> None:
    """Attention's half of one rank, with fc1's size beside it, though no product there takes it."""
    plan = plan_of()
    attention = plan.rows * (4 * 5376 + 7 * 7168) + 2 * 14336 * 5376
    assert plan.memory[0]["denoise"] - plan.shares[0].weight_bytes == CUDA_RESERVE + 2 * attention


def test_text_rows_that_are_refined_are_in_the_plan() -> None:
    """In float32: the residual, its normed rows, and fc1's halves and activation; rank 0's alone."""
    options = {"dtype": "bfloat16", "attention": "sdpa", "steps": 12}
    dims, two = released_dims(), Layout(sp=2)
    few, many = (make_plan(CLIP, dims, rows, two, **options).memory for rows in (400, 8000))
    row = 4 * (dims.text_dim + 2 * 5376 + 3 * 14336)
    assert many[0]["refine"] - few[0]["refine"] == 7600 * row and many[1]["refine"] == few[1]["refine"]


def test_a_capture_that_is_a_file_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h3dist.preflight.conditions_of", lambda resolved, contract: ())
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(ConfigError, match=r"attention\.capture=.*: .*file is a file; name a folder"):
            planned((9, 0), f"attention.capture={folder}")
    planned((9, 0), f"attention.capture={tmp_path}/new/deep")


def test_a_plan_that_does_not_fit_narrow_weights_is_refused() -> None:
    free = max(plan_of().peaks)
    check_memory(plan_of(), [free])
    with pytest.raises(PlanError):
        check_memory(plan_of(gemm="fp8"), [free])


def test_blocks_in_the_host_s_memory_leave_two_on_the_device() -> None:
    whole, two = plan_of(), plan_of(resident_blocks=2)
    linears = 9 / 16 * whole.dims.layers * 5376 * (4 * 7168 + 3 * 14336)
    gone = whole.shares[0].weight_bytes - two.shares[0].weight_bytes
    assert gone == pytest.approx(linears * 48 / 50, rel=1e-6)
    assert any("10.8 GB of blocks a rank wait in the host's memory" in note for note in two.notes)
    assert whole.shares[0].file_bytes == two.shares[0].file_bytes and whole.notes == two.notes[:-1]
    assert plan_of(Layout(tp=2), resident_blocks=2).shares[0].weight_bytes < two.shares[0].weight_bytes


def test_without_a_rate_there_is_no_prediction_and_with_one_there_is() -> None:
    H200, H100, plan = load_rates().named("H200"), load_rates().named("H100"), plan_of(gemm="fp8")
    assert missing_rate(plan, H100) == "product.fp8" and missing_rate(plan_of(), H100) is None
    assert missing_rate(plan_of(attention="flash4"), H100) == "attention.flash4"
    assert missing_rate(plan, H200) is None and missing_rate(plan_of(attention="flash4"), H200) is None
    cost = step_cost(plan, with_rate("fp8", 1e15), Wires({}, {}))
    assert cost.products == pytest.approx(product_flops(plan, plan.shares[0]) / 1e15) and cost.dequantise == 0
    assert step_cost(plan_of(attention="sdpa+sliced"), H200, Wires({}, {})) == step_cost(plan_of(), H200, Wires({}, {}))


def planned(capability: tuple[int, int] | None, *overrides: str) -> Plan:
    config = compose(list(overrides))
    resolved = SimpleNamespace(
        geometry=CLIP.geometry, notes=(), steps=12, task="t2va", keyframes=(), references=(), media=()
    )
    facts = Facts(released_dims(), None, {}, 400, ())
    device = "cpu" if capability is None else "cuda"
    return plan_on(config, resolved, facts, Layout(), device=device, capability=capability)


def test_the_configuration_s_choice_is_the_plan_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h3dist.preflight.conditions_of", lambda resolved, contract: ())
    assert (planned((9, 0)).gemm, planned((10, 0)).gemm, planned((10, 0)).fp4) == ("dense", "nvfp4", 200)
    kept = planned((10, 0), "runtime.gemm=dense")
    assert (kept.gemm, kept.fp4, kept.amax) == ("dense", 0, 0)
    assert planned(None, "runtime.gemm=int8").gemm == "int8"
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        planned((8, 0), "runtime.gemm=fp8")
    with pytest.raises(ConfigError, match="CUDA devices, and this is cpu"):
        planned(None, "runtime.fused=on")
    with pytest.raises(ConfigError, match=r"runtime\.offload=blocks is for CUDA devices.*runtime\.offload=none"):
        planned(None, "runtime.offload=blocks")
    for where in ((None,), ((9, 0), "runtime.backend=gloo")):
        with pytest.raises(ConfigError, match=r"transport=copy is for GPUs.*over gloo; use .*auto or collective"):
            planned(*where, "exchange.transport=copy")
    assert planned(None, "exchange.transport=auto").exchange.transport == "auto"
    assert planned((9, 0), "exchange.transport=copy").exchange.transport == "copy"
    assert planned((9, 0), "runtime.fused=on").gemm == "dense"
    assert planned((9, 0), "runtime.offload=blocks").stored.resident_blocks == 2
    with pytest.raises(ConfigError, match=r"runtime\.gemm=fp9.*did you mean 'fp8'"):
        compose(["runtime.gemm=fp9"])
