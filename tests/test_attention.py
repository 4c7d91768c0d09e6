"""The attention registry, torch's own backends, and heads taken in groups."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_packages import softmax_attention

from h3dist.attention import registry, sdpa
from h3dist.attention.backend import Task
from h3dist.attention.sliced import HEADS
from h3dist.errors import ConfigError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
ON_CPU = Task(37, 3, 16, torch.float32, CPU, None)
H200 = Task(38110, 56, 128, torch.bfloat16, CUDA, (9, 0))
# what the released model meets where: compute capability -> the backends that are refused for it
REFUSED = {
    (7, 5): "sdpa_flash sdpa_cudnn flash2 flash3 flash4 cudnn_fp8 sage1 sage2 fp16_triton fp16_cuda fp8_cuda "
    "fp8_cuda_fast fp8_cuda_sm90 sage3 sol",
    (8, 0): "flash3 cudnn_fp8 fp8_cuda fp8_cuda_fast fp8_cuda_sm90 sage3",
    (8, 6): "flash3 cudnn_fp8 fp8_cuda fp8_cuda_fast fp8_cuda_sm90 sage3",
    (8, 9): "flash3 cudnn_fp8 fp8_cuda_sm90 sage3",
    (9, 0): "fp8_cuda fp8_cuda_fast sage3",
    (10, 0): "flash3 fp8_cuda fp8_cuda_fast fp8_cuda_sm90",
    (10, 3): "flash3 fp8_cuda fp8_cuda_fast fp8_cuda_sm90",
    (12, 0): "flash3 cudnn_fp8 fp16_triton fp8_cuda_sm90",
    (12, 1): "flash3 cudnn_fp8 fp16_triton fp8_cuda_sm90",
}


def attend(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    task = Task(q.shape[0], q.shape[1], q.shape[2], q.dtype, CPU, None)
    backend = registry.find(name)
    assert registry.why_not(backend, task) is None
    return backend.build(task, backend.probe(task))(q, k, v)


@pytest.mark.parametrize("name", ["sdpa", "sdpa+sliced"])
@pytest.mark.parametrize("shape", [(37, 3, 16), (1, 1, 128), (5, 2 * HEADS + 1, 32)])
def test_sdpa_is_softmax_attention_over_all_rows(name: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape)
    o = attend(name, 3 * q, k, v)
    torch.testing.assert_close(o, softmax_attention(3 * q, k, v), rtol=1e-5, atol=1e-6)
    assert o.is_contiguous()


@pytest.mark.parametrize("name", ["sdpa", "sdpa+sliced"])
@pytest.mark.parametrize("shape", [(0, 3, 16), (7, 0, 16), (0, 0, 16)])
def test_no_rows_or_no_heads_give_an_empty_result(name: str, shape: tuple[int, int, int]) -> None:
    empty = torch.empty(shape)
    assert attend(name, empty, empty, empty).shape == shape


def test_strided_views_are_accepted() -> None:
    q, k, v = torch.randn(9, 3, 2, 8).unbind(1)
    torch.testing.assert_close(attend("sdpa", q, k, v), softmax_attention(q, k, v), rtol=1e-5, atol=1e-6)


def test_groups_of_heads_are_attended_to_one_after_the_other() -> None:
    seen = []

    def build(task: Task, found: object) -> object:
        return lambda q, k, v: seen.append(q.shape[1]) or q + 2 * k + v

    backend = registry.sliced(replace(registry.find("sdpa"), build=build))
    q, k, v = torch.randn(3, 4, 2 * HEADS + 3, 8)
    o = backend.build(replace(ON_CPU, heads=2 * HEADS + 3), None)(q, k, v)
    assert torch.equal(o, q + 2 * k + v) and seen == [HEADS, HEADS, 3]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"sdpa_cudn is unknown.*did you mean 'sdpa_cudnn'"):
        registry.find("sdpa_cudn")


def test_every_backend_says_what_it_is() -> None:
    for name, backend in registry.BACKENDS.items():
        assert backend.name == name and backend.needs
        assert backend.exact or (backend.bound or 0) > 0.02, "an approximation is checked"
    whole = [name for name in registry.BACKENDS if "+" not in name]
    assert {f"{name}+sliced" for name in whole} | set(whole) == registry.BACKENDS.keys()


def test_every_backend_is_a_choice_of_the_configuration() -> None:
    folder = Path(__file__).parent.parent / "conf" / "attention"
    found = {path.stem: path.read_text() for path in folder.glob("*.yaml")}
    assert found.keys() == registry.BACKENDS.keys()
    for name, text in found.items():
        assert f"name: {name}\n" in text and text.startswith("# ")


@pytest.mark.parametrize("capability", REFUSED)
def test_kernels_are_refused_by_compute_capability(capability: tuple[int, int]) -> None:
    task = replace(H200, capability=capability)
    refused = {name for name, backend in registry.BACKENDS.items() if backend.refuses(task) is not None}
    names = [name if name in registry.BACKENDS else f"sage2_{name}" for name in REFUSED[capability].split()]
    assert refused == {name + end for name in names for end in ("", "+sliced")}
    for name in refused:
        assert ".".join(map(str, capability)) in str(registry.BACKENDS[name].refuses(task))


def test_on_a_cpu_only_what_runs_there_is_allowed() -> None:
    wide = replace(ON_CPU, head_dim=128)
    allowed = {name for name, backend in registry.BACKENDS.items() if backend.refuses(wide) is None}
    assert allowed == {"sdpa", "sdpa+sliced", "sol", "sol+sliced"}
    error = registry.why_not(registry.find("sdpa_cudnn"), ON_CPU)
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "attention=sdpa_cudnn cannot be used here: it runs on CUDA devices, and this is cpu; "
        "attention=sdpa runs everywhere"
    )
    assert "GiB" in str(registry.find("sol").refuses(replace(wide, rows=40000)))
    assert "heads of 128, not 16" in str(registry.find("sol").refuses(ON_CPU))


def test_16_bits_and_head_sizes_are_asked_for() -> None:
    wide = replace(H200, dtype=torch.float32)
    for name in registry.BACKENDS.keys() - {"sdpa", "sdpa+sliced"}:
        assert registry.BACKENDS[name].refuses(wide) is not None
    odd = {name for name, backend in registry.BACKENDS.items() if not backend.refuses(replace(H200, head_dim=80))}
    assert {"flash2", "flash4", "sage2", "int8", "cudnn_fp8"} <= odd and not {"sage1", "sol"} & odd
    assert "up to 256 in multiples of 8, not 20" in registry.find("flash3").refuses(replace(H200, head_dim=20))
    blackwell = replace(H200, capability=(10, 0), head_dim=192)
    assert "up to 128" in registry.find("flash4").refuses(blackwell)


def test_the_fastest_kernel_is_taken_and_those_that_fail_are_passed_over() -> None:
    taken = {"cudnn": 3.0, "flash": 2.0, "efficient": 5.0}

    def seconds(work: object) -> float:
        name = work()
        if name == "flash":
            raise RuntimeError("No viable backend")
        return taken[name]

    works = {name: (lambda name=name: name) for name in taken}
    assert sdpa.fastest(works, seconds) == "cudnn"
    assert sdpa.fastest({"flash": works["flash"]}, seconds) is None
    assert sdpa.probe(ON_CPU) is None


def test_the_probe_s_kernel_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    monkeypatch.setattr(sdpa, "by_kernels", lambda *order: orders.append(order))
    for found in (None, "efficient"):
        sdpa.build(H200, found)
    assert [order[0] for order in orders] == [sdpa.KERNELS["cudnn"], sdpa.KERNELS["efficient"]]
    assert all(len(set(order)) == 4 for order in orders)


def different(shape: tuple[int, int, int]) -> torch.Tensor:
    return torch.randn(shape[0], 3, *shape[1:], generator=torch.Generator().manual_seed(0))


def alike(shape: tuple[int, int, int]) -> torch.Tensor:
    """Rows of one block of 64 resemble each other and no others', as Sol-Attn supposes."""
    blocks = torch.randn(-(-shape[0] // 64), 1, 1, *shape[1:], generator=torch.Generator().manual_seed(1))
    return blocks.expand(-1, 64, 3, -1, -1).flatten(0, 1)[: shape[0]] + 0.3 * different(shape)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in registry.BACKENDS if "+" not in n] + ["sdpa+sliced"])
