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

from h3dist import graphing
from h3dist.attention.sdpa import sdpa
from h3dist.bench.spec import Spec
from h3dist.bench.steps import denoiser_of, random_weights, run_steps
from h3dist.checkpoint.tiny import write_tiny
from h3dist.comm import Comm
from h3dist.config import Config, compose
from h3dist.errors import ConfigError, MissingDependency
from h3dist.graphing import ROWS, STEPS, against
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
    assert denoiser.told == "no step was recorded"
    assert same(walked(denoiser, sampler), wanted)
    assert stand_in.replays == SCHEDULE.evaluations - 1 and "replayed" in denoiser.told
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


def test_a_step_that_cannot_be_recorded_is_computed_or_refused(dfile) -> None:
    wanted = walked(made(dfile, kept=False), "euler")
    denoiser = GraphedDenoiser(made(dfile, kept=False), record=cannot)
    assert same(walked(denoiser, "euler"), wanted)
    assert denoiser.told == "no: a step could not be recorded (RuntimeError: operation not permitted)"
    with pytest.raises(ConfigError, match=r"runtime\.graph=on: .*\(RuntimeError: operation.*use runtime\.graph=off"):
        GraphedDenoiser(made(dfile, kept=False), strict=True, record=cannot)(*latents(), 0)


def test_a_replay_that_is_checked_has_to_give_the_same(dfile) -> None:
    wanted = walked(made(dfile, kept=False), "euler")
    right, wrong = StandIn(), StandIn(off=1e-3)
    good, bad = (GraphedDenoiser(made(dfile, kept=False), checked=True, record=r) for r in (right, wrong))
    assert same(walked(good, "euler"), wanted) and right.replays == SCHEDULE.evaluations
    assert same(walked(bad, "euler"), wanted) and wrong.replays == 1
    assert "replayed" in good.told and "a replay does not give what the step gave" in bad.told


SMALL = {"rows": ROWS, "steps": STEPS, "gemm": "dense", "attention": "sdpa", "world": 1, "resident": None}


def told(device: str = "cuda", between: object = "fused", overrides: tuple[str, ...] = (), **changed) -> str | None:
    """Why auto would not, in a run that is as small and as long as it has to be but for what is changed."""
    asked = SMALL | changed
    plan = SimpleNamespace(
        layout=Layout(sp=asked["world"]), stored=SimpleNamespace(resident_blocks=asked["resident"]), **asked
    )
    denoiser = SimpleNamespace(view=SimpleNamespace(elementwise=between))
    return against(denoiser, compose(list(overrides)), plan, torch.device(device))


def test_auto_replays_small_canvases_over_many_steps_on_one_gpu() -> None:
    assert told() is None
    assert told(attention="flash4") is None and told(attention="sdpa_cudnn+sliced") is None
    for changed, why in (
        ({"device": "cpu"}, "CUDA devices"),
        ({"world": 2}, "one rank"),
        ({"resident": 2}, "offload"),
        ({"overrides": ("attention.capture=/tmp/unmade",)}, "capture"),
        ({"between": PLAIN}, "not the fused one"),
        ({"gemm": "nvfp4"}, "products are nvfp4"),
        ({"attention": "sage2"}, "attention=sage2"),
        ({"rows": ROWS + 1}, "2401 rows"),
        ({"steps": STEPS - 1}, "23 steps"),
    ):
        assert why in (told(**changed) or ""), changed


def test_what_was_asked_for_is_done_and_told() -> None:
    plan = SimpleNamespace(attention="flash4", layout=Layout(), stored=SimpleNamespace(resident_blocks=None))
    denoiser, cpu = SimpleNamespace(weights=None), torch.device("cpu")
    same_one, how = graphing.graphed(denoiser, compose(["runtime.graph=off"]), plan, cpu)
    assert same_one is denoiser and how() == "no: as asked"
    other, how = graphing.graphed(denoiser, compose(["runtime.graph=on"]), plan, cpu)
    assert isinstance(other, GraphedDenoiser) and other._strict and other._checked and how() == other.told


