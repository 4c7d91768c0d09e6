"""Ways to decode tiles with one decoder: what `decode_gpu.py` compares. Each is made ready once, then called.

Shape letters: B tiles of a call; y x latent rows and columns of a tile, Y X its pixels.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from h3dist.vae import VideoVae
from h3dist.vae.fast import FastDecoder

# Latents [B, 24, 7, y, x] to raw frames [B, 3, 28 or 22, Y, X], or to nothing where a way is but a part of the work.
Call = Callable[[Tensor], Tensor | None]
COMPILED_BATCHES = (1, 4, 8)
LARGE = 7  # tiles: 28 of a chunk at 1344x768 are four such batches, and its rows fill an H200's processors


@dataclass(frozen=True)
class Way:
    """One way: `make(vae, example)` gives the call for batches like the example [B, 24, 7, y, x]."""

    name: str
    batch: int
    make: Callable[[VideoVae, Tensor], Call]

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}"


def all_ways(batches: list[int], *, cuda: bool, compiled: bool, whole: bool) -> list[Way]:
    """The plain way first, then by how much they tell for their time; `whole`: the whole decoder compiled as well."""
    ways = [Way("eager", batch, eager) for batch in batches] + [Way("fast", batch, fast) for batch in batches]
    ways += [Way("eager without autocast", 1, without_autocast)]
    ways += [Way("fast, fp8", batch, partial(fast, gemm="fp8")) for batch in batches]
    if cuda:
        ways += [Way(f"fast, {kind} attention", LARGE, partial(fast, kind=kind)) for kind in ("flash", "cudnn")]
        ways += [Way("fast, CUDA graph", batch, fast_graphed) for batch in (1, LARGE)]
        ways += [Way("products alone", batch, products) for batch in batches]
        ways += [Way("attention alone", batch, attention) for batch in (1, LARGE)]
        ways += [Way(f"eager, {kind} attention", 1, partial(by_attention, kind)) for kind in ("flash", "cudnn")]
        ways += [Way("eager, CUDA graph", batch, graphed) for batch in (1, 4)]
    if compiled:
        ways += [Way("compiled blocks", batch, compiled_blocks) for batch in COMPILED_BATCHES]
        ways += [Way("compiled decoder", batch, compiled_decoder) for batch in COMPILED_BATCHES * whole]
    return ways


def chosen(ways: list[Way], pattern: str) -> list[Way]:
    """The plain way, and those whose name the pattern is found in."""
    return ways[:1] + [way for way in ways[1:] if re.search(pattern, str(way))]


def eager(vae: VideoVae, example: Tensor) -> Call:
    """diffusers' modules as they are, under autocast: what the product does with one tile."""
    decoder, first = vae.parts["decoder"], vae.parts["post_quant_conv"]

    def call(latents: Tensor) -> Tensor:
        with torch.no_grad(), autocast(vae):
            return decoder(first(latents.to(first.weight.dtype)))

    return call


def fast(vae: VideoVae, example: Tensor, kind: str | None = None, gemm: str = "exact") -> Call:
    """Our own forward of the same weights; `kind`: an attention kernel; `gemm`: exact or fp8 products."""
    return partial(FastDecoder.of(vae.parts, vae.device, gemm), attention=kind)


def fast_graphed(vae: VideoVae, example: Tensor) -> Call:
    """The same, recorded once and replayed."""
    return recorded(fast(vae, example), example)


def products(vae: VideoVae, example: Tensor) -> Call:
    """The matrix products of all layers and nothing else: what no way can be faster than."""
    decoder = FastDecoder.of(vae.parts, vae.device)
    rows = len(example) * (example[0, 0].numel() + decoder.decoder.num_register_tokens + 1)
    C, f = decoder.layers[0].down.weight.shape
    h_NC = decoder.layers[0].down.weight.new_empty(rows, C).normal_()
    gated_Nf = h_NC.new_empty(rows, f).normal_()

    def call(latents: Tensor) -> None:
        with torch.no_grad():
            for layer in decoder.layers:
                for part in (layer.qkv, layer.out, layer.up_gate):
                    F.linear(h_NC, *part)
                F.linear(gated_Nf, *layer.down)

    return call


