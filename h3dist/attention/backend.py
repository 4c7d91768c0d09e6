"""What an attention backend is.

Shape letters: S all rows, h heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# (q_ShD, k_ShD, v_ShD) -> o_ShD: full self-attention over all rows, no mask, scale 1 / sqrt(D).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    exact: it computes softmax attention in the precision of its inputs, without further quantisation or
    sparsity. needs: what it takes to run, for people. refuses(device, dtype): why it cannot run there, or
    None.
    """

    name: str
    exact: bool
    needs: str
    fn: Attention
    refuses: Callable[[torch.device, torch.dtype], str | None]
