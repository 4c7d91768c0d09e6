"""Whether a run takes the fused path: `runtime.fused` as it was asked for, or, with auto, where all ranks can."""

from __future__ import annotations

import torch

from h3dist.comm import Comm
from h3dist.model.elementwise import PLAIN, Elementwise
from h3dist.model.fused import choose_elementwise, lacks


def agree_on_elementwise(comm: Comm, asked: str, device: torch.device) -> Elementwise:
    """What a block does between its products, the same way on every rank; all ranks call this.

    Raises ConfigError and MissingDependency where the fused path was asked for and cannot be here.
    """
    if asked != "auto":
        return choose_elementwise(asked, device)
    missing = any(comm.collect("fused", lacks(device) or ""))
    return PLAIN if missing else choose_elementwise("on", device)
