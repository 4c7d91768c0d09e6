"""What an attention backend is, what it is asked for, and the packages that it may need.

Shape letters: S all rows, h heads of one call, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h3dist.errors import MissingDependency

# (q_ShD, k_ShD, v_ShD) -> o_ShD, contiguous: full self-attention over all rows, no mask, scale 1 / sqrt(D). The inputs
# are left as they were; their last dimension is contiguous, and the others may be strided.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Task:
    """What a run asks of attention on one rank.

    capability: the device's compute capability, None on a CPU. lead: the rows that stand before the clip's video: text,
    conditions and sound.
    """

    rows: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    capability: tuple[int, int] | None
    lead: int = 0


class Package(NamedTuple):
    """A function of an optional package, and the command that installs it. It is imported when it is needed."""

    module: str
    name: str
    install: str

    def load(self) -> Callable[..., Any]:
        """The function. Raises MissingDependency with the command."""
        try:
            return getattr(import_module(self.module), self.name)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise MissingDependency(
                f"{self.module} is not usable here ({cause}); install it: {self.install}"
            ) from error

    def lacks(self, task: Task) -> str | None:
        """Why the function cannot be had, with the command; None where it can."""
        try:
            self.load()
        except MissingDependency as error:
            return str(error)
        return None


def nothing(task: Task) -> None:
    """The answer of a backend that lacks nothing, or has nothing to find out."""


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    exact: it computes softmax attention in the precision of its inputs, without further quantisation or sparsity.
    needs: package, devices and limits, for people. build(task, found): the function, `found` being what rank 0's
    `probe` of the task gave (JSON values). refuses(task): why it cannot be used there, by device, number format and
    sizes. lacks(task): what is not installed. bound: how far its first call of a run may be from exact attention, as
    the relative 2-norm; None: it is part of torch, and not checked.
    """

    name: str
    exact: bool
    needs: str
    build: Callable[[Task, Any], Attention]
    refuses: Callable[[Task], str | None]
    lacks: Callable[[Task], str | None] = nothing
    probe: Callable[[Task], Any] = nothing
    bound: float | None = None


def not_on(task: Task, *, least: tuple[int, int] = (8, 0), sizes: tuple[int, int] = (8, 256)) -> str | None:
    """Why a kernel for 16-bit tensors on GPUs of compute capability `least` and up cannot take a task.

    sizes: the largest head size, of which all are multiples of the first number.
    """
    multiple, most = sizes
    if task.capability is None:
        return f"it runs on CUDA devices, and this is {task.device.type}"
    if task.capability < least:
        return f"it needs compute capability {_dotted(least)}, and this is {_dotted(task.capability)}"
    if task.dtype not in HALVES:
        return f"it takes bfloat16 and float16, not {str(task.dtype).removeprefix('torch.')}"
    if task.head_dim > most or task.head_dim % multiple:
        return f"it takes heads of up to {most} in multiples of {multiple}, not {task.head_dim}"
    return None


def not_of(task: Task, majors: tuple[int, ...]) -> str | None:
    """Why a kernel for some generations of GPUs, by the first part of their compute capability, is not for this one."""
    if task.capability is not None and task.capability[0] not in majors:
        asked = ", ".join(f"{major}.x" for major in majors)
        return f"it is for compute capability {asked}, and this is {_dotted(task.capability)}"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
