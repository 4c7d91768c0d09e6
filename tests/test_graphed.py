"""Steps that are replayed against steps that are computed: the same bits, whatever is different from step to step.

On a CPU a stand-in records: each replay does the work again, from the memory that it was given, into memory of its
own. On a GPU, marked, it is a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from task_runs import CASES as TASKS
from task_runs import fields_of, keep_settings, overrides_of, run_stages, write_media
from test_model_conditions import GEOMETRY, REFERENCES, TAGS, random_rows
from test_model_denoiser import write_set
from torch import Tensor
from world import Seat

from h3dist import pipeline, preflight
from h3dist.attention.registry import BACKENDS
from h3dist.attention.sdpa import sdpa
from h3dist.bench.spec import Spec
from h3dist.bench.steps import denoiser_of, random_weights, run_steps
from h3dist.checkpoint.tiny import write_tiny
from h3dist.comm import Comm
from h3dist.config import Config, compose
from h3dist.errors import ConfigError, MissingDependency
from h3dist.model import fused
from h3dist.model.denoiser import Denoiser
from h3dist.model.elementwise import PLAIN, Elementwise
from h3dist.model.exchange import Alone
from h3dist.model.graphed import GraphedDenoiser, Recorded
from h3dist.model.modulation import tables
from h3dist.model.weights import load_denoiser
from h3dist.packing import pack
from h3dist.plan import Layout
from h3dist.preflight import check_cuda, check_graph
from h3dist.sampling.samplers import sample
from h3dist.sampling.schedules import make_schedule
from h3dist.topology import Ranks

Work = Callable[[], tuple[Tensor, Tensor]]
SCHEDULE = make_schedule("simple", 5)
pytestmark = pytest.mark.usefixtures("one_thread")


class StandIn:
    """Records as a CUDA graph does; `off` is what each replay is wrong by."""

    def __init__(self, off: float = 0.0) -> None:
        self.replays, self.off = 0, off

    def __call__(self, work: Work) -> Recorded:
        found = tuple(torch.full_like(x, torch.nan) for x in work())

        def replay() -> None:
            self.replays += 1
            for out, new in zip(found, work(), strict=True):
                out.copy_(new + self.off)

        return Recorded(replay, found)


def cannot(work: Work) -> Recorded:
    try:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")
    finally:
        raise ValueError("the recording is invalid")


@pytest.fixture(scope="module", params=["full", "curve"])
def dfile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return write_set(request.param, tmp_path_factory.mktemp("graphed"))


def made(
    dfile, *, kept: bool, device: str = "cpu", dtype: torch.dtype = torch.float32, elementwise: Elementwise = PLAIN
) -> Denoiser:
    """A denoiser for SCHEDULE, with references or without; what is random is the same in each."""
    torch.manual_seed(3)
    packing, dims = pack(GEOMETRY, TAGS, REFERENCES if kept else ()), dfile.dims
    rows, heads = (0, packing.rows), (0, dims.heads)
    share = SimpleNamespace(
        rows=rows, projected_rows=rows, tp_heads=heads, heads=heads, projected_heads=heads, ffn=(0, dims.ffn)
    )
    times = SCHEDULE.times_v, SCHEDULE.times_a
    return Denoiser(
        load_denoiser(dfile, share, device=torch.device(device), dtype=dtype),
        packing,
        share,
        tables(dfile, *times, device=torch.device(device), dtype=dtype, kept=kept),
        Alone(),
        sdpa,
        torch.randn(len(TAGS), dims.hidden),
        kept=random_rows(packing) if kept else None,
        elementwise=elementwise,
    )


def latents(device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    video = torch.randn(1, 24, GEOMETRY.latent_t, GEOMETRY.latent_h, GEOMETRY.latent_w, generator=generator)
    return video.to(device), torch.randn(1, 32, 2, GEOMETRY.audio_latents, generator=generator).to(device)


def walked(velocity, sampler: str, device: str = "cpu") -> list[Tensor]:
    """The latents after every step."""
    seen: list[Tensor] = []
    contract = {"sampler": sampler, "contract": "comfy", "on_step": lambda step, *both: seen.extend(both)}
    sample(velocity, *latents(device), SCHEDULE, **contract)
    return [x.cpu() for x in seen]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("sampler", ["euler", "res_multistep"])
def test_replayed_steps_are_the_computed_ones(dfile, sampler: str, kept: bool) -> None:
    wanted, stand_in = walked(made(dfile, kept=kept), sampler), StandIn()
    denoiser = GraphedDenoiser(made(dfile, kept=kept), record=stand_in)
    assert same(walked(denoiser, sampler), wanted)
    assert stand_in.replays == SCHEDULE.evaluations - 1
    steps = [torch.cat([x.flatten() for x in pair]) for pair in zip(wanted[::2], wanted[1::2], strict=True)]
    assert len({x.sum().item() for x in steps}) == len(steps)


def test_what_a_step_gives_stays_and_what_it_takes_is_left_alone(dfile) -> None:
    """Each input matters by itself; a later step, or writing over a result, changes nothing that was given."""
    plain, denoiser = made(dfile, kept=True), GraphedDenoiser(made(dfile, kept=True), record=StandIn())
    video, audio = latents()
    before = video.clone(), audio.clone()
    asked = [(video, audio, 0), (video, audio, 1), (-video, audio, 1), (video, 2 * audio, 1), (video, audio, 4)]
    found = [denoiser(*each) for each in asked]
    for each, pair in zip(asked, found, strict=True):
        assert same(list(pair), list(plain(*each)))
        assert not same(list(pair), list(plain(each[0], each[1], 2)))
    found[-1][0].zero_(), found[-1][1].zero_()
    assert same(list(denoiser(video, audio, 0)), list(found[0])) and same([video, audio], list(before))


def test_a_step_that_cannot_be_recorded_is_refused(dfile) -> None:
    denoiser = GraphedDenoiser(made(dfile, kept=False), record=cannot)
    with pytest.raises(ConfigError, match=r"runtime\.graph=on: .*\(RuntimeError: operation not permitted\); .*=off"):
        denoiser(*latents(), 0)


def test_a_replay_that_is_checked_has_to_give_the_same(dfile) -> None:
    wanted = walked(made(dfile, kept=False), "euler")
    right, wrong = StandIn(), StandIn(off=1e-3)
    good, bad = (GraphedDenoiser(made(dfile, kept=False), checked=True, record=r) for r in (right, wrong))
    assert same(walked(good, "euler"), wanted) and right.replays == SCHEDULE.evaluations
    with pytest.raises(ConfigError, match="a replay does not give what the step gave"):
        bad(*latents(), 0)
    assert wrong.replays == 1


def test_graphs_are_refused_where_the_host_or_others_take_part() -> None:
    asked = compose(["runtime.graph=on"])
    assert Config().runtime.graph == "off"
    with pytest.raises(ConfigError, match=r"runtime\.graph=on is for CUDA devices, and this is cpu; .*graph=off"):
        check_cuda(asked, "cpu")
    check_cuda(asked, "cuda"), check_graph(asked, Layout()), check_graph(Config(), Layout(sp=2))
    for config, layout, why in (
        (asked, Layout(sp=2), r"is for one rank, and these are 2"),
        (asked, Layout(dp=3), r"is for one rank, and these are 3"),
        (compose(["runtime.graph=on", "runtime.offload=blocks"]), Layout(), r"runtime\.offload=blocks"),
        (compose(["runtime.graph=on", "attention.capture=/tmp/unmade"]), Layout(), r"attention\.capture"),
    ):
        with pytest.raises(ConfigError, match=rf"runtime\.graph=on .*{why}; use runtime\.graph=off"):
            check_graph(config, layout)
    with pytest.raises(ConfigError, match=r"runtime\.graph=onn: must be one of off, on; did you mean 'on'"):
        compose(["runtime.graph=onn"])


def stages(folder: Path, device: str, *more: str) -> dict[str, Tensor]:
    """A run with a picture, a film and a voice, five steps, by the pipeline's own stages."""
    write_media(folder)
    lines = overrides_of(write_tiny(folder, "full"), f"runtime.device={device}", *more)
    seat = Seat(0, 1, None)
    with seat.stack:
        fields = fields_of(TASKS["all three"], folder) | {"steps": 5}
        return run_stages(seat, lines, fields, device="cuda:0" if device == "cuda" else device)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_run_replays_its_steps_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_settings(monkeypatch)
    stand_in = StandIn()
    monkeypatch.setattr(preflight, "check_cuda", lambda *_: None)
    monkeypatch.setattr(pipeline, "GraphedDenoiser", partial(GraphedDenoiser, record=stand_in))
    wanted = stages(tmp_path, "cpu")
    assert stand_in.replays == 0
    for bound, replays in ((None, 4), (0.02, 5)):  # one more for attention that is not torch's own
        monkeypatch.setitem(BACKENDS, "sdpa", replace(BACKENDS["sdpa"], bound=bound))
        before, found = stand_in.replays, stages(tmp_path, "cpu", "runtime.graph=on")
        assert stand_in.replays - before == replays and found["trace"].keys() == wanted["trace"].keys()
        assert all(torch.equal(found["trace"][name], wanted["trace"][name]) for name in wanted["trace"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["plain", "fused"])
@pytest.mark.parametrize("kept", [False, True])
def test_on_a_gpu_a_graph_gives_the_same_bits(dfile, way: str, kept: bool, dtype: torch.dtype) -> None:
    elementwise = fused.load() if way == "fused" else PLAIN
    given = {"kept": kept, "device": "cuda", "dtype": dtype, "elementwise": elementwise}
    wanted = walked(made(dfile, **given), "res_multistep", "cuda")
    denoiser = GraphedDenoiser(made(dfile, **given))
    assert same(walked(denoiser, "res_multistep", "cuda"), wanted)
    assert same(walked(denoiser, "res_multistep", "cuda"), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "sdpa_flash", "sdpa_cudnn", "flash2", "flash3", "flash4", "sdpa+sliced"])
