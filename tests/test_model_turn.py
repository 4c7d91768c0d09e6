"""How queries and keys are turned on their way: a packet's pieces at once, as they are or as codes, against the plain
forms, which go piece by piece. Kernels run on a GPU, or on a CPU by Triton's interpreter, as in `test_model_fused`.

Shape letters: p rows, j heads, D head size, A angles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from test_comm_forms import places_of
from test_exchange_variants import Whole, attention, error, plan_of
from test_model_fused import DEVICES, DTYPES, close, rows
from torch import Tensor
from world import World

from h3dist.comm.forms import PLAIN as PLAIN_FORMS
from h3dist.comm.forms import Turn, as_they_are, coded_count, triton_forms
from h3dist.comm.pieces import Place, Places
from h3dist.model import fused
from h3dist.model.elementwise import PLAIN, Elementwise
from h3dist.model.rotary import Rotation, rotation
from h3dist.plan import ExchangePlan, Layout, Span

P, J = 37, 8
BY_HEADS = [((0, P), span) for span in ((0, 3), (3, 3), (3, 8))]  # one piece of no heads
BY_ROWS = [(span, (1, 4)) for span in ((0, 33), (33, 33), (33, 37))]  # one of no rows
EVEN = [((0, P), (0, 4)), ((0, P), (4, 8))]
CUTS = [BY_HEADS, BY_ROWS, EVEN]
SIZES = [(128, 16), (24, 4), (12, 2)]  # the last without a channel that does not turn


@dataclass(frozen=True)
class Case:
    """q, k and v as a product leaves them, and what turns them."""

    qkv: Tensor
    norms: Sequence[Tensor]
    angles: Rotation

    def turn(self, way: Elementwise) -> Turn:
        return way.turn(*self.norms, way.prepare(self.angles))

    def heads(self) -> tuple[Tensor, ...]:
        """Their own memory."""
        return self.qkv.clone().unbind(1)


def case(device: str, dtype: torch.dtype, D: int, freqs: int, p: int = P, j: int = J) -> Case:
    positions = torch.arange(3 * p, dtype=torch.float64).view(p, 3) % 7
    angles = rotation(positions, (10000 ** (-torch.arange(freqs) / freqs)).to(device), dtype)
    norms = [1 + rows(device, dtype, D, seed=seed) / 4 for seed in (4, 5)]
    return Case(rows(device, dtype, p, 3, j, D), norms, angles)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("D", "freqs"), SIZES)
@pytest.mark.parametrize("at", [0, 3])
def test_all_pieces_of_a_packet_are_turned_at_once(
    device: str, dtype: torch.dtype, cuts: list[tuple[Span, Span]], D: int, freqs: int, at: int
) -> None:
    """As one after the other; v as it is; what lies beside them, and where they come from, is not touched."""
    given = case(device, dtype, D, freqs)
    found, heads = given.turn(fused.load()), given.heads()
    places = places_of(cuts, heads, coded=False, at=at)
    packets = [torch.full((places[-1].at + 3,), torch.nan, device=device, dtype=dtype) for _ in range(3)]
    found.lay(heads, places, packets[0])
    given.turn(PLAIN).lay(heads, places, packets[1])
    assert torch.equal(torch.stack(heads, 1), given.qkv)
    for place in places:
        found.lay(heads, (place,), packets[2])
    for packet in packets:
        assert packet[:at].isnan().all() and packet[-3:].isnan().all()
    inner = [packet[at:-3] for packet in packets]
    close(inner[0], inner[1], dtype)
    if D == 128 and at == 0:  # what lies as well is added in the same order
        assert torch.equal(inner[0], inner[2])
    copied = torch.full_like(packets[0], torch.nan)
    as_they_are.lay(heads, places, copied)
    for place in places:
        one, other = (pieces(packet, place, D)[:, 2] for packet in (packets[0], copied))
        assert torch.equal(one, other)


def pieces(packet: Tensor, place: Place, D: int) -> Tensor:
    """[r, 3, n, D] of a packet."""
    shape = place.rows[1] - place.rows[0], 3, place.heads[1] - place.heads[0], D
    return packet[place.at : place.at + torch.Size(shape).numel()].view(shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cuts", CUTS)
def test_pieces_are_turned_where_they_lie(device: str, cuts: list[tuple[Span, Span]]) -> None:
    given = case(device, torch.float32, 24, 4)
    places = places_of(cuts, given.heads(), coded=False)
    found, expected = (torch.stack(turned_in_place(given, way, places), 1) for way in (fused.load(), PLAIN))
    close(found, expected, torch.float32)
    touched = torch.zeros(P, J, dtype=torch.bool, device=device)
    for place in places:
        touched[slice(*place.rows), slice(*place.heads)] = True
    assert torch.equal(found[:, 2], given.qkv[:, 2]), "v stays"
    assert torch.equal((found[:, :2] != given.qkv[:, :2]).any(-1).any(1), touched)


def turned_in_place(given: Case, way: Elementwise, places: Places) -> tuple[Tensor, ...]:
    heads = given.heads()
    given.turn(way).lay(heads, places, None)
    return heads


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", CUTS[:2])
@pytest.mark.parametrize(("D", "freqs"), SIZES)
def test_codes_made_on_the_way_are_those_of_what_was_turned_before(
    device: str, dtype: torch.dtype, cuts: list[tuple[Span, Span]], D: int, freqs: int
) -> None:
    """By the interpreter to the bit. On a GPU one of them may join a product and a sum where the other rounds both."""
    given = case(device, dtype, D, freqs)
    turn, heads, before = given.turn(fused.load()), given.heads(), given.heads()
    places = places_of(cuts, heads, coded=True, at=1)
    found, expected = (torch.full((places[-1].at + 3,), 77, dtype=torch.int8, device=device) for _ in range(2))
    assert turn.encode is not None
    sums = turn.encode(found, places, heads, True)
    assert all(torch.equal(x, y) for x, y in zip(heads, before, strict=True)), "they are read alone"
    turn.lay(before, places, None)
    want = triton_forms().encode(expected, places, before, True)
    torch.testing.assert_close(sums, want, rtol=1e-9 if device == "cpu" else 2e-3, atol=0)
    if device == "cpu":
        assert torch.equal(found, expected)
    assert (found == expected).float().mean() > 0.98 and torch.equal(found[[0, -1]], expected[[0, -1]])
    near(found, places, before)
    again = torch.full_like(found, 77)
    assert turn.encode(again, places, heads, False) is None
    assert torch.equal(again, found), "counting changes nothing"


def near(packet: Tensor, places: Places, heads: Sequence[Tensor]) -> None:
    """What comes off the wire is within half a code, and a last bit, of what was turned."""
    came = torch.stack(list(heads), 1).fill_(torch.nan).unbind(1)
    PLAIN_FORMS.decode(packet, places, came)
    for x, y in zip(heads, came, strict=True):
        for place in places:
            part = slice(*place.rows), slice(*place.heads)
            if y[part].numel():
                most = x[part].float().abs().amax()
                assert (x[part].float() - y[part].float()).abs().max() < (0.51 / 127 + 2**-8) * most


@pytest.mark.gpu
def test_offsets_past_32_bits_are_counted_on_the_way() -> None:
    """As many rows as 362 frames at 1344x768 have, of all heads, in one packet behind another piece."""
    p, cut = 109_000, 108_940
    given = case("cuda", torch.bfloat16, 128, 16, p, 56)
    heads, cuts = given.qkv.unbind(1), [((0, cut), (0, 56)), ((cut, p), (0, 56))]
    turn, (_, last, _) = given.turn(fused.load()), places_of(cuts, heads, coded=False)
    packet = torch.empty(2 * last.at, device="cuda", dtype=torch.bfloat16)[: given.qkv.numel()]
    turn.lay(heads, places_of(cuts, heads, coded=False), packet)
    alone = torch.empty(60 * 3 * 56 * 128, device="cuda", dtype=torch.bfloat16)
    given.turn(PLAIN).lay(heads, (Place(0, *cuts[1]),), alone)
    close(packet[last.at :], alone, torch.bfloat16)
    del packet
    places = places_of(cuts, heads, coded=True)
    codes = torch.empty(places[-1].at, device="cuda", dtype=torch.int8)
    turn.encode(codes, places, heads, False)
    small = torch.empty(coded_count((60, 3, 56, 128)), device="cuda", dtype=torch.int8)
    turn.encode(small, (Place(0, *cuts[1]),), heads, False)
    found, expected = (torch.empty(60, 3, 56, 128, device="cuda") for _ in range(2))
    whole = (Place(0, (0, 60), (0, 56)),)
    PLAIN_FORMS.decode(codes[places[1].at :], whole, found.unbind(1))
    PLAIN_FORMS.decode(small, whole, expected.unbind(1))
    assert torch.equal(found, expected)


def both_ways(seat, device: str) -> None:
    """Whole exchanges that turn: plain forms, and kernels; codes alike as far as they go."""
    layout, way = Layout(sp=seat.world), fused.load()
    comm, whole = seat.connect(layout, device=device), Whole(P, device=device)
    D = whole.qkv_3HDC.shape[2]
    for exchange in (("heads", 3), ("hidden", 2), ("heads", 1, "int8")):
        plan, found = plan_of(layout, P, ExchangePlan(*exchange)), []
        share = plan.shares[seat.rank]
        given = case(device, torch.float32, D, 0, share.projected_rows[1] - share.projected_rows[0])
        given = replace(given, angles=Rotation(*(rows(device, torch.float32, P, 1, D // 2, seed=n) for n in (6, 7))))
        for forms, kind in ((PLAIN_FORMS, PLAIN), (triton_forms(), way)):
            moves = comm.exchange(plan, forms)
            x_pC = moves.gather_projected(whole.x_SC[slice(*share.rows)])
            heads = whole.project(x_pC, slice(*share.projected_heads))
            found.append((moves.attend(*heads, attention, given.turn(kind)), moves.rounding.sums()))
        (plain, told), (turned, also_told) = found
        assert error(turned, plain) < (1e-3 if "int8" in exchange else 2e-6), exchange
        assert told.keys() == also_told.keys() and bool(told) == ("int8" in exchange)
        for kind, pair in told.items():
            assert pair == pytest.approx(also_told[kind], rel=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_an_exchange_turns_alike_by_either_form(device: str) -> None:
    with World(3) as world:
        world.run(both_ways, device if device == "cpu" else "cuda:0", ranks=3)
