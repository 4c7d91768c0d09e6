"""Attention by the package flash-attn-4, exact. Layout [1, S, h, D], as a view. Any S.

`flash_attn.cute.flash_attn_func(q, k, v, ...)` always gives (output, log-sum-exp or None). Kernels are compiled at the
first call of a shape class, which takes a minute.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h3dist.attention.backend import Attention, Backend, Package, Task, not_of, not_on

PACKAGE = Package("flash_attn.cute", "flash_attn_func", "pip install --pre flash-attn-4")


def build(task: Task, found: Any) -> Attention:
    """Raises MissingDependency."""
    flash = PACKAGE.load()

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        o_1ShD, _ = flash(q_ShD[None], k_ShD[None], v_ShD[None])
        return o_1ShD.squeeze(0).contiguous()

    return attention


def refuses(task: Task) -> str | None:
    """By what its interface accepts; Blackwell takes heads of up to 128."""
    most = 128 if task.capability is not None and task.capability[0] in (10, 11) else 256
    return not_on(task, sizes=(8, most)) or not_of(task, (8, 9, 10, 11, 12))


BACKEND = Backend(
    name="flash4",
    exact=True,
    needs="flash-attn-4; compute capability 8.0 to 12.x, 16 bits",
    build=build,
    refuses=refuses,
    lacks=PACKAGE.lacks,
    bound=0.02,
)
