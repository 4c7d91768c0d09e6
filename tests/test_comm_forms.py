"""How pieces are taken off the wire and coded: the kernels against the plain forms, to the bit.

Kernels run on a GPU, or on a CPU by the interpreter of Triton, where it is installed and TRITON_INTERPRET=1 is set;
the rest runs anywhere.
"""

import importlib.util
import os
from collections.abc import Sequence

import pytest
import torch
from test_exchange_variants import Whole, attended, plan_of
from torch import Tensor
from world import World

from h3dist.comm.forms import PLAIN, TINY, choose_forms, coded_count, piece_shape, triton_forms
from h3dist.comm.pieces import Place, Places
from h3dist.errors import MissingDependency
from h3dist.plan import ExchangePlan, Layout, Span

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.bfloat16]
BY_HEADS = [((0, 37), span) for span in ((1, 4), (4, 4), (6, 8))]  # one piece of no heads
BY_ROWS = [(span, (0, 3)) for span in ((0, 33), (33, 37), (37, 37))]  # one of no rows
CUTS = [BY_HEADS, BY_ROWS, [((0, 1), (0, 1))], [((5, 5), (0, 2))], [((3, 35), (2, 7))]]


def places_of(cuts: Sequence[tuple[Span, Span]], kinds: Sequence[Tensor], *, coded: bool, at: int = 0) -> Places:
    """Pieces end to end from element `at` of a packet, and behind them a place of nothing, at the packet's end."""
    found = []
    for rows, heads in cuts:
        found.append(Place(at, rows, heads))
        shape = piece_shape(found[-1], kinds)
        at += coded_count(shape) if coded else torch.Size(shape).numel()
    return (*found, Place(at, (0, 0), (0, 0)))


def kinds_of(number: int, D: int, dtype: torch.dtype, device: str, rows: int = 37, heads: int = 8) -> list[Tensor]:
    """Views of one tensor, as a product leaves them, with sizes of every kind from row to row and head to head."""
    generator = torch.Generator().manual_seed(number + D)
    x = torch.randn(rows, number, heads, D, generator=generator)
    x *= torch.logspace(-3, 3, rows)[:, None, None, None] * torch.logspace(0, 2, heads)[:, None]
    return list(x.to(device, dtype).unbind(1))


