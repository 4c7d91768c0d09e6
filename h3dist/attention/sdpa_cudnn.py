"""Attention by cuDNN's kernel in torch, and by nothing else. Layout [1, h, S, D], as a view. Any S."""

from __future__ import annotations

from typing import Any

from torch.nn.attention import SDPBackend

from h3dist.attention.backend import Attention, Backend, Task, not_on
from h3dist.attention.sdpa import by_kernels


def build(task: Task, found: Any) -> Attention:
    """cuDNN's; torch raises RuntimeError where it cannot take the shape."""
    return by_kernels(SDPBackend.CUDNN_ATTENTION)


BACKEND = Backend(
    name="sdpa_cudnn",
    exact=True,
    needs="nothing beyond torch; compute capability 8.0, 16 bits",
    build=build,
    refuses=not_on,
)
