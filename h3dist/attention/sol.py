"""Attention by comfy-kitchen's Sol-Attn (arXiv 2607.24027): blocks of 64 keys are exact where they matter to a block of
64 queries, and one pooled term elsewhere. Approximate, and the more so the less blocks resemble each other.

Layout [1, S, h, D], as a view. Heads of 128. Any S; below some 12 000 rows dense attention is faster. On a CPU
its reference takes float32 [h, S, S]. `comfy_kitchen.sol_attn(q, k, v, tau=, sink_blocks=[first, end), ...)` gives the
output alone. Text, conditions and sound stand first in the sequence and are sinks: every query sees them exactly.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h3dist.attention.backend import Attention, Backend, Package, Task, not_on

PACKAGE = Package("comfy_kitchen", "sol_attn", "pip install 'comfy-kitchen>=0.2.40'")
AVAILABLE = PACKAGE._replace(name="sol_attn_is_available")
TAU = 1.5  # standard deviations over which a block's score counts as high; LightX2V's setting for H3
BLOCK = 64
REFERENCE_BYTES = 4 << 30  # what the reference may take for its scores
HEAD_DIM = 128


def build(task: Task, found: Any) -> Attention:
    """Raises MissingDependency."""
    sol, sinks = PACKAGE.load(), [0, -(-task.lead // BLOCK)]

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        return sol(q_ShD[None], k_ShD[None], v_ShD[None], tau=TAU, sink_blocks=sinks).squeeze(0).contiguous()

    return attention


def refuses(task: Task) -> str | None:
    """By head size, and on a CPU by the size of the scores."""
    if task.capability is not None:
        return not_on(task, sizes=(HEAD_DIM, HEAD_DIM))
    if task.head_dim != HEAD_DIM:
        return f"it takes heads of {HEAD_DIM}, not {task.head_dim}"
    wanted = 4 * task.heads * task.rows**2
    over = wanted > REFERENCE_BYTES
    return f"its reference for the CPU would take {wanted / 2**30:.0f} GiB for scores" if over else None


def lacks(task: Task) -> str | None:
    """The package, or on CUDA its compiled part."""
    missing = PACKAGE.lacks(task) or AVAILABLE.lacks(task)
    if missing is None and task.capability is not None and not AVAILABLE.load()(task.device):
        return f"comfy-kitchen's CUDA kernels do not load here; install its wheel: {PACKAGE.install}"
    return missing


BACKEND = Backend(
    name="sol",
    exact=False,
    needs="comfy-kitchen; heads of 128; compute capability 8.0 and 16 bits, or a CPU for small clips",
    build=build,
    refuses=refuses,
    lacks=lacks,
    bound=0.35,
)
