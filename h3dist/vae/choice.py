"""Which forms the fast decoder takes: by its device, and by how it multiplies."""

import torch

from h3dist.errors import MissingDependency
from h3dist.vae import forms, narrow
from h3dist.vae.forms import Forms


def forms_for(device: torch.device, gemm: str = "exact") -> Forms:
    """For products that are exact, or fp8: Triton's on CUDA, the plain ones elsewhere. Raises MissingDependency
    without triton."""
    if device.type != "cuda":
        return narrow.NARROW if gemm == "fp8" else forms.PLAIN
    return load(gemm)


def load(gemm: str = "exact") -> Forms:
    """Triton's. Raises MissingDependency without triton."""
    try:
        from h3dist.vae import triton_forms as kernels
    except ImportError as error:
        raise MissingDependency(f"decode.fast=on needs triton on a GPU: {error}; use decode.fast=off") from error
    if gemm == "fp8":
        rounding = kernels.narrow_normed, kernels.narrow_add_normed, kernels.turn, kernels.narrow_gate, kernels.operand
        return Forms(*rounding, narrow.scaled_linear)
    return Forms(kernels.normed, kernels.add_normed, kernels.turn, kernels.gate, forms.operand, forms.linear)
