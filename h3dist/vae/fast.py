"""The video VAE's decoder for several tiles a call: what diffusers' modules compute, in fewer and larger steps.

Their weights are used as they are, or rounded (`narrow`). Queries, keys and values are one product; between products
all is one kernel (`forms`); the sum of layers is float32, and what goes into a product the weights' dtype, as under
autocast.

Shape letters: B tiles of a call; t y x latent frames, rows and columns of a tile; L its tokens, with the registers
behind them; N = B L rows; C hidden; h heads; D head size; f feed-forward columns; p pixels of a latent's side.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3dist.attention.flash4 import PACKAGE
from h3dist.attention.sdpa import KERNELS
from h3dist.tiles import HEAD, RAW_FRAMES, TAIL
from h3dist.vae.choice import forms_for
from h3dist.vae.forms import Forms, Product, Turns, add_scaled
from h3dist.vae.narrow import narrowed

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v and o, each [B, L, h, D]


class Layer(NamedTuple):
    """A transformer block's tensors; norms and scales float32 [C]."""

    norm1: Tensor
    qkv: Product  # [3C, C]
    out: Product
    scale1: Tensor
    norm2: Tensor
    up_gate: Product  # [2f, C]
    down: Product
    scale2: Tensor


@dataclass(frozen=True)
class FastDecoder:
    """post_quant_conv and decoder of one VAE, for calls of any number of tiles."""

    first: nn.Conv3d
    decoder: nn.Module
    layers: tuple[Layer, ...]
    heads: int
    forms: Forms
    eps: float

    @classmethod
    def of(
        cls, parts: nn.ModuleDict, device: torch.device, gemm: str = "exact", *, taken: bool = False
    ) -> "FastDecoder":
        """From diffusers' modules on `device`, whose projections to queries, keys and values become views of one
        tensor each; `gemm` is exact or fp8.

        `taken`: their blocks leave `parts` one by one, so that rounded weights stand in the place of theirs and not
        beside. Raises MissingDependency where CUDA lacks triton.
        """
        decoder, forms = parts["decoder"], forms_for(device, gemm)
        blocks = decoder.transformer_blocks
        attn = blocks[0].attn
        made = (_layer(block) for block in (_emptied(blocks) if taken else blocks))
        layers = tuple(_narrowed(layer) if gemm == "fp8" else layer for layer in made)
        return cls(parts["post_quant_conv"], decoder, layers, attn.heads, forms, attn.norm_q.eps)

    @torch.no_grad()
    def __call__(self, latents: Tensor, attention: str | None = None) -> Tensor:
        """Raw frames [B, 3, 22, Y, X] of the restored latents [B, 24, 7, y, x]: the chunk's 17 and the 5 of its tail.

        `attention`: the one kernel to take, of torch's or "flash4", instead of the first of torch's that applies.
        Raises MissingDependency where flash-attn-4 is not there.
        """
        x_NC, L = self._tokens(latents)
        turns = self._turns(latents.shape, L, latents.device)
        attend = _by_flash4() if attention == "flash4" else _by_torch
        with _kernels(latents.device, attention):
            self._blocks(x_NC, turns, L, attend)
        return self._frames(x_NC.view(-1, L, x_NC.shape[1]), latents.shape)

    def _tokens(self, latents: Tensor) -> tuple[Tensor, int]:
        """The float32 rows that the first block takes, and how many a tile has: registers and a zero follow each."""
        decoder, first = self.decoder, self.first
        channels = latents.shape[1]
        latents_BLc = latents.to(first.weight.dtype).flatten(2).transpose(1, 2)
        latents_BLc = F.linear(latents_BLc, first.weight.view(-1, channels), first.bias)
        x_BLC = F.linear(latents_BLc, decoder.proj_in.weight, decoder.proj_in.bias)
        registers = decoder.register_tokens.expand(len(latents), -1, -1).to(x_BLC.dtype)
        x_BLC = torch.cat([x_BLC, registers, torch.zeros_like(x_BLC[:, :1])], dim=1)
        return x_BLC.float().flatten(0, 1), x_BLC.shape[1]

    def _turns(self, shape: torch.Size, L: int, device: torch.device) -> Turns:
        """The angles of every row: a tile spans [-1, 1) along each axis; registers lie at 0."""
        axes = [2.0 * ((torch.arange(size, device=device) + 0.5) / size) - 1.0 for size in shape[2:]]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)
        places = F.pad(places, (0, 0, 0, L - len(places)))
        dtype = self.decoder.proj_out.weight.dtype
        tables = (table[0, :, 0].chunk(2, dim=-1)[0].to(dtype) for table in self.decoder.rope(places[None]))
        return Turns(*(table.repeat(shape[0], 1) for table in tables))

    def _blocks(self, x_NC: Tensor, turns: Turns, L: int, attend: Attend) -> None:
        """All layers; x_NC is their sum, in place."""
        forms, eps, linear = self.forms, self.eps, self.forms.linear
        h = forms.normed(x_NC, self.layers[0].norm1, eps, self.layers[0].qkv.bias.dtype)
        for layer, after in pairwise((*self.layers, None)):
            y_NC = self._attend(linear(h, layer.qkv), turns, L, attend)
            h = forms.add_normed(x_NC, linear(forms.operand(y_NC), layer.out), layer.scale1, layer.norm2, eps)
            y_NC = linear(forms.gate(linear(h, layer.up_gate)), layer.down)
            if after:
                h = forms.add_normed(x_NC, y_NC, layer.scale2, after.norm1, eps)
            else:
                add_scaled(x_NC, y_NC, layer.scale2)

    def _attend(self, qkv_N3C: Tensor, turns: Turns, L: int, attend: Attend) -> Tensor:
        """Every token to all tokens of its tile, [N, C]."""
        qkv_N3hD = qkv_N3C.view(len(qkv_N3C), 3, self.heads, -1)
        self.forms.turn(qkv_N3hD, turns, self.eps)
        q_BLhD, k_BLhD, v_BLhD = qkv_N3hD.unflatten(0, (-1, L)).unbind(2)
        return attend(q_BLhD, k_BLhD, v_BLhD).reshape(len(qkv_N3C), -1)

    def _frames(self, x_BLC: Tensor, shape: torch.Size) -> Tensor:
        """Normed, projected to pixels, and every token's block put in its place."""
        decoder = self.decoder
        B, _, t, y, x = shape
        h_BLC = decoder.norm_out(x_BLC[:, : t * y * x]).to(decoder.proj_out.weight.dtype)
        blocks = F.linear(h_BLC, decoder.proj_out.weight, decoder.proj_out.bias)
        blocks = blocks.view(B, t, y, x, decoder.out_channels, RAW_FRAMES, decoder.patch_size, decoder.patch_size)
        raw = blocks.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return torch.cat([raw[:, :, HEAD], raw[:, :, TAIL]], dim=2)


