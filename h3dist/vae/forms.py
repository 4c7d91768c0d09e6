"""What a block of the video VAE's decoder does around attention: products, and between them norms, rotation, gate.

These are the plain forms, in torch alone; `triton_forms` has the same in fewer passes over memory, and `narrow` those
of FP8 products. The sum of layers is float32 and so are all norms; what goes into a product is `dtype`, float16 on
CUDA.

Shape letters: N rows (tokens of all tiles of a call); C hidden; h heads; D head size; R rotated pairs of a head;
f feed-forward columns; K inputs of a product and M its outputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Turns(NamedTuple):
    """Cosine and sine [N, R] of every row's angles; the pairs are channels i and R + i of a head."""

    cos_NR: Tensor
    sin_NR: Tensor


class Rows(NamedTuple):
    """Rows as E4M3: codes [N, K], and f32 [N, 1], the power of two by which each row's codes are to be multiplied."""

    codes_NK: Tensor
    scale_N1: Tensor


Operand = Tensor | Rows  # [N, K], as a product takes it


class Product(NamedTuple):
    """A linear layer's weight [M, K] and bias [M]."""

    weight: Operand
    bias: Tensor


class Forms(NamedTuple):
    """One way to do all of it.

    normed(x_NC, weight_C, eps, dtype): its RMS norm. add_normed(x_NC, y_NC, scale_C, weight_C, eps): x += y * scale in
    place, then the RMS norm of the sum in y's dtype. turn(qkv_N3hD, turns, eps): queries and keys RMS-normed over the
    head and rotated, in place. gate(up_gate_N2f): up * silu(gate), [N, f]. operand(y_NC): attention's output for a
    product. linear(x_NK, product): [N, M] in the bias's dtype.
    """

    normed: Callable[[Tensor, Tensor, float, torch.dtype], Operand]
    add_normed: Callable[[Tensor, Tensor, Tensor, Tensor, float], Operand]
    turn: Callable[[Tensor, Turns, float], None]
    gate: Callable[[Tensor], Operand]
    operand: Callable[[Tensor], Operand]
    linear: Callable[[Operand, Product], Tensor]


def normed(x_NC: Tensor, weight_C: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The RMS norm of float32 rows."""
    return F.rms_norm(x_NC, weight_C.shape, weight_C, eps).to(dtype)


def add_scaled(x_NC: Tensor, y_NC: Tensor, scale_C: Tensor) -> None:
    """x += y * scale in place, in float32."""
    x_NC += y_NC * scale_C


def add_normed(x_NC: Tensor, y_NC: Tensor, scale_C: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """From the end of one half of a block to the beginning of the next."""
    add_scaled(x_NC, y_NC, scale_C)
    return normed(x_NC, weight_C, eps, y_NC.dtype)


def turn(qkv_N3hD: Tensor, turns: Turns, eps: float) -> None:
    """Queries and keys normed and rotated in place; values, and channels past the rotated ones, stay."""
    cos_N1R, sin_N1R = (table.unsqueeze(1) for table in turns)
    R, D = cos_N1R.shape[-1], qkv_N3hD.shape[-1]
    for x_NhD in qkv_N3hD[:, :2].unbind(1):
        first, second, rest = F.rms_norm(x_NhD.float(), (D,), eps=eps).to(x_NhD.dtype).split([R, R, D - 2 * R], -1)
        x_NhD[..., :R] = first * cos_N1R - second * sin_N1R
        x_NhD[..., R : 2 * R] = second * cos_N1R + first * sin_N1R
        x_NhD[..., 2 * R :] = rest


def gate(up_gate_N2f: Tensor) -> Tensor:
    """up * silu(gate), [N, f]."""
    up_Nf, gate_Nf = up_gate_N2f.chunk(2, dim=1)
    return up_Nf * F.silu(gate_Nf)


def operand(y_NC: Tensor) -> Tensor:
    """As it is."""
    return y_NC


def linear(x_NK: Tensor, product: Product) -> Tensor:
    """[N, M]."""
    return F.linear(x_NK, product.weight, product.bias)


PLAIN = Forms(normed, add_normed, turn, gate, operand, linear)
