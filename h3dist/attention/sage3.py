"""Attention by sageattn3 (SageAttention 3): all of q, k, P and v in FP4. Approximate, the coarsest of the dense ones.

Layout [1, h, S, D] ("HND"), as a view. S is padded to 128 by the package; its per-block means take float32
[h, S / 128, S], 2.6 GB at 38 000 rows and 56 heads, which `sage3+sliced` divides by seven.
`sageattn3.sageattn3_blackwell(q, k, v, attn_mask=None, is_causal=False, per_block_mean=True)` gives the output alone.
It subtracts the mean of k from the caller's k in place, so it is given a copy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h3dist.attention.backend import Attention, Backend, Package, Task, not_of, not_on

PACKAGE = Package(
    "sageattn3",
    "sageattn3_blackwell",
    "git clone https://github.com/thu-ml/SageAttention && "
    "pip install --no-build-isolation ./SageAttention/sageattention3_blackwell",
)


def build(task: Task, found: Any) -> Attention:
    """Raises MissingDependency."""
    sage = PACKAGE.load()

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        q_1hSD, k_1hSD, v_1hSD = (x.transpose(0, 1).unsqueeze(0) for x in (q_ShD, k_ShD.clone(), v_ShD))
        return sage(q_1hSD, k_1hSD, v_1hSD, per_block_mean=True).squeeze(0).transpose(0, 1).contiguous()

    return attention


def refuses(task: Task) -> str | None:
    """Blackwell alone."""
    reason = not_on(task, sizes=(1, 128)) or not_of(task, (10, 12))
    return reason or (None if task.head_dim in (64, 128) else f"it takes heads of 64 and 128, not {task.head_dim}")


BACKEND = Backend(
    name="sage3",
    exact=False,
    needs="sageattn3, built from source; compute capability 10.x or 12.x, 16 bits, heads of 64 or 128",
    build=build,
    refuses=refuses,
    lacks=PACKAGE.lacks,
    bound=0.25,
)
