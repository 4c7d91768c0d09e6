"""Any backend, a few heads at a time: the same result with temporary tensors of those heads alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from h3dist.attention.backend import Attention, Backend, Task

HEADS = 8  # of one call: fewer leave a large GPU idle
SUFFIX = "+sliced"


def sliced(backend: Backend) -> Backend:
    """The backend called `NAME+sliced`."""

    def build(task: Task, found: Any) -> Attention:
        return partial(by_head_groups, backend.build(replace(task, heads=min(HEADS, task.heads)), found))

    def refuses(task: Task) -> str | None:
        return backend.refuses(replace(task, heads=min(HEADS, task.heads)))

    return replace(
        backend,
        name=backend.name + SUFFIX,
        needs=f"{backend.needs}; {HEADS} heads at a time",
        build=build,
        refuses=refuses,
    )


def by_head_groups(attention: Attention, q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
    """o_ShD from calls of at most HEADS heads."""
    o_ShD = q_ShD.new_empty(q_ShD.shape)
    for start in range(0, q_ShD.shape[1], HEADS):
        part = slice(start, start + HEADS)
        o_ShD[:, part] = attention(q_ShD[:, part], k_ShD[:, part], v_ShD[:, part])
    return o_ShD
