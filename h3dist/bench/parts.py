"""What a step is made of, each part timed alone at one rank's sizes: products, attention, making weights dense,
memory-bound work, the exchange, the host.

Shape letters: S all rows; s own rows, g rows of the tp group; H heads held, h attended to; D head size; C hidden;
f feed-forward columns held; M rows, K inputs, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.attending import task_of
from h3dist.attention.backend import Attention, Backend, Task
from h3dist.attention.check import compare
from h3dist.bench.timing import Clock
from h3dist.checkpoint.formats import Weight
from h3dist.comm.forms import Turn
from h3dist.model.block import run_block
from h3dist.model.denoiser import Denoiser
from h3dist.model.elementwise import PLAIN, Elementwise
from h3dist.model.exchange import Product, whole_product
from h3dist.model.linear import dense_linear
from h3dist.model.narrow import narrow_linear, narrowed
from h3dist.model.residual import Residual
from h3dist.model.weights import BlockWeights
from h3dist.plan import Plan, Share
from h3dist.plan.cost import attention_flops, dequantised_bytes, elementwise_bytes, product_flops
from h3dist.plan.weights import LINEARS, linear_shapes

COPIED = 1 << 30  # bytes, of which a copy reads and writes as many
ISSUED = 8  # blocks given to a device at once: fewer launches than its queue holds
LINEAR_FIELDS = dict(zip(LINEARS, ("qkv", "out", "fc1", "fc2"), strict=True))


@dataclass(frozen=True)
class Bench:
    """One rank's denoiser on random weights, ready to be taken apart."""

    plan: Plan
    share: Share
    denoiser: Denoiser
    clock: Clock

    @property
    def device(self) -> torch.device:
        return self.clock.device

    @property
    def dtype(self) -> torch.dtype:
        return self.denoiser.weights.dtype

    @property
    def block(self) -> BlockWeights:
        return self.denoiser.weights.blocks[0]

    @property
    def task(self) -> Task:
        """What the plan asks of attention."""
        return task_of(self.plan, self.share.rank, self.device)

    @property
    def group(self) -> int:
        """Rows of the tp group."""
        return self.share.group_rows[1] - self.share.group_rows[0]

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in the compute dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def products(bench: Bench) -> dict[str, Any]:
    """A block's four linears with dense weights: seconds, FLOP and FLOP/s of each and in all."""
    held = bench.share.tp_heads[1] - bench.share.tp_heads[0], bench.share.ffn[1] - bench.share.ffn[0]
    found: dict[str, Any] = {}
    for name, (N, K) in linear_shapes(bench.plan.dims, *held).items():
        x_MK, weight_NK = bench.normal(bench.group, K), bench.normal(N, K)
        found[name] = _rated(_both(bench, partial(F.linear, x_MK, weight_NK)), 2.0 * bench.group * N * K)
    return found | {"all": _sum(found, product_flops(bench.plan, bench.share) / bench.plan.dims.layers)}


def narrow_products(bench: Bench, gemm: str) -> dict[str, Any]:
    """The same linears in FP8 or int8, rounding of the activations included."""
    linear, found = narrow_linear(gemm, cuda=bench.device.type == "cuda"), {}
    for name, weight in _linears(bench.block):
        small, x_MK = narrowed(weight, gemm, bench.dtype), bench.normal(bench.group, weight.shape[1])
        timing = bench.clock.time(lambda x=x_MK, w=small: linear(x, w))
        found[name] = _rated(timing.as_dict(), 2.0 * bench.group * weight.shape[0] * weight.shape[1])
    return found | {"all": _sum(found, product_flops(bench.plan, bench.share) / bench.plan.dims.layers)}


