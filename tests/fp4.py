"""The FP4 GEMM emulated on a CPU, by comfy-kitchen's own quantisation and dequantisation."""

import comfy_kitchen
import torch
from torch import Tensor

from h3dist.checkpoint.nvfp4 import Nvfp4Weight
from h3dist.model.linear import Fp4Kernels


def nvfp4(values_NK: Tensor) -> Nvfp4Weight:
    """A weight quantised by comfy-kitchen, as a checkpoint holds it."""
    scale = values_NK.abs().amax() / (448 * 6)
    codes, scales = comfy_kitchen.quantize_nvfp4(values_NK, scale, pad_16x=True)
    return Nvfp4Weight(codes, scales.view(torch.uint8), scale, tuple(values_NK.shape))


def emulated_matmul(codes_a: Tensor, codes_b: Tensor, **scales: Tensor) -> Tensor:
    """What the FP4 GEMM computes, from both operands dequantised in float32."""
    out_dtype = scales["out_dtype"]
    a, b = (
        comfy_kitchen.dequantize_nvfp4(
            codes, scales[f"tensor_scale_{side}"], scales[f"block_scale_{side}"], torch.float32
        )
        for side, codes in (("a", codes_a), ("b", codes_b))
    )
    return (a @ b.T).to(out_dtype)


EMULATED = Fp4Kernels(comfy_kitchen.quantize_nvfp4, emulated_matmul)
