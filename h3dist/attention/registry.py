"""The attention backends by name."""

from __future__ import annotations

from h3dist.attention import (
    cudnn_fp8,
    flash2,
    flash3,
    flash4,
    int8,
    sage1,
    sage2,
    sage3,
    sdpa,
    sdpa_cudnn,
    sdpa_flash,
    sol,
)
from h3dist.attention.backend import Backend, Task
from h3dist.attention.sliced import sliced
from h3dist.errors import ConfigError, H3Error, MissingDependency, nearest

EXACT = (sdpa, sdpa_flash, sdpa_cudnn, flash2, flash3, flash4)
WHOLE = (
    *(module.BACKEND for module in EXACT),
    cudnn_fp8.BACKEND,
    sage1.BACKEND,
    sage2.BACKEND,
    *sage2.VARIANTS,
    sage3.BACKEND,
    int8.BACKEND,
    sol.BACKEND,
)
BACKENDS: dict[str, Backend] = {backend.name: backend for whole in WHOLE for backend in (whole, sliced(whole))}


def find(name: str) -> Backend:
    """The backend called `name`. Raises ConfigError, with the nearest name."""
    if name not in BACKENDS:
        known = ", ".join(backend.name for backend in WHOLE)
        raise ConfigError(
            f"attention={name} is unknown: it can be {known}, each also with +sliced{nearest(name, BACKENDS)}"
        )
    return BACKENDS[name]


def why_not(backend: Backend, task: Task) -> H3Error | None:
    """Why a backend cannot do a task here: ConfigError, or MissingDependency with the command that installs it."""
    reason = backend.refuses(task)
    if reason is not None:
        return ConfigError(f"attention={backend.name} cannot be used here: {reason}; attention=sdpa runs everywhere")
    reason = backend.lacks(task)
    return None if reason is None else MissingDependency(f"attention={backend.name}: {reason}")