def _layer(block: nn.Module) -> Layer:
    attn, up_gate, down = block.attn, block.ff.net[0].proj, block.ff.net[2]
    return Layer(
        block.norm1.weight,
        _joined([attn.to_q, attn.to_k, attn.to_v]),
        _product(attn.to_out[0]),
        block.scale1,
        block.norm2.weight,
        _product(up_gate),
        _product(down),
        block.scale2,
    )


def _narrowed(layer: Layer) -> Layer:
    return Layer(*(narrowed(part) if isinstance(part, Product) else part for part in layer))


def _emptied(blocks: nn.ModuleList) -> Iterator[nn.Module]:
    while len(blocks):
        yield blocks.pop(0)


def _product(linear: nn.Linear) -> Product:
    return Product(linear.weight, linear.bias)


def _joined(linears: list[nn.Linear]) -> Product:
    """One product of several, which keep views of it, so that no weight is held twice."""
    joined = Product(torch.cat([linear.weight for linear in linears]), torch.cat([linear.bias for linear in linears]))
    for linear, weight, bias in zip(
        linears, joined.weight.chunk(len(linears)), joined.bias.chunk(len(linears)), strict=True
    ):
        linear.weight, linear.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)
    return joined


def _by_torch(q_BLhD: Tensor, k_BLhD: Tensor, v_BLhD: Tensor) -> Tensor:
    q_BhLD, k_BhLD, v_BhLD = (x.transpose(1, 2) for x in (q_BLhD, k_BLhD, v_BLhD))
    return F.scaled_dot_product_attention(q_BhLD, k_BhLD, v_BhLD).transpose(1, 2)


def _by_flash4() -> Attend:
    flash = PACKAGE.load()
    return lambda q_BLhD, k_BLhD, v_BLhD: flash(q_BLhD, k_BLhD, v_BLhD)[0]


def _kernels(device: torch.device, only: str | None) -> AbstractContextManager[None]:
    """torch's attention kernels on CUDA: `only` one, or the first that applies."""
    if device.type != "cuda":
        return nullcontext()
    order = [KERNELS[only]] if only in KERNELS else [*KERNELS.values(), SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