def fp4_products(bench: Bench) -> dict[str, Any]:
    """The same linears as the run computes them in FP4, quantisation and agreement included."""
    linear, found = bench.denoiser.view.linear, {}
    assert linear is not dense_linear, "the plan has no FP4 products"
    for name, weight in _linears(bench.block):
        x_MK = bench.normal(bench.group, weight.shape[1])
        timing = bench.clock.time(lambda x=x_MK, w=weight: linear(x, w))
        found[name] = _rated(timing.as_dict(), 2.0 * bench.group * weight.shape[0] * weight.shape[1])
    return found | {"all": _sum(found, product_flops(bench.plan, bench.share) / bench.plan.dims.layers)}


def attention(bench: Bench, backend: Backend) -> dict[str, Any]:
    """One block's attention by a backend, all rows and this rank's heads; how far from exact on normal numbers.

    `kernel`: what its probe found, if it has one.
    """
    found = backend.probe(bench.task)
    call = backend.build(bench.task, found)
    shape = (bench.plan.rows, bench.task.heads, bench.task.head_dim)
    q_ShD, k_ShD, v_ShD = (bench.normal(*shape) for _ in range(3))
    _, finding = compare(call, q_ShD, k_ShD, v_ShD, backend.bound or float("inf"))
    timing = _both(bench, partial(call, q_ShD, k_ShD, v_ShD))
    told = {"exact": backend.exact, "kernel": found, "error": finding.error, "wrong": finding.wrong}
    return _rated(timing, attention_flops(bench.plan, bench.share) / bench.plan.dims.layers) | told


def dequantise(bench: Bench) -> dict[str, Any]:
    """A block's four weights made dense, one after the other."""
    weights = [weight for _, weight in _linears(bench.block)]

    def work() -> None:
        for weight in weights:
            weight.dense(bench.dtype)

    plan = replace(bench.plan, fp4=0)
    return _moved(bench.clock.time(work).as_dict(), dequantised_bytes(plan, bench.share) / plan.dims.layers)


class Still:
    """An exchange that gives tensors of the right shapes and moves nothing."""

    def __init__(self, bench: Bench) -> None:
        own = bench.share.rows[1] - bench.share.rows[0]
        self._group = bench.normal(bench.group, bench.plan.dims.hidden)
        self._own = bench.normal(own, bench.plan.dims.hidden)

    def gather_rows(self, x_sC: Tensor) -> Tensor:
        return self._group

    def reduce_rows(self, partial_gC: Tensor) -> Tensor:
        return self._own

    def gather_projected(self, x_sC: Tensor) -> Tensor:
        return self._group

    def project(self, x_sC: Tensor, width: int, product: Product) -> Tensor:
        return whole_product(self._group, width, product)

    def column_spans(self, width: int) -> tuple[tuple[int, int], ...]:
        return ((0, width),)

    def attend(self, q_gHD: Tensor, k_gHD: Tensor, v_gHD: Tensor, attention: Attention, turn: Turn) -> Tensor:
        turn.where_they_lie((q_gHD, k_gHD, v_gHD))
        return attention(q_gHD, k_gHD, v_gHD)

    def amax(self, x: Tensor) -> Tensor:
        return x

    def gather_outputs(self, out_sO: Tensor) -> Tensor:
        return out_sO


def elementwise(bench: Bench, way: Elementwise = PLAIN) -> dict[str, Any]:
    """A block with its products, attention and exchange taken out: norms, modulation, rotation, gates."""
    results = {weight.shape: bench.normal(bench.group, weight.shape[0]) for _, weight in _linears(bench.block)}

    def linear(x_MK: Tensor, weight: Weight) -> Tensor:
        return results[weight.shape]

    held = bench.share.tp_heads[1] - bench.share.tp_heads[0]
    out = bench.normal(bench.group, held, bench.plan.dims.head_dim)
    still = {"linear": linear, "attention": lambda q, k, v: out, "exchange": Still(bench)}
    rotation = way.prepare(bench.denoiser.view.rotation)
    view = replace(bench.denoiser.view, **still, elementwise=way, rotation=rotation)
    x_sC = bench.normal(bench.share.rows[1] - bench.share.rows[0], bench.plan.dims.hidden)
    table = bench.denoiser.modulation.blocks[0][0]
    stream = Residual(x_sC, view.runs, way)
    timing = bench.clock.time(lambda: run_block(stream, bench.block, table, view))
    return _moved(timing.as_dict(), elementwise_bytes(bench.plan, bench.share) / bench.plan.dims.layers)


