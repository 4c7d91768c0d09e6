"""Three-axis rotary embedding over the (t, h, w) positions of the packed sequence.

Shape letters: g rows, h heads, D head size, F frequencies an axis, R = 3F angles a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """cos and sin of every row's angles, each [g, 1, R] to broadcast over heads."""

    cos: Tensor
    sin: Tensor


def rotation(position_ids_g3: Tensor, inv_freq_F: Tensor, dtype: torch.dtype) -> Rotation:
    """Angles position * inv_freq in float32, [t | h | w] side by side; cos and sin then cast to `dtype`.

    Positions arrive in float64 and are rounded to float32 once, on the device of inv_freq.
    """
    positions = position_ids_g3.to(torch.float32).to(inv_freq_F.device)
    angles_gR = (positions[:, :, None] * inv_freq_F).flatten(1)
    return Rotation(angles_gR.cos().to(dtype)[:, None], angles_gR.sin().to(dtype)[:, None])


def rotate(x_ghD: Tensor, angles: Rotation, out: Tensor | None = None) -> Tensor:
    """Rotate the leading 2R channels of every head, channel d paired with d + R; the others pass.

    y_d = x_d cos - x_{d+R} sin and y_{d+R} = x_{d+R} cos + x_d sin. `out`, if given, takes the result; it must not
    share memory with x.
    """
    half = angles.cos.shape[-1]
    first, second = x_ghD[..., :half], x_ghD[..., half : 2 * half]
    y_ghD = torch.empty_like(x_ghD) if out is None else out
    torch.mul(first, angles.cos, out=y_ghD[..., :half]).addcmul_(second, angles.sin, value=-1)
    torch.mul(second, angles.cos, out=y_ghD[..., half : 2 * half]).addcmul_(first, angles.sin)
    y_ghD[..., 2 * half :] = x_ghD[..., 2 * half :]
    return y_ghD