@pytest.mark.parametrize("way", [{"fused": True, "reused": True}, {"reused": True}], ids=["fused", "plain"])
def test_on_a_gpu_blocks_of_the_released_size_give_the_same_bits(attention: str, way: dict[str, bool]) -> None:
    spec = Spec(("128x96x22",), size="released", blocks=2, text_rows=37, attention=attention)
    cuda = torch.device("cuda", 0)
    with Comm.connect(Ranks(), Layout(), cuda) as comm:
        plan = spec.plan("128x96x22", Layout(), dtype="bfloat16", capability=(9, 0), steps=6)
        weights = random_weights(plan, 0, cuda)
        try:
            plain = denoiser_of(weights, plan, comm, **way)
        except (ConfigError, MissingDependency) as error:
            pytest.skip(str(error))
        wanted = run_steps(plain, plan, comm)
        denoiser = GraphedDenoiser(denoiser_of(weights, plan, comm, **way), checked=True)
        assert run_steps(denoiser, plan, comm).sha256 == wanted.sha256


@pytest.mark.gpu
def test_on_a_gpu_graphs_come_and_go_with_their_denoisers(dfile) -> None:
    """Work of other sizes between replays, and a second graph, change nothing; the memory is given back."""
    given = {"kept": True, "device": "cuda", "dtype": torch.bfloat16, "elementwise": fused.load()}
    plain, other = made(dfile, **given), made(dfile, kept=False, device="cuda")
    wanted = [[x.cpu() for x in plain(*latents("cuda"), step)] for step in range(5)]
    held = []
    for _ in range(4):
        denoiser = GraphedDenoiser(made(dfile, **given))
        for step in range(5):
            assert same([x.cpu() for x in denoiser(*latents("cuda"), step)], wanted[step])
            other(*latents("cuda"), step)
            torch.full((1 << 22,), torch.nan, device="cuda")
        del denoiser
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] <= held[1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_on_a_gpu_a_run_with_graphs_is_the_run_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_settings(monkeypatch)
    found, wanted = (stages(tmp_path, "cuda", f"runtime.graph={way}", "runtime.gemm=dense") for way in ("on", "off"))
    assert all(torch.equal(found["trace"][name], wanted["trace"][name]) for name in wanted["trace"])


@pytest.mark.gpu
def test_on_a_gpu_steps_that_wait_for_the_host_are_refused(dfile) -> None:
    """The last here, since it leaves torch with a recording that failed."""

    def waits(*heads: Tensor) -> Tensor:
        return sdpa(*heads).cpu().to("cuda")

    denoiser = made(dfile, kept=False, device="cuda")
    denoiser.view = replace(denoiser.view, attention=waits)
    wanted = [x.cpu() for x in denoiser(*latents("cuda"), 0)]
    with pytest.raises(ConfigError, match=r"runtime\.graph=on: a step cannot be recorded here"):
        GraphedDenoiser(denoiser)(*latents("cuda"), 0)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert same([x.cpu() for x in denoiser(*latents("cuda"), 0)], wanted)
