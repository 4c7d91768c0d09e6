"""The exchange's own kernels on one device: what a rank packs and unpacks in a block, its peers not being there.

The exchange is the run's own, over a wire that gives tensors of the right sizes and moves nothing, so that its copies
and codes are all there is. They are held against a whole block at that rank's sizes.

Shape letters: S all rows; s own rows; p rows projected here to j heads; h heads attended to, n of them in a group;
D head size; C hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from kernel_times import Kernel, length, longest
from profiled import events_of, kernels_of, ranged, traced
from torch import Tensor

from h3dist.attention.backend import Attention
from h3dist.bench.steps import denoiser_of, random_weights
from h3dist.bench.timing import Clock
from h3dist.checkpoint.nvfp4 import Nvfp4Weight
from h3dist.checkpoint.tiles import code_shape, scale_shape
from h3dist.comm import Comm
from h3dist.comm.forms import Forms, Turn, choose_forms
from h3dist.comm.pieces import Pieces
from h3dist.comm.wire import Group, Wire
from h3dist.model.denoiser import Denoiser
from h3dist.model.exchange import Exchange
from h3dist.model.linear import Fp4Kernels, Fp4Linear
from h3dist.model.packed import PackedLinear
from h3dist.plan import Plan

WAYS = "heads/1,heads/4,hidden/4,heads/1/int8"
PACK, UNPACK, QUANTISE, DEQUANTISE = (f"alone.{part}" for part in ("pack", "unpack", "quantise", "dequantise"))
MOVES, TURNED = "alone.moves", "alone.turned"
REPEATS = 5
Within = Callable[[str, Callable[..., Any]], Callable[..., Any]]  # a call, in a range of that name


class Unwatched:
    """A board that nobody reads."""

    def begin(self, group: str, label: str) -> None:
        """No other rank is behind."""


class StillWire(Wire):
    """A wire to ranks that are not there. What comes has the right size, and values of the kind that was sent."""

    def __init__(self, group: Group, counted: dict[str, int]) -> None:
        super().__init__(group, counted)
        self._kept: dict[tuple[str, int], Tensor] = {}

    def settle(self, label: str) -> None:
        """Nothing is on its way."""

    def _came(self, label: str, x: Tensor, count: int) -> Tensor:
        """Flat, `count` elements, made once: to repeat them each time would count as the exchange's."""
        if (label, count) not in self._kept:
            self._kept[label, count] = x.flatten().repeat(-(-count // x.numel()))[:count].contiguous()
        return self._kept[label, count]

    def _gather(self, label: str, x: Tensor) -> Tensor:
        return self._came(label, x, self.group.size * x.numel()).view(self.group.size * x.shape[0], *x.shape[1:])

    def _start_gather(self, label: str, x: Tensor) -> Callable[[], Tensor]:
        return lambda: self._gather(label, x)

    def _exchange(self, label: str, x: Tensor, pieces: Pieces) -> Tensor:
        return self._came(label, x, sum(pieces.into))

    def _start(self, label: str, x: Tensor, pieces: Pieces, hold: bool) -> Callable[[], Tensor]:
        theirs = self._exchange(label, x, pieces)
        return lambda: theirs

    def _reduce(self, label: str, x: Tensor) -> Tensor:
        return x[: x.shape[0] // self.group.size]

    def _start_reduce(self, label: str, x: Tensor) -> Callable[[], Tensor]:
        return lambda: self._reduce(label, x)

    def _spread(self, label: str, x: Tensor) -> Tensor:
        return x


def still_comm(plan: Plan, rank: int, device: torch.device) -> Comm:
    """One rank of the plan's sequence group, without the others."""
    comm = Comm(rank, plan.layout, device)
    group = Group("sp", tuple(range(plan.layout.world)), rank, None, Unwatched(), 0.0)
    wire = StillWire(group, comm.counted)
    comm._tensors.update(request=wire, sp=wire)
    return comm


@dataclass
class StillAttention:
    """Attention whose output is there already, as it came of the first call with so many heads."""

    attention: Attention

    def __post_init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def __call__(self, q_SnD: Tensor, k_SnD: Tensor, v_SnD: Tensor) -> Tensor:
        heads = q_SnD.shape[1]
        if heads not in self._kept:
            self._kept[heads] = self.attention(q_SnD, k_SnD, v_SnD)
        return self._kept[heads]


def measure(plan: Plan, rank: int, device: torch.device, *, fused: bool) -> dict[str, Any]:
    """Milliseconds of a block, of the exchange's kernels in it, in all and by what they do, and the shares; the kernels
    by name.

    What turns q and k, by norm and rotation, counts as packing beyond what it takes where they lie, which any block has
    to do (`turn`), also where it makes codes of them. issued: the moves by the clock, in which the host may be what
    takes long; a step's host is ahead of the device.
    """
    clock, comm = Clock(device, REPEATS), still_comm(plan, rank, device)
    denoiser = denoiser_of(random_weights(plan, rank, device), plan, comm, fused=fused, reused=fused)
    weights = denoiser.weights
    x_sC = torch.randn((denoiser.own_rows, plan.dims.hidden), device=device, dtype=weights.dtype)
    stream = denoiser.stream(x_sC)
    block = 1000 * clock.time(lambda: denoiser.run_block(stream, 0, 0)).median
    moves, _ = moves_of(plan, rank, denoiser, denoiser.view.exchange)
    issued = 1000 * clock.time(moves).median
    within = settled(clock)
    exchange = comm.exchange(plan, Forms(*map(within, (UNPACK, QUANTISE, DEQUANTISE), choose_forms(fused))))
    moves, turn = moves_of(plan, rank, denoiser, exchange, within)
    moves, turn = within(MOVES, moves), within(TURNED, turn)
    profile = traced(lambda _: (moves(), turn()), clock, 1 + REPEATS)
    found = kernels_of(events_of(profile), device.type, (PACK, UNPACK, QUANTISE, DEQUANTISE, TURNED, MOVES))
    told = {"ranks": plan.layout.world, "rank": rank, "rows": denoiser.own_rows, "block": block, "issued": issued}
    told |= times(found, block)
    return told | {"kernels": longest([kernel for kernel in found if kernel.within != TURNED], REPEATS)}


def times(found: Sequence[Kernel], block: float) -> dict[str, Any]:
    """Milliseconds of REPEATS turns' kernels, each: the moves, and their parts; and each part's share of a block."""

    def spent(*parts: str) -> float:
        return length((kernel.start, kernel.stop) for kernel in found if kernel.within in parts) / 1000 / REPEATS

    turn, moves = spent(TURNED), spent(PACK, UNPACK, QUANTISE, DEQUANTISE, MOVES)
    parts = {"pack": spent(PACK) - turn, "unpack": spent(UNPACK), "quantise": spent(QUANTISE)}
    parts |= {"dequantise": spent(DEQUANTISE), "other": spent(MOVES)}
    shares = {part: time / block for part, time in parts.items()}
    return {"moves": moves, "turn": turn, "parts": parts, "shares": shares, "share": (moves - turn) / block}


def settled(clock: Clock) -> Within:
    """Puts a call in a range of the profiler that ends when the device is done: so kernels run in their host's range,
    also those whose launches the profiler missed. It costs the clock, not the kernels.
    """

    def within(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any) -> Any:
            result = call(*arguments)
            clock.settle()
            return result

        return ranged(name, done)

    return within


def moves_of(
    plan: Plan, rank: int, denoiser: Denoiser, exchange: Exchange, within: Within = ranged
) -> tuple[Callable[[], object], Callable[[], object]]:
    """What a block asks of the exchange, q, k and v as its product leaves them, attention standing still; and the norm
    and rotation of q and k alone, which the moves do on their way and which a block without moves does too.
    """
    share, weights = plan.shares[rank], denoiser.weights
    rows, heads = (stop - start for start, stop in (share.projected_rows, share.projected_heads))
    like = {"device": weights.device, "dtype": weights.dtype}
    x_sC = torch.randn((denoiser.own_rows, plan.dims.hidden), **like)
    q_pjD, k_pjD, v_pjD = torch.randn((rows, 3, heads, plan.dims.head_dim), **like).unbind(1)
    attention = StillAttention(denoiser.view.attention)
    bring = exchange.gather_projected if plan.exchange.rows == "plain" else packed(denoiser)
    block, view = weights.blocks[0], denoiser.view
    turn = view.elementwise.turn(block.q_norm, block.k_norm, view.rotation)
    turning = Turn(*(call and within(PACK, call) for call in turn))

    def moves() -> None:
        bring(x_sC)
        exchange.attend(q_pjD, k_pjD, v_pjD, attention, turning)

    return moves, lambda: turn.where_they_lie((q_pjD, k_pjD, v_pjD))


def packed(denoiser: Denoiser) -> Callable[[Tensor], object]:
    """The gather of packed rows up to their product, whose kernels of quantising and multiplying stand still."""
    weight, exchange = denoiser.weights.blocks[0].qkv, denoiser.view.exchange
    assert isinstance(weight, Nvfp4Weight), "random weights are NVFP4"
    weight = replace(weight, input_scale=torch.ones((), device=denoiser.weights.device))
    kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def quantise(x_MK: Tensor, scale: Tensor, pad_16x: bool) -> tuple[Tensor, Tensor]:
        shape = tuple(x_MK.shape)
        if shape not in kept:
            empty = {"device": x_MK.device, "dtype": torch.uint8}
            kept[shape] = torch.empty(code_shape(shape), **empty), torch.empty(scale_shape(shape), **empty)
        return kept[shape]

    def multiply(codes: Tensor, *_: Tensor, out_dtype: torch.dtype, **scales: Tensor) -> Tensor:
        return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=out_dtype)

    linear = PackedLinear(Fp4Linear(exchange, Fp4Kernels(quantise, multiply)))
    return lambda x_sC: linear(linear.gather(x_sC, weight, exchange.gather_projected), weight)


def tell(found: Mapping[str, Any]) -> None:
    """Prints one rank of a way, and its longest kernels."""
    if found["failed"]:
        print(f"{found['way']}: failed: {found['failed']}", flush=True)
        return
    who = f"{found['way']:<14} rank {found['rank']} of {found['ranks']}, {found['rows']} rows"
    moves = f"block {found['block']:.3f} ms, moves {found['moves']:.3f} ms, {found['turn']:.3f} of it turning"
    print(f"{who:<42}{moves}; the rest {found['share']:.2%} (issued in {found['issued']:.3f} ms)")
    parts = (f"{part} {time:.3f} ms {found['shares'][part]:.2%}" for part, time in found["parts"].items())
    print("  " + ", ".join(parts))
    for row in found["kernels"][:6]:
        print(f"  {row['calls']:>8.2f}{row['ms']:>10.4f}  {row['name']}", flush=True)
