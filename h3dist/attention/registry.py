"""The attention backends by name."""

from __future__ import annotations

import torch

from h3dist.attention import sdpa, sdpa_cudnn
from h3dist.attention.backend import Attention, Backend
from h3dist.errors import ConfigError, nearest

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (sdpa.BACKEND, sdpa_cudnn.BACKEND)}


def get(name: str, device: torch.device, dtype: torch.dtype) -> Attention:
    """The attention function called `name`, for tensors of this device and dtype.

    Raises ConfigError for an unknown name, and for a backend that cannot run there, with the reason.
    """
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ConfigError(f"attention={name} is unknown: it can be {known}{nearest(name, BACKENDS)}")
    reason = BACKENDS[name].refuses(device, dtype)
    if reason is not None:
        raise ConfigError(f"attention={name} cannot be used here: {reason}; attention=sdpa runs everywhere")
    return BACKENDS[name].fn
