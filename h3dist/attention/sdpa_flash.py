"""Attention by the flash kernel in torch, and by nothing else. Layout [1, h, S, D], as a view. Any S."""

from __future__ import annotations

from typing import Any

from torch.nn.attention import SDPBackend

from h3dist.attention.backend import Attention, Backend, Task, not_on
from h3dist.attention.sdpa import by_kernels


def build(task: Task, found: Any) -> Attention:
    """Flash attention 2 as torch ships it; torch raises RuntimeError where it cannot take the shape."""
    return by_kernels(SDPBackend.FLASH_ATTENTION)


BACKEND = Backend(
    name="sdpa_flash",
    exact=True,
    needs="nothing beyond torch; compute capability 8.0, 16 bits",
    build=build,
    refuses=not_on,
)
