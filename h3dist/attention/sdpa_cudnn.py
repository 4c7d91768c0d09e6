"""Attention by cuDNN through torch's scaled_dot_product_attention, and by nothing else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3dist.attention.backend import Backend
from h3dist.attention.sdpa import dot_product_attention

CAPABILITY = (8, 0)


def sdpa_cudnn(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
    """o_ShD by cuDNN; torch raises RuntimeError where cuDNN cannot take the shape."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return dot_product_attention(q_ShD, k_ShD, v_ShD)


def _refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"it runs on CUDA devices, and this is {device.type}"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"it needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return None


BACKEND = Backend(
    name="sdpa_cudnn",
    exact=True,
    needs="a CUDA device of compute capability 8.0 and bfloat16",
    fn=sdpa_cudnn,
    refuses=_refuses,
)