def test_graphs_are_refused_where_the_host_or_others_take_part() -> None:
    asked = compose(["runtime.graph=on"])
    with pytest.raises(ConfigError, match=r"runtime\.graph=on is for CUDA devices, and this is cpu; .*graph=auto"):
        check_cuda(asked, "cpu")
    check_cuda(asked, "cuda"), check_graph(asked, Layout()), check_graph(Config(), Layout(sp=2))
    for config, layout, why in (
        (asked, Layout(sp=2), r"is for one rank, and these are 2"),
        (asked, Layout(dp=3), r"is for one rank, and these are 3"),
        (compose(["runtime.graph=on", "runtime.offload=blocks"]), Layout(), r"runtime\.offload=blocks"),
        (compose(["runtime.graph=on", "attention.capture=/tmp/unmade"]), Layout(), r"attention\.capture"),
    ):
        with pytest.raises(ConfigError, match=rf"runtime\.graph=on .*{why}; use runtime\.graph=auto"):
            check_graph(config, layout)
    with pytest.raises(ConfigError, match=r"runtime\.graph=onn: must be one of auto, off, on; did you mean 'on'"):
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
def test_a_run_replays_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_settings(monkeypatch)
    wanted, stand_in = stages(tmp_path, "cpu"), StandIn()
    monkeypatch.setattr(graphing, "against", lambda *_: None)
    monkeypatch.setattr(graphing, "GraphedDenoiser", partial(GraphedDenoiser, record=stand_in))
    found = stages(tmp_path, "cpu")
    assert stand_in.replays == 4 and found["trace"].keys() == wanted["trace"].keys()
    assert all(torch.equal(found["trace"][name], wanted["trace"][name]) for name in wanted["trace"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["plain", "fused"])
@pytest.mark.parametrize("kept", [False, True])
def test_on_a_gpu_a_graph_gives_the_same_bits(dfile, way: str, kept: bool, dtype: torch.dtype) -> None:
    elementwise = fused.load() if way == "fused" else PLAIN
    given = {"kept": kept, "device": "cuda", "dtype": dtype, "elementwise": elementwise}
    wanted = walked(made(dfile, **given), "res_multistep", "cuda")
    denoiser = GraphedDenoiser(made(dfile, **given), strict=True)
    assert same(walked(denoiser, "res_multistep", "cuda"), wanted) and "replayed" in denoiser.told
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
        denoiser = GraphedDenoiser(denoiser_of(weights, plan, comm, **way), strict=True, checked=True)
        assert run_steps(denoiser, plan, comm).sha256 == wanted.sha256 and "replayed" in denoiser.told


@pytest.mark.gpu
def test_on_a_gpu_graphs_come_and_go_with_their_denoisers(dfile) -> None:
    """Work of other sizes between replays, and a second graph, change nothing; the memory is given back."""
    given = {"kept": True, "device": "cuda", "dtype": torch.bfloat16, "elementwise": fused.load()}
    plain, other = made(dfile, **given), made(dfile, kept=False, device="cuda")
    wanted = [[x.cpu() for x in plain(*latents("cuda"), step)] for step in range(5)]
    held = []
    for _ in range(4):
        denoiser = GraphedDenoiser(made(dfile, **given), strict=True)
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
def test_on_a_gpu_steps_that_wait_for_the_host_go_on_unrecorded(dfile) -> None:
    """The last here, since it leaves torch with a recording that failed."""

    def waits(*heads: Tensor) -> Tensor:
        return sdpa(*heads).cpu().to("cuda")

    def waiting() -> Denoiser:
        denoiser = made(dfile, kept=False, device="cuda")
        denoiser.view = replace(denoiser.view, attention=waits)
        return denoiser

    wanted, denoiser = walked(waiting(), "euler", "cuda"), GraphedDenoiser(waiting())
    assert same(walked(denoiser, "euler", "cuda"), wanted) and "could not be recorded" in denoiser.told
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with pytest.raises(ConfigError, match=r"runtime\.graph=on: a step cannot be recorded here"):
        GraphedDenoiser(waiting(), strict=True)(*latents("cuda"), 0)
