"""`decode.gemm=fp8`: the decoder's products in E4M3, an approximation. Weights are rounded once at load, with a scale
an output channel, and rows as they come, with a scale each.

All scales are powers of two: to multiply by one rounds nothing. These are the plain forms that define it;
`triton_forms` rounds rows where it makes them. What enters the blocks and what leaves them for pixels stays exact.

Shape letters as in `forms`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.fp8 import to_rows_of_fp8
from h3dist.vae import forms
from h3dist.vae.forms import Forms, Product, Rows


def narrowed(product: Product) -> Product:
    """The same with its weight rounded."""
    return Product(operand(product.weight), product.bias)


def operand(y_NC: Tensor) -> Rows:
    """Rows of any float dtype, rounded once."""
    return Rows(*to_rows_of_fp8(y_NC.float()))


def normed(x_NC: Tensor, weight_C: Tensor, eps: float, dtype: torch.dtype) -> Rows:
    """The RMS norm of float32 rows, rounded from float32; `dtype` is for forms that are not narrow."""
    return operand(forms.normed(x_NC, weight_C, eps, torch.float32))


def add_normed(x_NC: Tensor, y_NC: Tensor, scale_C: Tensor, weight_C: Tensor, eps: float) -> Rows:
    """From the end of one half of a block to the beginning of the next."""
    forms.add_scaled(x_NC, y_NC, scale_C)
    return normed(x_NC, weight_C, eps, y_NC.dtype)


def gate(up_gate_N2f: Tensor) -> Rows:
    """up * silu(gate) [N, f], rounded from float32."""
    up_Nf, gate_Nf = up_gate_N2f.float().chunk(2, dim=1)
    return operand(up_Nf * F.silu(gate_Nf))


def linear(x: Rows, product: Product) -> Tensor:
    """The product that defines it: sums in float32 of codes, scaled, the bias added, and rounded once."""
    weight: Rows = product.weight
    y_NM = x.codes_NK.float() @ weight.codes_NK.float().T
    return (y_NM * x.scale_N1 * weight.scale_N1.T + product.bias.float()).to(product.bias.dtype)


def scaled_linear(x: Rows, product: Product) -> Tensor:
    """The same on GPUs of compute capability 8.9 and up, by torch's GEMM with a scale a row and a column."""
    weight: Rows = product.weight
    return torch._scaled_mm(
        x.codes_NK,
        weight.codes_NK.T,
        scale_a=x.scale_N1,
        scale_b=weight.scale_N1.T,
        bias=product.bias,
        out_dtype=product.bias.dtype,
        use_fast_accum=True,
    )


NARROW = Forms(normed, add_normed, forms.turn, gate, operand, linear)
