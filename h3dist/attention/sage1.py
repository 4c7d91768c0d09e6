"""Attention by the package sageattention 1.x: int8 q and k, float16 v, in Triton. Approximate.

Layout [1, S, h, D] ("NHD"), as a view. Heads of 64, 96 or 128. Any S. `sageattention.core.sageattn(q, k, v,
tensor_layout, is_causal, sm_scale, smooth_k)` gives the output alone. With smooth_k it subtracts the mean of k from the
caller's k in place; softmax does not see that mean, so it is taken from a copy here, and smooth_k is off.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h3dist.attention import sage2
from h3dist.attention.backend import Attention, Backend, Package, Task, not_on

PACKAGE = Package("sageattention.core", "sageattn", "pip install 'sageattention<2' triton")
HEAD_SIZES = (64, 96, 128)


def build(task: Task, found: Any) -> Attention:
    """Raises MissingDependency."""
    sage = PACKAGE.load()

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        centred_ShD = k_ShD - k_ShD.mean(dim=0, keepdim=True)
        o_1ShD = sage(q_ShD[None], centred_ShD[None], v_ShD[None], tensor_layout="NHD", smooth_k=False)
        return o_1ShD.squeeze(0).contiguous()

    return attention


def refuses(task: Task) -> str | None:
    """Triton does the rest of the choosing."""
    reason = not_on(task, sizes=(1, 128))
    if reason is None and task.head_dim not in HEAD_SIZES:
        return f"it takes heads of {', '.join(map(str, HEAD_SIZES))}, not {task.head_dim}"
    return reason


def lacks(task: Task) -> str | None:
    """Version 2 has the same module, and is another backend."""
    missing = PACKAGE.lacks(task)
    if missing is None and sage2.PACKAGES["fp16_triton"].lacks(task) is None:
        return "sageattention 2 is installed: attention=sage2_fp16_triton is its kernel of this kind"
    return missing


BACKEND = Backend(
    name="sage1",
    exact=False,
    needs="sageattention 1.x and triton; compute capability 8.0, 16 bits, heads of 64, 96 or 128",
    build=build,
    refuses=refuses,
    lacks=lacks,
    bound=0.05,
)
