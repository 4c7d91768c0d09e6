"""Every layout against diffusers' pipeline, step by step, from prompt to clean latents; its bytes against the plan.

Real ranks over gloo run the pipeline's own stages on whole tiny sets of both forms. The largest error of each layout is
a property of its test: `pytest -o junit_family=xunit1 --junitxml=FILE tests/test_run_layouts.py` writes them down.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from official_pipeline import official_pipeline, run_official
from stages import Run, Walked, on_one_core, prepare_run, walk, walk_lean
from world import World

from h3dist import pipeline
from h3dist.checkpoint.comfy import open_denoiser
from h3dist.checkpoint.tiny import write_tiny
from h3dist.config import ExchangeConfig
from h3dist.plan import ExchangePlan, Layout
from h3dist.sidecar import RankReport, describe_exchange
from h3dist.topology import Ranks

REQUEST = {
    "prompt": " A boat at dawn. <d>[English] Go.</d>",
    "width": 96,
    "height": 96,
    "frames": 22,
    "steps": 3,
    "seed": 440420,
}
LAYOUTS = [
    *(Layout(sp=ranks) for ranks in (2, 3, 4, 6, 7, 8)),
    *(Layout(tp=ranks) for ranks in (2, 4, 6, 8)),
    *(Layout(sp=sp, tp=tp) for sp, tp in ((2, 2), (2, 3), (3, 2))),
]
LIMIT = 200  # seconds for a case on a machine that others load too
EXCHANGES = [
    (Layout(sp=5), ExchangeConfig("hidden", "1")),
    (Layout(sp=3), ExchangeConfig("heads", "3")),
    (Layout(sp=2, tp=3), ExchangeConfig("hidden", "3", chunks=3)),
]
NEAR = 1e-6  # of one rank's latents, in the same norm
TOLERANCE = 1e-5  # relative, in the 2-norm; all runs are in float32
pytestmark = pytest.mark.limit(300)


@dataclass(frozen=True)
class Case:
    """A set of one form, what diffusers makes of the request, and what one of our ranks does."""

    paths: dict[str, Path]
    run: Run
    expected: dict[str, torch.Tensor]
    single: Walked


def mode(layout: Layout) -> str:
    if layout.world == 1:
        return "single"
    return "ulysses" if layout.tp == 1 else "tensor" if layout.sp == 1 else "hybrid"


def name(layout: Layout) -> str:
    return f"{mode(layout)}-{layout.sp}x{layout.tp}"


@pytest.fixture(scope="module")
def world():
    with World(8) as world:
        yield world


@pytest.fixture(scope="module", params=["curve", "full"])
def case(request, world, tmp_path_factory) -> Case:
    folder: Path = tmp_path_factory.mktemp(request.param)
    paths = write_tiny(folder / "set", request.param, seed=11)
    with on_one_core():
        expected = run_official(official_pipeline(paths), REQUEST)
    run = prepare_run(paths, REQUEST, folder, "sampler=official", trace="trace.safetensors")
    return Case(paths, run, expected, world.run(walk, run, Layout(), True, ranks=1, limit=LIMIT)[0])


def errors(case: Case, walked: Walked) -> dict[str, float]:
    """The relative error in the 2-norm of everything that rank 0 kept."""
    found = {}
    for key, ours in walked.trace.items():
        got, want = torch.from_numpy(ours).double(), case.expected[key].double()
        assert got.shape == want.shape, key
        found[key] = ((got - want).norm() / want.norm()).item()
    assert len(found) == 3 + 2 * REQUEST["steps"]
    return found


def check(case: Case, ranks: list[Walked], record_property) -> None:
    found = errors(case, ranks[0])
    record_property("largest_error", max(value for key, value in found.items() if "latents" in key))
    assert max(found.values()) <= TOLERANCE, found
    assert {rank.hashes for rank in ranks} == {ranks[0].hashes}, "the ranks' latents differ"
    assert {rank.again for rank in ranks} == {ranks[0].hashes}, "a second run's latents differ"
    for rank in ranks:
        assert rank.sent == rank.planned
        counted, planned = rank.file_bytes
        assert counted == planned


def test_no_layout_divides_the_rows(case):
    rows = case.single.rows[1]
    assert all(rows % ranks for ranks in range(2, 9))


def test_one_rank_gives_the_official_latents_after_every_step(case, record_property):
    check(case, [case.single], record_property)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_a_layout_gives_the_official_latents_after_every_step(case, world, layout, record_property):
    ranks = world.run(walk_lean, case.run, layout, True, ranks=layout.world, limit=LIMIT)
    check(case, ranks, record_property)
    assert sum(sum(rank.sent.values()) for rank in ranks) > 0


def exchanging(case: Case, exchange: ExchangeConfig) -> Run:
    """The run with another `exchange`."""
    return replace(case.run, config=replace(case.run.config, exchange=exchange))


@pytest.mark.parametrize(("layout", "exchange"), EXCHANGES, ids=str)
def test_another_exchange_gives_the_latents_of_one_rank(case, world, layout, exchange):
    run = exchanging(case, exchange)
    ranks = world.run(walk, run, layout, ranks=layout.world, limit=LIMIT)
    found = {key: distance(ranks[0].trace[key], want) for key, want in case.single.trace.items()}
    assert max(found.values()) <= NEAR, found
    assert {rank.hashes for rank in ranks} == {ranks[0].hashes}
    for rank in ranks:
        assert rank.sent == rank.planned and rank.file_bytes[0] == rank.file_bytes[1]
        assert (rank.sent["hidden.gather"] > 0) == (exchange.variant == "hidden")


def test_codes_are_told_in_the_sidecar_as_approximate(case, world):
    run = exchanging(case, ExchangeConfig("heads", "2", "int8"))
    ranks = world.run(walk, run, Layout(sp=2), ranks=2, limit=LIMIT)
    assert NEAR < distance(ranks[0].trace["video_latents"], case.single.trace["video_latents"]) < 0.05
    reports = [RankReport("cpu", rank.sent, 0, 0, 0.0, rounding=rank.rounding) for rank in ranks]
    told = describe_exchange(ExchangePlan("heads", 2, "int8"), reports)
    assert told["how"] == "heads in 2 groups as int8 codes (approximate)" and not told["exact"]
    assert "approximate" in told["note"] and told["relative_error"].keys() == {"q", "k", "v", "output"}
    assert all(1e-3 < value < 0.01 for value in told["relative_error"].values()), told
    plain = RankReport("cpu", case.single.sent, 0, 0, 0.0, rounding=case.single.rounding)
    assert describe_exchange(ExchangePlan(), [plain]) == {"how": "heads in 1 group", "exact": True}
    asked = describe_exchange(ExchangePlan(transport="auto"), [replace(plain, transport="collective: no GPU")])
    assert asked["exact"] and asked["transport"] == "collective: no GPU"


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("mode", ["ulysses", "tensor", "hybrid"])
def test_one_rank_of_any_mode_gives_the_single_runs_bits(case, world, mode):
    config = replace(case.run.config, parallel=replace(case.run.config.parallel, mode=mode))
    layout = pipeline.choose_layout(config, None, Ranks(), open_denoiser(config.model.denoiser))
    assert layout == Layout()
    alone = world.run(walk, replace(case.run, config=config), layout, ranks=1, limit=LIMIT)[0]
    assert alone.hashes == case.single.hashes
    assert not any(alone.sent.values())


@pytest.mark.parametrize("layout", [Layout(sp=8), Layout(sp=2, tp=4)], ids=name)
def test_ranks_without_rows_take_part(case, world, layout, tmp_path):
    """19 rows, three for each rank: the last has none, and the one before it a single one."""
    short = REQUEST | {"prompt": "x", "width": 32, "height": 32, "frames": 5}
    run = Run(case.run.config, prepare_run(case.paths, short, tmp_path, trace="trace.safetensors").job)
    single = world.run(walk, run, Layout(), ranks=1, limit=LIMIT)[0]
    ranks = world.run(walk, run, layout, ranks=8, limit=LIMIT)
    assert [stop - start for start, stop in (rank.rows for rank in ranks)] == [3] * 6 + [1, 0]
    assert {rank.hashes for rank in ranks} == {ranks[0].hashes}
    for key, want in single.trace.items():
        assert np.linalg.norm(ranks[0].trace[key] - want) <= TOLERANCE * np.linalg.norm(want), key
    assert all(rank.sent == rank.planned and len(set(rank.file_bytes)) == 1 for rank in ranks)
