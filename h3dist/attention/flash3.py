"""Attention by flash-attention 3 for Hopper, exact. Layout [1, S, h, D], as a view. Any S.

`flash_attn_interface.flash_attn_func(q, k, v, softmax_scale=None, ...)`, built from `hopper/` of the flash-attention
repository. It gives the output alone, or in older versions the output and the log-sum-exp.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h3dist.attention.backend import Attention, Backend, Package, Task, not_of, not_on

PACKAGE = Package(
    "flash_attn_interface",
    "flash_attn_func",
    "git clone https://github.com/Dao-AILab/flash-attention && pip install ./flash-attention/hopper",
)


def build(task: Task, found: Any) -> Attention:
    """Raises MissingDependency."""
    flash = PACKAGE.load()

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        given = flash(q_ShD[None], k_ShD[None], v_ShD[None])
        return (given[0] if isinstance(given, tuple) else given).squeeze(0).contiguous()

    return attention


def refuses(task: Task) -> str | None:
    """Hopper alone."""
    return not_on(task) or not_of(task, (9,))


BACKEND = Backend(
    name="flash3",
    exact=True,
    needs="flash-attention 3, built from source; compute capability 9.x, 16 bits",
    build=build,
    refuses=refuses,
    lacks=PACKAGE.lacks,
    bound=0.02,
)
