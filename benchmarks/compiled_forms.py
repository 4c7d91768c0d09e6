"""A block as torch.compile can take it: the work between products as functions without `out=`, what it must not look
into as operators of their own. For trials of compilation; nothing of a run comes this way.

Each row's row of the modulation table is given as a tensor of indices, in the place of runs of rows: one kernel then
does all rows.

Shape letters as in `h3dist.model.elementwise`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.attention.backend import Attention
from h3dist.checkpoint.formats import Weight
from h3dist.checkpoint.nvfp4 import Nvfp4Weight
from h3dist.comm.forms import Kinds, Turn
from h3dist.comm.pieces import Places
from h3dist.model.block import View
from h3dist.model.dense import Linear
from h3dist.model.elementwise import FACTOR, NORM_EPS, SHIFT, Elementwise
from h3dist.model.exchange import Alone
from h3dist.model.fused import pairs_of
from h3dist.model.reused import plain_fill, triton_fill
from h3dist.model.rotary import Rotation

Compile = Callable[[Callable[..., object]], Callable[..., object]]


def modulated(x_sC: Tensor, norm_C: Tensor, table_RnC: Tensor, pairs_s: Tensor) -> Tensor:
    """rms_norm(x) * factor + shift, [s, C]."""
    h_sC = F.rms_norm(x_sC, norm_C.shape, norm_C, NORM_EPS)
    return torch.addcmul(table_RnC[pairs_s, SHIFT], h_sC, table_RnC[pairs_s, FACTOR])


def add_gated(x_sC: Tensor, y_sC: Tensor, gates_RC: Tensor, pairs_s: Tensor) -> None:
    """x += gate * y in place."""
    x_sC.addcmul_(y_sC, gates_RC[pairs_s])


def add_modulated(
    x_sC: Tensor, y_sC: Tensor, gates_RC: Tensor, norm_C: Tensor, table_RnC: Tensor, pairs_s: Tensor
) -> Tensor:
    """From the end of one half of a block to the beginning of the next."""
    add_gated(x_sC, y_sC, gates_RC, pairs_s)
    return modulated(x_sC, norm_C, table_RnC, pairs_s)


def turn(q_norm_D: Tensor, k_norm_D: Tensor, angles: Rotation, turned: Callable[..., Tensor] | None = None) -> Turn:
    """q and k normed over the head and rotated, where they lie; one rank has no packets."""

    def lay(heads: Kinds, places: Places, packet: Tensor | None) -> None:
        assert packet is None
        for x_pjD, norm_D in zip(heads, (q_norm_D, k_norm_D), strict=False):
            x_pjD.copy_((turned or _turned)(x_pjD, norm_D, angles))

    return Turn(lay)


def _turned(x_pjD: Tensor, norm_D: Tensor, angles: Rotation) -> Tensor:
    half = angles.cos.shape[-1]
    x_pjD = F.rms_norm(x_pjD, norm_D.shape, norm_D, NORM_EPS)
    first, second, rest = x_pjD.split((half, half, x_pjD.shape[-1] - 2 * half), dim=-1)
    turned_first = first * angles.cos - second * angles.sin
    return torch.cat((turned_first, second * angles.cos + first * angles.sin, rest), dim=-1)


def activated(gate_up_g2f: Tensor) -> Tensor:
    """silu(gate) * up, [g, f]."""
    gate_gf, up_gf = gate_up_g2f.chunk(2, dim=1)
    return F.silu(gate_gf) * up_gf


FORMS = Elementwise(lambda rotation: rotation, modulated, add_modulated, add_gated, turn, activated)


def compiled_between(view: View, rows: int, device: torch.device, compiler: Compile) -> View:
    """The view with each function between products compiled alone."""
    names = ("modulate", "add_modulate", "add", "activate")
    forms = FORMS._replace(**{name: compiler(getattr(FORMS, name)) for name in names})
    forms = forms._replace(turn=partial(turn, turned=compiler(_turned)))
    return replace(view, runs=pairs_of(view.runs, rows, device).long(), elementwise=forms)


def compilable(view: View, rows: int, device: torch.device) -> View:
    """The view of one rank with which a whole block is one graph."""
    pairs_s, name = pairs_of(view.runs, rows, device).long(), f"attention_{rows}_{device.type}"
    ways = {"linear": opaque_linear(), "attention": opaque_attention(view.attention, name)}
    return replace(view, runs=pairs_s, elementwise=FORMS, exchange=Alone(), **ways)


def opaque_linear() -> Linear:
    """The plain product with the making of a dense NVFP4 weight as one operator, on CUDA by the fused path's kernel."""

    @torch.library.custom_op("h3dist_compiled::dense", mutates_args=())
    def dense(codes: Tensor, scales: Tensor, global_scale: Tensor, N: int, K: int, dtype: torch.dtype) -> Tensor:
        fill = triton_fill() if codes.is_cuda else plain_fill
        dense_NK = torch.empty((N, K), dtype=dtype, device=codes.device)
        fill(Nvfp4Weight(codes, scales, global_scale, (N, K)), dense_NK)
        return dense_NK

    @dense.register_fake
    def _(codes, scales, global_scale, N, K, dtype):  # noqa: ANN001, ANN202 (torch calls it)
        return codes.new_empty((N, K), dtype=dtype)

    def linear(x_MK: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, Nvfp4Weight)
        return F.linear(x_MK, dense(weight.codes, weight.scales, weight.global_scale, *weight.shape, x_MK.dtype))

    return linear


def opaque_attention(attention: Attention, name: str) -> Attention:
    """The attention as one operator, `name` being its own alone."""

    @torch.library.custom_op(f"h3dist_compiled::{name}", mutates_args=())
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v).contiguous()

    @attend.register_fake
    def _(q, k, v):  # noqa: ANN001, ANN202 (torch calls it)
        return q.new_empty(q.shape)

    return attend
