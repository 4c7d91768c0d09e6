"""Attention by comfy-kitchen's int8 kernel: q, k, P and v in int8, softmax in float32. Approximate.

Layout [1, h, S, D], as a view; heads of up to 256. Any S. `comfy_kitchen.int8_attention(q, k, v, *, scale=None,
attn_mask=None)` gives the output alone, in the inputs' dtype, and has no CPU form.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h3dist.attention.backend import Attention, Backend, Package, Task, not_on

PACKAGE = Package("comfy_kitchen", "int8_attention", "pip install 'comfy-kitchen>=0.2.40'")
AVAILABLE = PACKAGE._replace(name="int8_attention_is_available")
LEAST = (7, 5)


def build(task: Task, found: Any) -> Attention:
    """Raises MissingDependency."""
    kernel = PACKAGE.load()

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        q_1hSD, k_1hSD, v_1hSD = (x.transpose(0, 1).unsqueeze(0) for x in (q_ShD, k_ShD, v_ShD))
        return kernel(q_1hSD, k_1hSD, v_1hSD).squeeze(0).transpose(0, 1).contiguous()

    return attention


def refuses(task: Task) -> str | None:
    """By compute capability, number format and head size."""
    return not_on(task, least=LEAST, sizes=(1, 256))


def lacks(task: Task) -> str | None:
    """The package, or its compiled part."""
    missing = PACKAGE.lacks(task) or AVAILABLE.lacks(task)
    if missing is None and not AVAILABLE.load()(task.device):
        return f"comfy-kitchen's CUDA kernels do not load here; install its wheel: {PACKAGE.install}"
    return missing


BACKEND = Backend(
    name="int8",
    exact=False,
    needs="comfy-kitchen's CUDA kernels; compute capability 7.5, 16 bits",
    build=build,
    refuses=refuses,
    lacks=lacks,
    bound=0.06,
)
