"""Attention by torch's scaled_dot_product_attention, with the fastest of its exact kernels. Runs everywhere.

On CUDA the kernels are timed once at the run's own shape, and rank 0's result counts for all. Layout [1, h, S, D], as a
view. Any S.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3dist.attention.backend import Attention, Backend, Task, nothing

# On CUDA torch prefers flash to cuDNN, which is the slower of the two at H3's lengths (S = 38k on an H200: 114 against
# 73 ms), so an order is given. Each kernel is passed over where it cannot take the shape or number format.
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PROBED_HEADS, PROBED_RUNS = 8, 3


def dot_product_attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
    """scaled_dot_product_attention with rows first; no rows or no heads give an empty result."""
    if q_ShD.numel() == 0:
        return torch.empty_like(q_ShD)
    q_1hSD, k_1hSD, v_1hSD = (x.transpose(0, 1).unsqueeze(0) for x in (q_ShD, k_ShD, v_ShD))
    o_1hSD = F.scaled_dot_product_attention(q_1hSD, k_1hSD, v_1hSD)
    return o_1hSD.squeeze(0).transpose(0, 1).contiguous()


def by_kernels(*order: SDPBackend) -> Attention:
    """dot_product_attention by the first of these kernels that applies; torch raises RuntimeError where none does."""

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        with sdpa_kernel(list(order), set_priority=True):
            return dot_product_attention(q_ShD, k_ShD, v_ShD)

    return attention


def sdpa(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
    """o_ShD without a probe: on CUDA by the first of KERNELS that applies, elsewhere by torch's own choice."""
    return (IN_ORDER if q_ShD.is_cuda else dot_product_attention)(q_ShD, k_ShD, v_ShD)


@cache
def probe(task: Task) -> str | None:
    """The name in KERNELS that is fastest at the task's shape on its GPU; None on a CPU, or where none applies."""
    if task.capability is None or not task.rows or not task.heads:
        return None
    shape = (task.rows, min(task.heads, PROBED_HEADS), task.head_dim)
    q, k, v = (torch.randn(shape, dtype=task.dtype, device=task.device) for _ in range(3))
    works = {name: partial(by_kernels(kernel), q, k, v) for name, kernel in KERNELS.items()}
    return fastest(works, lambda work: _seconds(work, task.device))


def fastest(works: Mapping[str, Callable[[], object]], seconds: Callable[[Callable[[], object]], float]) -> str | None:
    """The name of the work that takes least, by `seconds`; one that raises RuntimeError cannot be done."""
    taken = {}
    for name, work in works.items():
        try:
            taken[name] = seconds(work)
        except RuntimeError:
            continue
    return min(taken, key=lambda name: taken[name]) if taken else None


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of a few runs, the first left out."""
    runs = []
    for _ in range(1 + PROBED_RUNS):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        runs.append(time.perf_counter() - begun)
    return median(runs[1:])


IN_ORDER = by_kernels(*KERNELS.values(), SDPBackend.MATH)


def build(task: Task, found: str | None) -> Attention:
    """By the kernel `found`, and the others of KERNELS where that does not apply; on a CPU by torch's own choice."""
    if task.capability is None:
        return dot_product_attention
    order = sorted(KERNELS, key=lambda name: name != found)
    return by_kernels(*(KERNELS[name] for name in order), SDPBackend.MATH)


BACKEND = Backend(
    name="sdpa",
    exact=True,
    needs="nothing beyond torch; on CUDA the fastest of its kernels, found by timing",
    build=build,
    refuses=nothing,
    probe=probe,
)