def attention(vae: VideoVae, example: Tensor) -> Call:
    """The attention of all layers and nothing else."""
    decoder = FastDecoder.of(vae.parts, vae.device)
    rows, weight = example[0, 0].numel() + decoder.decoder.num_register_tokens + 1, decoder.layers[0].qkv.weight
    qkv = weight.new_empty(len(example), rows, 3, decoder.heads, weight.shape[1] // decoder.heads).normal_()
    q, k, v = qkv.permute(2, 0, 3, 1, 4)

    def call(latents: Tensor) -> None:
        with only("cudnn" if q.is_cuda else "any"):
            for _ in decoder.layers:
                F.scaled_dot_product_attention(q, k, v)

    return call


def without_autocast(vae: VideoVae, example: Tensor) -> Call:
    """The same modules with the same weights, as diffusers' pipelines call them."""
    decoder, first = vae.parts["decoder"], vae.parts["post_quant_conv"]

    def call(latents: Tensor) -> Tensor:
        with torch.no_grad():
            return decoder(first(latents.to(first.weight.dtype)))

    return call


def by_attention(kind: str, vae: VideoVae, example: Tensor) -> Call:
    """The plain way with one of torch's attention kernels alone allowed."""
    plain = eager(vae, example)

    def call(latents: Tensor) -> Tensor:
        with only(kind):
            return plain(latents)

    return call


def only(kind: str) -> AbstractContextManager[None]:
    """No attention kernel but "flash" or "cudnn"; any for "any"."""
    found = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return sdpa_kernel(found[kind]) if kind in found else nullcontext()


def graphed(vae: VideoVae, example: Tensor) -> Call:
    """The plain way, recorded once and replayed."""
    return recorded(eager(vae, example), example)


def recorded(plain: Call, example: Tensor) -> Call:
    """A call as a CUDA graph: what it gives is its own memory, overwritten by the next call."""
    held = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            plain(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = plain(held)

    def call(latents: Tensor) -> Tensor:
        held.copy_(latents)
        graph.replay()
        return given

    return call


def compiled_blocks(vae: VideoVae, example: Tensor) -> Call:
    """Each transformer block compiled, the code of one serving all."""
    torch._dynamo.reset()
    blocks = [torch.compile(block, dynamic=False) for block in vae.parts["decoder"].transformer_blocks]

    def call(latents: Tensor) -> Tensor:
        with torch.no_grad(), autocast(vae):
            return through_blocks(vae, blocks, latents)

    return call


def through_blocks(vae: VideoVae, blocks: list[Callable[..., Tensor]], latents: Tensor) -> Tensor:
    """The decoder with other blocks in it for the length of this call."""
    decoder, first = vae.parts["decoder"], vae.parts["post_quant_conv"]
    own = decoder.transformer_blocks
    decoder.transformer_blocks = torch.nn.ModuleList(blocks)
    try:
        return decoder(first(latents.to(first.weight.dtype)))
    finally:
        decoder.transformer_blocks = own


def compiled_decoder(vae: VideoVae, example: Tensor) -> Call:
    """The whole decoder compiled, all of its layers."""
    torch._dynamo.reset()
    decoder, first = torch.compile(vae.parts["decoder"], dynamic=False), vae.parts["post_quant_conv"]

    def call(latents: Tensor) -> Tensor:
        with torch.no_grad(), autocast(vae):
            return decoder(first(latents.to(first.weight.dtype)))

    return call


def autocast(vae: VideoVae, wanted: bool = True) -> torch.autocast:
    """As the product decodes; without the cache of casts, which a recorded call must not use."""
    enabled = wanted and vae.device.type == "cuda"
    return torch.autocast(vae.device.type, torch.float16, enabled=enabled, cache_enabled=False)