def empty(kinds: Sequence[Tensor]) -> list[Tensor]:
    """Likewise, of NaN."""
    return list(torch.stack(list(kinds), 1).fill_(torch.nan).unbind(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("number", "D"), [(1, 128), (3, 4), (1, 300)])
def test_pieces_are_taken_as_they_are(device: str, dtype: torch.dtype, cuts: list, number: int, D: int) -> None:
    found, expected = (empty(kinds_of(number, D, dtype, device)) for _ in range(2))
    for at in (0, 3):
        places = places_of(cuts, found, coded=False, at=at)
        packet = torch.randn(places[-1].at, device=device).to(dtype)
        triton_forms().take(packet, places, found)
        PLAIN.take(packet, places, expected)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.nan_to_num(99.0), b.nan_to_num(99.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("number", "D"), [(1, 128), (3, 24), (1, 5)])
def test_codes_and_scales_are_those_of_the_plain_forms(
    device: str, dtype: torch.dtype, cuts: list, number: int, D: int
) -> None:
    """Pieces that begin at an odd byte, or not; nothing is written beside them."""
    kinds, at = kinds_of(number, D, dtype, device), int(dtype == torch.float32)
    places = places_of(cuts, kinds, coded=True, at=at)
    found, expected = (torch.full((places[-1].at + 3,), 77, dtype=torch.int8, device=device) for _ in range(2))
    sums = triton_forms().encode(found, places, kinds, True)
    torch.testing.assert_close(sums, PLAIN.encode(expected, places, kinds, True), rtol=1e-9, atol=0)
    assert torch.equal(found, expected)
    assert triton_forms().encode(found, places, kinds, False) is None
    assert torch.equal(found, expected), "counting changes nothing"
    decoded(found, places, kinds)


def decoded(packet: Tensor, places: Places, kinds: Sequence[Tensor]) -> None:
    """What comes off the wire is what the plain form takes from it, and near what went."""
    found, expected = empty(kinds), empty(kinds)
    triton_forms().decode(packet, places, found)
    PLAIN.decode(packet, places, expected)
    for a, b in zip(found, expected, strict=True):
        if a.device.type == "cpu" and a.dtype == torch.bfloat16:  # the interpreter cuts to it, where a GPU rounds
            torch.testing.assert_close(a, b, rtol=2**-7, atol=0, equal_nan=True)
        else:
            assert torch.equal(a.nan_to_num(99.0), b.nan_to_num(99.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_makes_its_block_so_and_zeros_stay(device: str, dtype: torch.dtype) -> None:
    (x,) = kinds_of(1, 32, dtype, device, rows=70, heads=3)
    x[0, 0, 0], x[69, 2, 31], x[20, 1, 7] = torch.nan, -torch.inf, torch.inf
    x[16:32, 2], x[33, 2, 3] = 0, TINY
    places = places_of([((0, 70), (0, 3))], [x], coded=True)
    found, expected = (torch.zeros(places[-1].at, dtype=torch.int8, device=device) for _ in range(2))
    sums = triton_forms().encode(found, places, [x], True)
    PLAIN.encode(expected, places, [x], False)
    assert not sums.isfinite().any(), "an error that is not finite is told"
    got, want = empty([x]), empty([x])
    triton_forms().decode(found, places, got)
    PLAIN.decode(expected, places, want)
    finite = torch.ones(70, 3, dtype=torch.bool, device=device)
    finite[:16, 0] = finite[64:, 2] = finite[16:32, 1] = False
    for out in (got[0], want[0]):
        assert torch.equal(out.isfinite().all(-1), finite) and torch.equal(out.isfinite().any(-1), finite)
    assert torch.equal(got[0][16:32, 2], x[16:32, 2])


@pytest.mark.parametrize("device", DEVICES)
def test_halves_go_to_even_and_a_products_rounding_is_not_left_out(device: str) -> None:
    """Codes at and beside halves, where one rounding of x * inverse + constant would part from two."""
    rows = (1 << 15) if device == "cuda" else 160
    step_b = torch.linspace(1, 2, rows // 16, device=device)  # each block's, between codes
    x = torch.randint(-126, 126, (rows, 1, 128), device=device) + 0.5
    x[::16, 0, 0] = 127
    x *= step_b.repeat_interleave(16)[:, None, None]
    places = places_of([((0, rows), (0, 1))], [x], coded=True)
    found, expected = (torch.zeros(places[-1].at, dtype=torch.int8, device=device) for _ in range(2))
    triton_forms().encode(found, places, [x], False)
    PLAIN.encode(expected, places, [x], False)
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_offsets_past_32_bits_are_counted() -> None:
    """As many rows as 362 frames at 1344x768 have, of all heads, in one packet behind another piece."""
    rows, tail = 109_000, slice(-64, None)
    kinds = list(torch.randn(rows, 3, 56, 128, device="cuda", dtype=torch.bfloat16).unbind(1))
    cuts = [((0, rows - 60), (0, 56)), ((rows - 60, rows), (0, 56))]
    places = places_of(cuts, kinds, coded=True)
    packet = torch.empty(places[-1].at, device="cuda", dtype=torch.int8)
    triton_forms().encode(packet, places, kinds, False)
    last = torch.empty(places[-1].at - places[1].at, device="cuda", dtype=torch.int8)
    PLAIN.encode(last, (Place(0, (0, 60), (0, 56)),), [x[-60:] for x in kinds], False)
    assert torch.equal(packet[places[1].at :], last)
    found = empty(kinds)
    triton_forms().decode(packet, places, found)
    for a, x in zip(found, kinds, strict=True):
        assert (a[tail].float() - x[tail].float()).abs().max() < 0.05, "half a code of a few rows, and half a last bit"
    places = places_of(cuts, kinds, coded=False)
    packet = torch.randn(places[-1].at, device="cuda", dtype=torch.bfloat16)
    triton_forms().take(packet, places, found)
    assert torch.equal(torch.stack([x[-60:] for x in found], 1).flatten(), packet[places[1].at :])


def both_forms(seat, layout: Layout, device: str, backend: str = "gloo") -> None:
    """Whole exchanges of odd rows and few by either form: outputs, bytes and what is told of codes."""
    comm = seat.connect(layout, device=device, backend=backend)
    for rows in (37, 5):
        whole = Whole(rows, device=device)
        for way in (("heads", 1), ("heads", 3), ("hidden", 2), ("heads", 3, "int8"), ("hidden", 1, "int8")):
            plan, found = plan_of(layout, rows, ExchangePlan(*way)), []
            for forms in (PLAIN, triton_forms()):
                before, moves = dict(comm.counted), comm.exchange(plan, forms)
                out = attended(moves, plan.shares[seat.rank], whole)
                found.append((out, {k: n - before[k] for k, n in comm.counted.items()}, moves.rounding.sums()))
            (plain, sent, told), (fused, also_sent, also_told) = found
            assert torch.equal(plain, fused) and sent == also_sent, (rows, way)
            assert bool(told) == (len(way) == 3) and told.keys() == also_told.keys()
            for kind, pair in told.items():
                assert pair == pytest.approx(also_told[kind], rel=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_an_exchange_is_the_same_by_either_form(device: str) -> None:
    with World(4) as world:
        world.run(both_forms, Layout(sp=2, tp=2), device if device == "cpu" else "cuda:0", ranks=4)


def on_own_device(seat, layout: Layout) -> None:
    both_forms(seat, layout, f"cuda:{seat.rank}", "nccl")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device a rank: 2 here")
def test_an_exchange_is_the_same_by_either_form_over_nccl() -> None:
    with World(2) as world:
        world.run(on_own_device, Layout(sp=2), ranks=2)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_the_error_says_so() -> None:
    assert choose_forms(False) is PLAIN
    with pytest.raises(MissingDependency, match=r"runtime\.fused=on needs triton"):
        choose_forms(True)