def copy(bench: Bench) -> dict[str, Any]:
    """A plain copy, for the memory's bandwidth."""
    size = COPIED if bench.device.type == "cuda" else COPIED >> 6
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return _moved(bench.clock.time(lambda: target.copy_(source)).as_dict(), 2.0 * size)


def host(bench: Bench) -> dict[str, Any]:
    """What the host takes to start one block, the device's queue being empty."""
    blocks = min(ISSUED, bench.plan.dims.layers)
    stream = bench.denoiser.stream(bench.normal(bench.share.rows[1] - bench.share.rows[0], bench.plan.dims.hidden))

    def work() -> None:
        for block in range(blocks):
            bench.denoiser.run_block(stream, block, 0)

    timing = bench.clock.host_time(work)
    return {name: value / blocks for name, value in timing.as_dict().items() if name != "repeats"} | {
        "repeats": len(timing.seconds)
    }


def exchange(bench: Bench) -> dict[str, Any]:
    """A block's moves between ranks, by collective; every rank must call it."""
    moves, dims, share = bench.denoiser.view.exchange, bench.plan.dims, bench.share
    held, heads = share.tp_heads[1] - share.tp_heads[0], share.heads[1] - share.heads[0]
    x_sC = bench.normal(share.rows[1] - share.rows[0], dims.hidden)
    x_gC = bench.normal(bench.group, dims.hidden)
    q_gHD, k_gHD, v_gHD = (bench.normal(bench.group, held, dims.head_dim) for _ in range(3))
    o_ShD = bench.normal(bench.plan.rows, heads, dims.head_dim)
    work = {
        "rows.gather": lambda: moves.gather_rows(x_sC),
        "rows.reduce": lambda: moves.reduce_rows(x_gC),
        "heads.to": lambda: moves.to_heads(q_gHD, k_gHD, v_gHD),
        "heads.from": lambda: moves.to_rows(o_ShD),
        "amax": lambda: moves.amax(x_sC),
    }
    times = {"rows.gather": 2, "rows.reduce": 2, "amax": 4}
    skipped = {"rows.gather", "rows.reduce"} if bench.plan.layout.tp == 1 else set()
    skipped |= {"heads.to", "heads.from"} if bench.plan.layout.sp == 1 else set()
    found: dict[str, Any] = {}
    for label in (label for label in work if label not in skipped):
        sent = share.sent[label] / (bench.plan.steps * dims.layers * times.get(label, 1))
        found[label] = _moved(bench.clock.time(work[label]).as_dict(), sent)
    return found


def _both(bench: Bench, work: Callable[[], object]) -> dict[str, Any]:
    """Alone in short bursts, and in a device that has been busy with it."""
    timing = bench.clock.time(work)
    return timing.as_dict(steady=bench.clock.steady(work, timing.median))


def _linears(block: BlockWeights) -> Iterator[tuple[str, Weight]]:
    for name, field in LINEAR_FIELDS.items():
        yield name, getattr(block, field)


def _rated(timing: dict[str, Any], flops: float) -> dict[str, Any]:
    return timing | {"flop": flops, "flop_per_second": flops / timing["seconds"]}


def _moved(timing: dict[str, Any], count: float) -> dict[str, Any]:
    return timing | {"bytes": count, "bytes_per_second": count / timing["seconds"]}


def _sum(found: dict[str, Any], flops: float) -> dict[str, Any]:
    told = {key: sum(part[key] for part in found.values()) for key in ("seconds", "steady") if _all_have(found, key)}
    return told | {"flop": flops, "flop_per_second": flops / told["seconds"]}


def _all_have(found: dict[str, Any], key: str) -> bool:
    return all(key in part for part in found.values())
