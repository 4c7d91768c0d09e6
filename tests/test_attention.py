"""The attention registry and its backends."""

import pytest
import torch

from h3dist.attention import registry
from h3dist.errors import ConfigError

CPU = torch.device("cpu")


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("shd,thd->hst", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hst,thd->shd", scores.softmax(-1), v)


@pytest.mark.parametrize("shape", [(37, 3, 16), (1, 1, 128), (5, 2, 32)])
def test_sdpa_is_softmax_attention_over_all_rows(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape)
    o = registry.get("sdpa", CPU, torch.float32)(3 * q, k, v)
    torch.testing.assert_close(o, softmax_attention(3 * q, k, v), rtol=1e-5, atol=1e-6)
    assert o.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 3, 16), (7, 0, 16), (0, 0, 16)])
def test_no_rows_or_no_heads_give_an_empty_result(shape: tuple[int, int, int]) -> None:
    empty = torch.empty(shape)
    assert registry.get("sdpa", CPU, torch.float32)(empty, empty, empty).shape == shape


def test_strided_views_are_accepted() -> None:
    q, k, v = torch.randn(9, 3, 2, 8).unbind(1)
    o = registry.get("sdpa", CPU, torch.float32)(q, k, v)
    torch.testing.assert_close(o, softmax_attention(q, k, v), rtol=1e-5, atol=1e-6)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"sdpa_cudn.*did you mean 'sdpa_cudnn'"):
        registry.get("sdpa_cudn", CPU, torch.float32)


def test_an_unavailable_backend_says_why_and_what_works() -> None:
    with pytest.raises(ConfigError, match=r"sdpa_cudnn.*CUDA.*cpu.*attention=sdpa"):
        registry.get("sdpa_cudnn", CPU, torch.bfloat16)


def test_every_backend_says_what_it_needs() -> None:
    for name, backend in registry.BACKENDS.items():
        assert backend.name == name
        assert backend.needs
        assert backend.exact


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "sdpa_cudnn"])
@pytest.mark.parametrize("shape", [(659, 5, 128), (38, 1, 32), (64, 2, 64)])
def test_on_a_gpu_every_backend_is_softmax_attention(name: str, shape: tuple[int, int, int]) -> None:
    device = torch.device("cuda")
    q, k, v = torch.randn(3, *shape, device=device, dtype=torch.bfloat16)
    o = registry.get(name, device, torch.bfloat16)(q, k, v)
    expected = softmax_attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-2)
    empty = q[:, :0]
    assert registry.get(name, device, torch.bfloat16)(empty, empty, empty).shape == empty.shape


@pytest.mark.gpu
def test_on_a_gpu_sdpa_takes_float32_and_cudnn_refuses_it() -> None:
    device = torch.device("cuda")
    q, k, v = torch.randn(3, 50, 2, 64, device=device)
    o = registry.get("sdpa", device, torch.float32)(q, k, v)
    torch.testing.assert_close(o, softmax_attention(q, k, v), rtol=1e-3, atol=1e-3)
    with pytest.raises(ConfigError, match="float32"):
        registry.get("sdpa_cudnn", device, torch.float32)