@pytest.mark.parametrize("shape", [(659, 5, 128), (1023, 1, 128), (64, 2, 64)])
def test_on_a_gpu_every_backend_that_is_there_is_softmax_attention(name: str, shape: tuple[int, int, int]) -> None:
    capability = torch.cuda.get_device_capability()
    task = Task(*shape, torch.bfloat16, CUDA, capability)
    backend = registry.find(name)
    if registry.why_not(backend, task) is not None:
        pytest.skip(str(registry.why_not(backend, task)))
    q, k, v = (alike if name == "sol" else different)(shape).to(CUDA, torch.bfloat16).unbind(1)
    kept = [x.clone() for x in (q, k, v)]
    o = backend.build(task, backend.probe(task))(q, k, v)
    expected = softmax_attention(q.double(), k.double(), v.double())
    assert (o.double() - expected).norm() / expected.norm() < (0.02 if name == "sol" else backend.bound or 0.01)
    assert o.is_contiguous() and all(torch.equal(x, old) for x, old in zip((q, k, v), kept, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_sdpa_takes_float32_and_probes_16_bits() -> None:
    q, k, v = torch.randn(3, 50, 2, 64, device=CUDA)
    task = Task(50, 2, 64, torch.float32, CUDA, torch.cuda.get_device_capability())
    o = sdpa.build(task, None)(q, k, v)
    torch.testing.assert_close(o, softmax_attention(q, k, v), rtol=1e-3, atol=1e-3)
    assert sdpa.probe(replace(task, rows=4096, dtype=torch.bfloat16, head_dim=128)) in sdpa.KERNELS
