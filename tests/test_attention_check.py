"""The check of a run's first attention call: what it catches, and one decision on all ranks."""

from dataclasses import replace

import attention_packages as packages
import pytest
import torch
from attention_packages import install, softmax_attention
from torch import Tensor
from world import World

from h3dist import attending
from h3dist.attention import registry
from h3dist.attention.backend import Task
from h3dist.attention.check import Checked, compare
from h3dist.bench.spec import Spec
from h3dist.bench.steps import denoiser_of, random_weights, velocity
from h3dist.comm import Comm
from h3dist.errors import ConfigError, MissingDependency, NumericsError
from h3dist.plan import ExchangePlan, Layout
from h3dist.topology import Ranks

SHAPE = (5 * 128 + 37, 5, 16)
TASK = Task(*SHAPE, torch.float32, torch.device("cpu"), None)
GROUPED = ExchangePlan(groups=3)
APPROXIMATE = replace(registry.find("sdpa"), name="rough", exact=False, bound=0.05, build=lambda task, found: rough)


@pytest.fixture(scope="module")
def world():
    with World(2) as world:
        yield world


def tensors(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(SHAPE[0], 3, *SHAPE[1:], generator=generator).unbind(1))


def rough(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """About 3 % off."""
    o = softmax_attention(q, k, v)
    return o + 0.03 * o.roll(1, dims=0).sign() * o.abs()


def noisy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.randn_like(q)


def bad_tail(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = softmax_attention(q, k, v)
    o[-37:] *= 1.5  # too few of 677 rows to show in the whole
    return o


def one_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = softmax_attention(q, k, v)
    o[3, 1, 2] = float("nan")  # not in a head that is compared
    return o


def centring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k -= k.mean(dim=0, keepdim=True)
    return softmax_attention(q, k, v)


def raising(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: no kernel image is available\nmore")


def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax_attention(q, k, v).flatten(1)


def test_a_good_backend_passes_with_its_error() -> None:
    o, finding = compare(rough, *tensors(), bound=0.05)
    assert finding.wrong is None and 0.02 < finding.error < 0.04 and 0.02 < finding.tail < 0.05
    assert o is not None and torch.equal(o, rough(*tensors()))


@pytest.mark.parametrize(
    ("attention", "told"),
    [
        (rough, "0.03 from exact attention (relative 2-norm), and 0.001 is allowed"),
        (noisy, "from exact attention"),
        (bad_tail, "the last rows"),
        (one_nan, "NaN or infinity"),
        (centring, "changes its input k in place"),
        (raising, "it raised RuntimeError: CUDA error: no kernel image is available"),
        (flat, "it gave torch.float32 [677, 80] for [677, 5, 16]"),
    ],
)
def test_what_is_wrong_is_caught_and_named(attention, told) -> None:
    bound = {rough: 0.001, bad_tail: 0.2}.get(attention, 0.3)
    _, finding = compare(attention, *tensors(), bound=bound)
    assert finding.wrong is not None and told in finding.wrong


def test_nan_in_the_input_is_not_told_as_a_change_of_it() -> None:
    q, k, v = tensors()
    v[7, 0, 3] = float("nan")  # in a head that is compared
    _, finding = compare(softmax_attention, q, k, v, bound=0.05)
    assert finding.wrong == "its output holds NaN or infinity"


def test_an_error_that_is_no_number_is_past_every_bound() -> None:
    q, k, v = tensors()
    v[7, 0, 3] = float("inf")
    _, finding = compare(lambda q, k, v: torch.zeros(q.shape), q, k, v, bound=float("inf"))
    assert finding.wrong is not None and "nan from exact attention" in finding.wrong


@pytest.mark.parametrize("attention", [noisy, centring, raising, one_nan])
def test_with_fallback_exact_attention_takes_over_at_once(attention) -> None:
    told: dict = {}
    checked = Checked(APPROXIMATE, attention, lambda what, text: [text], told, fallback=True)
    for seed in range(2):
        given = tensors(seed)
        expected = softmax_attention(*tensors(seed))
        torch.testing.assert_close(checked(*given), expected, rtol=1e-5, atol=1e-6)
    assert told["fell_back"].startswith("rank 0: ") and told["bound"] == 0.05


def test_only_the_first_call_is_compared() -> None:
    asked, told = [], {}
    checked = Checked(APPROXIMATE, rough, lambda what, text: asked.append(what) or [text], told, fallback=False)
    for seed in range(3):
        assert torch.equal(checked(*tensors(seed)), rough(*tensors(seed)))
    assert asked == ["the check of attention=rough"] and told["fell_back"] is None and 0.02 < told["error"] < 0.04


def run_rank(seat, faulty: int | None, fallback: bool) -> tuple[Tensor, dict]:
    """The rank `faulty` has a noisy kernel; all make two calls."""
    comm = seat.connect(Layout(sp=seat.world))
    kernel = noisy if seat.rank == faulty else rough
    backend = replace(APPROXIMATE, build=lambda task, found: kernel, probe=lambda task: f"of rank {seat.rank}")
    attention, told = attending.begin_attention(comm, backend, TASK, fallback=fallback)
    first = attention(*tensors(seat.rank))
    second = attention(*tensors(seat.rank))
    comm.agree("the end")
    return first, second, told


def test_all_ranks_take_one_decision(world) -> None:
    """The largest error of any rank is told on all; one that is past the bound stops or turns all."""
    for rank, (first, _, told) in enumerate(world.run(run_rank, None, False)):
        assert torch.equal(first, rough(*tensors(rank))) and told["kernel"] == "of rank 0"
        assert told["error"] == max(compare(rough, *tensors(r), bound=1.0)[1].error for r in range(2))
    for rank, (first, second, told) in enumerate(world.run(run_rank, 1, True)):
        expected = softmax_attention(*tensors(rank))
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-6)
        assert told["fell_back"].startswith("rank 1: ")
    outcomes = world.outcomes(run_rank, 1, False)
    assert {type(outcome.error) for outcome in outcomes} == {NumericsError}
    for outcome in outcomes:
        assert "attention=rough is refused, rank 1: its first call is" in str(outcome.error)
        assert "attention=sdpa is exact, and attention.fallback=true" in str(outcome.error)


def agree_rank(seat, lacking: int, missing: bool) -> None:
    """The rank `lacking` has an older GPU, or lacks the package."""
    comm = seat.connect(Layout(sp=seat.world))
    old = seat.rank == lacking and not missing
    task = replace(TASK, head_dim=128, dtype=torch.bfloat16, capability=(8, 0) if old else (9, 0))
    with pytest.MonkeyPatch.context() as patch:
        install(patch, {"flash_attn_interface": None} if seat.rank == lacking else packages.flash3())
        attending.agree_on_attention(comm, "flash3", task)


@pytest.mark.parametrize(("missing", "kind"), [(False, ConfigError), (True, MissingDependency)])
def test_a_rank_that_cannot_is_named_on_all(world, missing, kind) -> None:
    outcomes = world.outcomes(agree_rank, 1, missing)
    texts = {str(outcome.error) for outcome in outcomes}
    assert {type(outcome.error) for outcome in outcomes} == {kind} and len(texts) == 1
    assert "rank 1" in texts.pop()


def test_one_rank_agrees_with_itself() -> None:
    with Comm.connect(Ranks(), Layout(), torch.device("cpu")) as comm:
        assert attending.agree_on_attention(comm, "sdpa", TASK).name == "sdpa"
        with pytest.raises(ConfigError, match=r"^attention=sdpa_cudnn cannot be used here"):
            attending.agree_on_attention(comm, "sdpa_cudnn", TASK)
        attention, told = attending.begin_attention(comm, registry.find("sdpa"), TASK, fallback=False)
    assert told == {"backend": "sdpa", "exact": True, "kernel": None}
    torch.testing.assert_close(attention(*tensors()), softmax_attention(*tensors()), rtol=1e-5, atol=1e-6)


def step_rank(seat, faulty: int | None, fallback: bool) -> tuple[Tensor, Tensor, dict]:
    """A step on random weights with heads moving in groups, by exact attention and by one that is checked."""
    comm = seat.connect(Layout(sp=seat.world))
    spec = Spec(("64x64x5",), size="small", blocks=1, text_rows=7)
    plan = replace(spec.plan("64x64x5", comm.layout, dtype="float32", capability=None, steps=1), exchange=GROUPED)
    denoiser = denoiser_of(random_weights(plan, seat.rank, torch.device("cpu")), plan, comm)
    exact = velocity(denoiser, plan)
    kernel = noisy if seat.rank == faulty else rough
    backend = replace(APPROXIMATE, build=lambda task, found: kernel)
    checked, told = attending.begin_attention(comm, backend, TASK, fallback=fallback)
    denoiser.view = replace(denoiser.view, attention=checked)
    found = velocity(denoiser, plan)
    comm.agree("the end")
    return exact, found, told


def test_the_check_stands_among_exchanges_that_are_under_way(world) -> None:
    """Heads move in groups, so others are on their way while ranks agree on the first group's attention."""
    for exact, found, told in world.run(step_rank, None, False):
        assert 0 < (found - exact).norm() / exact.norm() < 0.1 and told["fell_back"] is None
    for exact, found, told in world.run(step_rank, 1, True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
        assert "rank 1" in told["fell_back"]
    assert {type(outcome.error) for outcome in world.outcomes(step_rank, 0, False)} == {NumericsError}
