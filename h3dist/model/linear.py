"""How a run's linear layers are computed from their stored weights: the choice, and products in FP4.

FP4: on compute capability 10 and later, an NVFP4 weight meets an activation quantised to NVFP4 in comfy-kitchen's
GEMM, unless the layer asks for full precision. `dense` and `narrow` have the other ways.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.checkpoint.formats import Weight
from h3dist.checkpoint.nvfp4 import Nvfp4Weight
from h3dist.errors import MissingDependency
from h3dist.model.dense import Linear, dense_linear, prescaled
from h3dist.model.exchange import Exchange
from h3dist.model.narrow import narrow_linear
from h3dist.model.reused import ReusedLinear, plain_fill, triton_fill
from h3dist.model.weights import DenoiserWeights
from h3dist.plan import Plan
from h3dist.plan.gemm import NARROW, choose_gemm

FP4_RANGE = 448.0 * 6.0  # the largest E4M3 block scale times the largest E2M1 value
GEMM_COLUMNS = 32  # cuBLAS takes FP4 operands whose K is a multiple of this


class Fp4Kernels(NamedTuple):
    """comfy-kitchen's `quantize_nvfp4` and `scaled_mm_nvfp4`, or stand-ins with their signatures."""

    quantize: Callable[..., tuple[Tensor, Tensor]]
    matmul: Callable[..., Tensor]


@dataclass(frozen=True)
class Fp4Linear:
    """NVFP4 weight times NVFP4 activation; dense for every other weight.

    The activation's per-tensor scale is amax / (448 * 6) over all of the tensor's elements, wherever they are
    (Comfy checkpoint format, dynamic quantisation): ranks agree on it, so that N of them quantise as one
    would. A layer that stores an `input_scale` needs no agreement.
    """

    exchange: Exchange
    kernels: Fp4Kernels

    def __call__(self, x_MK: Tensor, weight: Weight) -> Tensor:
        if not isinstance(weight, Nvfp4Weight) or weight.full_precision:
            return dense_linear(x_MK, weight)
        x_MK = prescaled(x_MK, weight)
        scale = self.activation_scale(x_MK, weight)
        if x_MK.shape[0] == 0:
            return x_MK.new_empty(0, weight.shape[0])
        return fp4_matmul(x_MK, scale, weight, self.kernels)

    def activation_scale(self, x_MK: Tensor, weight: Nvfp4Weight) -> Tensor:
        """The per-tensor scale of a layer's activation, of which this rank has some rows; all ranks call it."""
        if weight.input_scale is not None:
            return weight.input_scale.to(torch.float32)
        largest = self.exchange.amax(largest_magnitude(x_MK))
        return (largest / FP4_RANGE).clamp_min(torch.finfo(torch.float32).tiny)


def largest_magnitude(x: Tensor) -> Tensor:
    """Scalar f32: max |x|, without a copy of x; 0 where x is empty."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).to(torch.float32)


def fp4_matmul(x_MK: Tensor, scale: Tensor, weight: Nvfp4Weight, kernels: Fp4Kernels) -> Tensor:
    """y_MN from an activation quantised with the per-tensor `scale`, padded for the kernels and cropped."""
    y = fp4_product(*fp4_codes(x_MK, scale, kernels), scale, weight, kernels, x_MK.dtype)
    return y[: x_MK.shape[0]]


def fp4_codes(x_MK: Tensor, scale: Tensor, kernels: Fp4Kernels) -> tuple[Tensor, Tensor]:
    """Codes and swizzled block scales of an activation, its columns padded for the GEMM and its rows to 16."""
    return kernels.quantize(_widened(x_MK, -x_MK.shape[1] % GEMM_COLUMNS), scale, pad_16x=True)


def fp4_product(
    codes_x: Tensor, scales_x: Tensor, scale: Tensor, weight: Nvfp4Weight, kernels: Fp4Kernels, dtype: torch.dtype
) -> Tensor:
    """y [padded rows, N] in `dtype` from a quantised activation."""
    y = kernels.matmul(
        codes_x,
        _widened(weight.codes, codes_x.shape[1] - weight.codes.shape[1]),
        tensor_scale_a=scale,
        tensor_scale_b=weight.global_scale,
        block_scale_a=scales_x,
        block_scale_b=weight.scales.view(torch.float8_e4m3fn),
        out_dtype=dtype,
    )
    return y[:, : weight.shape[0]]


def _widened(matrix: Tensor, columns: int) -> Tensor:
    """The matrix, contiguous, with so many columns of zeros more; itself where it is both, which `pad` would copy."""
    return F.pad(matrix, (0, columns)) if columns else matrix.contiguous()


def choose_linear(
    capability: tuple[int, int] | None, exchange: Exchange, dtype: torch.dtype = torch.bfloat16, gemm: str = "auto"
) -> Linear:
    """The linear of a run that asks for `gemm` (see `plan.gemm`). Raises ConfigError for one that cannot be.

    capability: the lowest compute capability of the ranks, None on a CPU. It must be the same on every rank, because
    the FP4 path talks.
    """
    chosen = choose_gemm(gemm, capability, str(dtype).removeprefix("torch."))
    if chosen in NARROW:
        return narrow_linear(chosen, cuda=capability is not None)
    return Fp4Linear(exchange, kitchen_kernels()) if chosen == "nvfp4" else dense_linear


def linear_of_run(
    plan: Plan,
    weights: DenoiserWeights,
    capability: tuple[int, int] | None,
    exchange: Exchange,
    *,
    reused: bool = False,
) -> Linear:
    """The linear of a run as planned. `reused`: dense weights are made so in memory that is used again.

    Raises ConfigError and MissingDependency.
    """
    if reused and plan.gemm == "dense":
        fill = triton_fill() if weights.device.type == "cuda" else plain_fill
        return ReusedLinear(fill, weights.dtype, weights.device)
    return choose_linear(capability, exchange, weights.dtype, plan.gemm)


def kitchen_kernels() -> Fp4Kernels:
    """comfy-kitchen's kernels. Raises MissingDependency where it is not installed."""
    try:
        import comfy_kitchen
    except ImportError as error:
        raise MissingDependency(f"FP4 matrix products need comfy-kitchen: {error}") from error
    return Fp4Kernels(comfy_kitchen.quantize_nvfp4, comfy_kitchen.scaled_mm_nvfp4)
