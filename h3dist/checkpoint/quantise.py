"""Quantises a matrix in float32, the way that Comfy's files were made; for making small checkpoints.

Shapes: N rows, K columns, B blocks of 16 columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from h3dist.checkpoint.nvfp4 import swizzle
from h3dist.checkpoint.tiles import BLOCK, PACK_ROWS, PAIR, ceil_to

E2M1_MAX = 6.0
E4M3_MAX = 448.0
# halves between neighbouring 4-bit magnitudes; a value on one goes to the neighbour whose code is even
TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
TIES_UP = (0.75, 1.75, 3.5)
SIGN_SHIFT = 3


def to_nvfp4(weight_NK: Tensor) -> dict[str, Tensor]:
    """The tensors of an NVFP4 layer by name: `weight`, `weight_scale`, `weight_scale_2`.

    global = max|W| / (448 * 6); block scale = E4M3(max|block| / 6 / global); code = nearest E2M1 of W / both,
    ties to even; blocks of zeros give zeros (Comfy checkpoint format).
    """
    rows, cols = weight_NK.shape
    padded = pad(weight_NK.float(), (0, ceil_to(cols, BLOCK) - cols, 0, ceil_to(rows, PACK_ROWS) - rows))
    blocks = padded.view(padded.shape[0], -1, BLOCK)  # [N, B, 16]
    total = blocks.abs().amax() / (E4M3_MAX * E2M1_MAX)
    scale_NB = (blocks.abs().amax(dim=-1) / E2M1_MAX / total).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = (total * scale_NB.float())[..., None]
    codes = e2m1_codes(torch.where(step == 0, 0.0, blocks / step)).view(padded.shape[0], -1, PAIR)
    return {
        "weight": codes[..., 0] << 4 | codes[..., 1],
        "weight_scale": swizzle(scale_NB.view(torch.uint8)).view(torch.float8_e4m3fn),
        "weight_scale_2": total,
    }


def e2m1_codes(values: Tensor) -> Tensor:
    """The 4-bit code, as uint8, of the nearest E2M1 value; beyond 6 it is 6."""
    size, codes = values.abs(), torch.zeros_like(values, dtype=torch.uint8)
    for edge in TIES_DOWN:
        codes += size > edge
    for edge in TIES_UP:
        codes += size >= edge
    return codes | values.signbit().to(torch.uint8) << SIGN_SHIFT


def to_int8(weight_NK: Tensor) -> dict[str, Tensor]:
    """The tensors of an `int8_tensorwise` layer: `weight` and one `weight_scale` = max|row| / 127 a row."""
    scale = weight_NK.float().abs().amax(dim=1, keepdim=True) / 127
    codes = (weight_NK.float() / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}
