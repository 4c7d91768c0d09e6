"""Attention by the package flash-attn (2.x), exact. Layout [1, S, h, D], as a view. Any S.

`flash_attn.flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, ...)` gives the output alone; its scale is
1 / sqrt(D) by default. Its wheels and builds are of chosen compute capabilities, so the first call is checked.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h3dist.attention.backend import Attention, Backend, Package, Task, not_on

PACKAGE = Package("flash_attn", "flash_attn_func", "pip install flash-attn --no-build-isolation")


def build(task: Task, found: Any) -> Attention:
    """Raises MissingDependency."""
    flash = PACKAGE.load()

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        return flash(q_ShD[None], k_ShD[None], v_ShD[None]).squeeze(0).contiguous()

    return attention


BACKEND = Backend(
    name="flash2",
    exact=True,
    needs="flash-attn 2; compute capability 8.0, 16 bits",
    build=build,
    refuses=not_on,
    lacks=PACKAGE.lacks,
    bound=0.02,
)
