"""Each optional attention package through a stand-in: layout, scale, arguments, what it returns, what it does to k."""

from dataclasses import replace

import attention_packages as packages
import pytest
import torch
from attention_packages import install, softmax_attention

from h3dist.attention import cudnn_fp8, registry, sage2
from h3dist.attention.backend import Task
from h3dist.errors import MissingDependency

CPU = torch.device("cpu")
STAND_INS = {
    "flash2": packages.flash2,
    "flash3": packages.flash3,
    "flash4": packages.flash4,
    "sage1": packages.sage1,
    "sage2": packages.sage2,
    **{f"sage2_{name}": packages.sage2 for name in sage2.KERNELS},
    "sage3": packages.sage3,
    "int8": packages.kitchen,
    "cudnn_fp8": packages.cudnn,
}
MODULES = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "sageattention.core", "sageattn3", "cudnn")


def task_of(shape: tuple[int, int, int], capability: tuple[int, int] | None = (9, 0), lead: int = 0) -> Task:
    return Task(*shape, torch.float32, CPU, capability, lead)


def tensors(shape: tuple[int, int, int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k and v as views that are contiguous in their last two dimensions alone; k with a large mean."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(shape[0], 3, *shape[1:], generator=generator).unbind(1)
    k += 3
    assert shape[0] == 1 or not k.is_contiguous()
    return q, k, v


def test_every_backend_with_a_package_has_a_stand_in() -> None:
    own = {"sdpa", "sdpa_flash", "sdpa_cudnn", "sol"}
    assert {name for name in registry.BACKENDS if "+" not in name} == STAND_INS.keys() | own


@pytest.mark.parametrize("suffix", ["", "+sliced"])
@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("shape", [(131, 3, 64), (1, 1, 128), (77, 10, 64)])
def test_a_package_is_called_as_it_documents(
    monkeypatch: pytest.MonkeyPatch, name: str, suffix: str, shape: tuple[int, int, int]
) -> None:
    install(monkeypatch, STAND_INS[name]())
    q, k, v = tensors(shape)
    kept = [x.clone() for x in (q, k, v)]
    task = task_of(shape)
    backend = registry.find(name + suffix)
    assert backend.lacks(task) is None
    o = backend.build(task, None)(q, k, v)
    expected = softmax_attention(q, k, v)
    assert o.is_contiguous() and o.shape == q.shape and o.dtype == q.dtype
    assert all(torch.equal(x, old) for x, old in zip((q, k, v), kept, strict=True)), "inputs are left as they were"
    limit = 0.075 if name == "cudnn_fp8" else 1e-5  # five tensors of 3 bits each
    assert (o - expected).norm() / expected.norm() < limit


def test_flash_attention_3_may_give_its_log_sum_exp_too(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, packages.flash3(with_lse=True))
    q, k, v = tensors((9, 2, 64))
    o = registry.find("flash3").build(task_of((9, 2, 64)), None)(q, k, v)
    torch.testing.assert_close(o, softmax_attention(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "kernel", "options"),
    [
        ((8, 0), "fp16_cuda", {"pv_accum_dtype": "fp32"}),
        ((8, 6), "fp16_triton", {}),
        ((8, 9), "fp8_cuda", {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_thread"}),
        ((9, 0), "fp8_cuda_sm90", {"pv_accum_dtype": "fp32+fp32"}),
        ((10, 0), "fp16_triton", {}),  # the package's own dispatch refuses this one,
        ((10, 3), "fp16_triton", {}),
        ((12, 0), "fp8_cuda", {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_warp"}),
        ((12, 1), "fp8_cuda", {"pv_accum_dtype": "fp32+fp16", "qk_quant_gran": "per_warp"}),  # and this one
    ],
)
def test_sage2_chooses_its_kernel_by_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernel: str, options: dict[str, str]
) -> None:
    calls: list[dict[str, str]] = []
    install(monkeypatch, packages.sage2(calls))
    task = replace(task_of((33, 2, 128), capability), dtype=torch.bfloat16)
    assert registry.why_not(registry.find("sage2"), task) is None
    registry.find("sage2").build(task, None)(*tensors((33, 2, 128)))
    assert len(calls) == 1 and calls[0]["name"] == kernel and options.items() <= calls[0].items()


def test_accumulators_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, str]] = []
    install(monkeypatch, packages.sage2(calls))
    for name in ("fp8_cuda", "fp8_cuda_fast", "fp16_cuda"):
        registry.find(f"sage2_{name}").build(task_of((5, 1, 64), (8, 9)), None)(*tensors((5, 1, 64)))
    assert [call["pv_accum_dtype"] for call in calls] == ["fp32+fp32", "fp32+fp16", "fp32"]


@pytest.mark.parametrize("name", STAND_INS)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch, dict.fromkeys((*MODULES, "comfy_kitchen")))
    capability = {"sage3": (12, 0), "sage2_fp8_cuda": (8, 9), "sage2_fp8_cuda_fast": (8, 9)}.get(name, (9, 0))
    task = Task(100, 2, 128, torch.bfloat16, CPU, capability)
    error = registry.why_not(registry.find(name), task)
    assert isinstance(error, MissingDependency) and error.exit_code == 8
    assert f"attention={name}: " in str(error) and "pip install " in str(error)
    with pytest.raises(MissingDependency):
        registry.find(name).build(task, None)


def test_each_sageattention_knows_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of((33, 2, 128))
    install(monkeypatch, packages.sage2())
    assert "attention=sage2_fp16_triton" in registry.find("sage1").lacks(task)
    install(monkeypatch, packages.sage1())
    assert registry.find("sage1").lacks(task) is None
    assert "PyPI is 1.x" in registry.find("sage2").lacks(task)


def test_a_comfy_kitchen_without_kernels_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, packages.kitchen(available=False))
    for name in ("int8", "sol"):
        assert "CUDA kernels do not load" in registry.find(name).lacks(task_of((33, 2, 128)))
    assert registry.find("sol").lacks(task_of((33, 2, 128), None)) is None


@pytest.mark.parametrize("out", [torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("size", [1e-3, 1.0, 40.0])
def test_fp8_scales_follow_the_size_of_the_tensors(
    monkeypatch: pytest.MonkeyPatch, out: torch.dtype, size: float
) -> None:
    """On Hopper the output is FP8 too; one value that is far from the others costs the others precision, not more."""
    install(monkeypatch, packages.cudnn())
    monkeypatch.setattr(packages.CudnnGraph.TYPES, "BFLOAT16", torch.float32)
    kinds = torch.bfloat16 if out == torch.float32 else out
    q, k, v = tensors((150, 2, 64))
    v = v * size
    graph = cudnn_fp8.graph_for((150, 2, 64), kinds, CPU)
    o = cudnn_fp8.attend(q, k, v, replace(graph, out=kinds))
    expected = softmax_attention(q, k, v)
    assert (o.float() - expected).norm() / expected.norm() < 0.06


def test_fp8_quantisation_is_by_powers_of_two_and_never_overflows() -> None:
    for largest in (448.0, 449.0, 447.0, 1e-3, 7.0, 1e4):
        x = torch.linspace(-largest, largest, 97).view(97, 1, 1)
        codes, scale = cudnn_fp8.quantised(x)
        assert torch.frexp(scale)[0] == 0.5, "a power of two"
        assert bool(torch.isfinite(codes.float()).all()) and codes.float().abs().max() > 448 / 2 - 16
        assert ((codes.float() / scale - x).abs() <= x.abs() / 15 + largest / 4e4).all()
    codes, scale = cudnn_fp8.quantised(torch.zeros(3, 1, 4))
    assert torch.equal(codes.float(), torch.zeros(3, 1, 4)) and bool(torch.isfinite(1 / scale))


def test_a_plan_of_cudnn_is_made_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, packages.cudnn())
    made = [cudnn_fp8.graph_for(shape, torch.bfloat16, CPU) for shape in ((9, 2, 64), (9, 2, 64), (9, 1, 64))]
    assert made[0] is made[1] is not made[2]


def test_sol_sees_text_conditions_and_sound_exactly() -> None:
    """By comfy-kitchen's own reference: with all blocks as sinks it is exact, without any it is not."""
    torch.manual_seed(3)
    q, k, v = 2 * torch.randn(3, 64 * 7 + 5, 2, 128)
    expected, sol = softmax_attention(q, k, v), registry.find("sol")
    exact = sol.build(task_of(tuple(q.shape), None, lead=q.shape[0]), None)(q, k, v)
    assert (exact - expected).norm() / expected.norm() < 1e-5
    errors = [
        (
            (sol.build(task_of(tuple(q.shape), None, lead=lead), None)(q, k, v) - expected).norm() / expected.norm()
        ).item()
        for lead in (0, 65, 3 * 64)
    ]
    assert errors[0] > errors[1] > errors[2] > 0.01
