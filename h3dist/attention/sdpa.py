"""Attention by torch's scaled_dot_product_attention: every device, every float dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3dist.attention.backend import Backend

# On CUDA torch prefers flash to cuDNN, which is the slower of the two at H3's lengths (S = 38k on an H200:
# 114 against 73 ms), so the order is given. Each is passed over where it cannot take the shape or dtype.
CUDA_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def sdpa(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
    """o_ShD, by the first of CUDA_ORDER that applies, or by torch's own choice on other devices."""
    if q_ShD.is_cuda:
        with sdpa_kernel(CUDA_ORDER, set_priority=True):
            return dot_product_attention(q_ShD, k_ShD, v_ShD)
    return dot_product_attention(q_ShD, k_ShD, v_ShD)


def dot_product_attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
    """scaled_dot_product_attention with rows first; no rows or no heads give an empty result."""
    if q_ShD.numel() == 0:
        return torch.empty_like(q_ShD)
    q_1hSD, k_1hSD, v_1hSD = (x.transpose(0, 1).unsqueeze(0) for x in (q_ShD, k_ShD, v_ShD))
    o_1hSD = F.scaled_dot_product_attention(q_1hSD, k_1hSD, v_1hSD)
    return o_1hSD.squeeze(0).transpose(0, 1).contiguous()


def _refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


BACKEND = Backend(name="sdpa", exact=True, needs="nothing beyond torch", fn=sdpa, refuses=_refuses)
