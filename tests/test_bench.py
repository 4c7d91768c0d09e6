"""The benchmark on a CPU: every part, its record, what fails, ranks, and rates made of figures."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from world import World

from h3dist.bench import parts, suite, variants
from h3dist.bench.ratios import ratios
from h3dist.bench.refresh import read_record, refresh, refreshed, rows_of, written
from h3dist.bench.spec import SHAPES, Spec, parse_shape
from h3dist.bench.steps import denoiser_of, random_weights, velocity
from h3dist.bench.suite import LEFT_OUT, Suite
from h3dist.bench.summary import summary
from h3dist.bench.timing import Clock
from h3dist.comm import Comm
from h3dist.errors import ConfigError, PlanError
from h3dist.plan import Layout
from h3dist.plan.cost import dequantised_bytes, elementwise_bytes, step_cost
from h3dist.plan.rates import TABLE, load_rates, read_rates
from h3dist.plan.wires import Wires
from h3dist.topology import Ranks

SPEC = Spec(("96x64x5",), size="small", device="cpu", text_rows=20, repeats=2)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OFFLOAD = {"fused": False, "fused, offload": True}
PARTS = {"weights", "products", "attention.sdpa", "dequantise", "elementwise", "copy", "step"}
pytestmark = pytest.mark.usefixtures("one_thread")


def run_suite(spec: Spec, kept=None) -> dict:
    with Comm.connect(Ranks(), Layout(), CPU, backend="auto") as comm:
        return Suite(spec, Layout(), comm, CPU, kept or (lambda record: None)).run()


@pytest.fixture(scope="module")
def record():
    """All parts at two shapes, diffusers' model beside them."""
    kept = []
    found = run_suite(
        replace(SPEC, shapes=("96x64x5", "64x64x22"), diffusers=True), lambda r: kept.append(json.dumps(r))
    )
    assert len(kept) >= 4, "the record is kept after every shape"
    return json.loads(json.dumps(found))


def test_every_part_is_measured_beside_diffusers(record):
    assert record["form"] == "h3dist-bench" and record["environment"]["torch"] == torch.__version__
    assert record["environment"]["device"] == "CPU" and record["spec"]["size"] == "small"
    for entry in record["shapes"]:
        assert entry["failed"] == {} and entry["parts"].keys() == PARTS | {"diffusers"}
        for name in PARTS - {"weights", "products"}:
            part = entry["parts"][name]
            assert 0 < part["min"] <= part["seconds"] <= part["max"] and part["repeats"] == SPEC.repeats
        assert len(entry["parts"]["step"]["sha256"]) == 64
    assert record["parts"]["diffusers"]["parameter_bytes"] > 0


def test_ratios_are_of_medians(record):
    entry = record["shapes"][0]
    found, blocks = entry["parts"], entry["blocks"]
    floor = blocks * (found["products"]["all"]["seconds"] + found["attention.sdpa"]["seconds"])
    made = entry["ratios"]
    assert made["floor_attention"] == "sdpa" and made["floor_seconds"] == pytest.approx(floor)
    assert made["step_to_floor"] == pytest.approx(found["step"]["seconds"] / floor)
    assert made["diffusers_to_step"] == pytest.approx(found["diffusers"]["seconds"] / found["step"]["seconds"])
    alone = sum(found[name]["seconds"] for name in ("attention.sdpa", "dequantise", "elementwise"))
    left = found["step"]["seconds"] - blocks * (found["products"]["all"]["seconds"] + alone)
    assert made["step_unexplained_seconds"] == pytest.approx(left)
    assert ratios(entry | {"parts": {}}) == {}


def test_work_is_counted_by_the_sizes(record):
    entry = record["shapes"][0]
    plan = SPEC.plan(entry["shape"], Layout(), dtype="float32", capability=None, steps=1)
    dims, S = plan.dims, plan.rows
    products = entry["parts"]["products"]
    assert products["attn.qkv_proj"]["flop"] == 2 * S * 3 * dims.inner * dims.hidden
    four = sum(part["flop"] for name, part in products.items() if name != "all")
    assert products["all"]["flop"] == pytest.approx(four)
    assert entry["parts"]["attention.sdpa"]["flop"] == 4 * S * S * dims.inner
    assert entry["parts"]["elementwise"]["bytes"] == elementwise_bytes(plan, plan.shares[0]) / dims.layers


def test_the_summary_shows_every_part(record):
    text = summary(record)
    assert all(f"| {name} |" in text for name in PARTS - {"products"}) and "| products mlp.fc1 |" in text
    assert text.count("x its floor") == 2 and text.count("x our step") == 2


def test_a_part_that_fails_is_recorded_and_the_others_go_on(monkeypatch):
    def fail(bench):
        raise torch.cuda.OutOfMemoryError("no room\nfor this")

    monkeypatch.setattr(parts, "elementwise", fail)
    entry = run_suite(SPEC)["shapes"][0]
    assert entry["failed"] == {"elementwise": "OutOfMemoryError: no room"}
    assert entry["parts"].keys() == PARTS - {"elementwise"}
    assert "step_to_floor" in entry["ratios"]


def test_a_step_that_fails_leaves_the_steps_done_otherwise(monkeypatch):
    def fail(*rest, **options):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(suite, "velocity", fail)
    monkeypatch.setattr(variants, "choose", lambda names: (variants.Variant("again"),))
    entry = run_suite(replace(SPEC, variants=("all",), blocks=1, repeats=1))["shapes"][0]
    assert entry["failed"]["step"] == "OutOfMemoryError: no room" and "step" not in entry["parts"]
    assert entry["variants"]["again"]["error"] is None


def fail_on_the_second(seat) -> dict:
    comm, copy = seat.connect(Layout(sp=2)), parts.copy

    def fail(bench):
        raise MemoryError("no room")

    parts.copy = fail if seat.rank else copy
    try:
        return Suite(replace(SPEC, repeats=1), Layout(sp=2), comm, CPU).run()
    finally:
        parts.copy = copy


def test_a_part_that_fails_on_one_rank_has_failed_on_all():
    with World(2) as world:
        for record in world.run(fail_on_the_second, ranks=2):
            entry = record["shapes"][0]
            assert entry["failed"] == {"copy": "MemoryError: no room"}
            assert entry["parts"].keys() == PARTS - {"copy"} | {"exchange"}


def test_weights_that_do_not_fit_leave_the_other_shapes(monkeypatch):
    made = suite.random_run

    def fail_once(plan, *rest, **options):
        if plan.geometry.frames == 5:
            raise MemoryError
        return made(plan, *rest, **options)

    monkeypatch.setattr(suite, "random_run", fail_once)
    first, second = run_suite(replace(SPEC, shapes=("96x64x5", "64x64x22")))["shapes"]
    assert first["failed"] == {"weights": "MemoryError: "} and first["parts"] == {}
    assert second["failed"] == {} and "step" in second["parts"]


def test_no_part_is_begun_once_the_time_is_up():
    found = run_suite(replace(SPEC, limit=-1, diffusers=True))
    assert set(found["shapes"][0]["failed"].values()) == {LEFT_OUT} and found["failed"] == {"diffusers": LEFT_OUT}


def test_steps_done_otherwise_stand_beside_the_plain_one():
    """Exact ones equal it; rounded ones are as far off as their formats; what cannot be here says why."""
    found = run_suite(replace(SPEC, variants=("all",), blocks=2, repeats=1))
    entry = found["shapes"][0]
    assert entry["blocks"] == 2 and entry["variants"].keys() == {"reused", "gemm.fp8", "gemm.int8"}
    errors = {name: variant["error"] for name, variant in entry["variants"].items()}
    assert errors["reused"] == 0 and 0.01 < errors["gemm.fp8"] < 0.05 and 0.003 < errors["gemm.int8"] < 0.02
    told = entry["ratios"]["variants"]["gemm.fp8"]
    assert told["step_to_floor"] * entry["ratios"]["floor_seconds"] == pytest.approx(
        entry["variants"]["gemm.fp8"]["seconds"]
    )
    assert entry["ratios"]["floor_products"] == "products" and entry["ratios"]["floor_attention"] == "sdpa"
    assert {"products_fp8", "products_int8", "weights.fp8", "weights.int8"} <= entry["parts"].keys()
    assert {"fused", "fused, flash4", "gemm.fp8, fused, cudnn_fp8"} <= entry["failed"].keys()
    assert "CUDA" in entry["failed"]["fused"] and "CUDA" in entry["absent"]["flash4"]
    assert entry["parts"]["attention.sdpa"]["error"] < 1e-6 and entry["parts"]["attention.sdpa"]["wrong"] is None
    text = summary(found)
    assert "| gemm.int8 |" in text and "| step | ms | x floor |" in text


def test_the_elementwise_part_computes_no_product(monkeypatch):
    """Neither products, attention nor exchange are called: their time would count as memory's."""
    with Comm.connect(Ranks(), Layout(), CPU, backend="auto") as comm:
        plan = SPEC.plan("96x64x5", Layout(), dtype="float32", capability=None, steps=2)
        denoiser = suite.random_run(plan, comm, CPU)

    def refuse(*_):
        raise AssertionError("called")

    view = replace(denoiser.view, attention=refuse, linear=refuse, exchange=None)
    denoiser.view = view
    bench = parts.Bench(plan, plan.shares[0], denoiser, Clock(CPU, 1))
    assert parts.elementwise(bench)["seconds"] > 0


def test_clocks_warm_up_and_count():
    calls = []
    timing = Clock(CPU, 3).time(lambda: calls.append(0), warm=2)
    assert len(calls) == 5 and len(timing.seconds) == 3
    calls.clear()
    assert len(Clock(CPU, 3).host_time(lambda: calls.append(0)).seconds) == 3 and len(calls) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("864x480", "WIDTHxHEIGHTxFRAMES"), ("0x480x141", "WIDTHxHEIGHTxFRAMES"), ("864x480x140", "864x480x141"),
        ("860x480x141", "832x480x141"),
    ],
)  # fmt: skip
def test_shapes_that_cannot_be(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_shape(text)


def test_shapes_and_layouts():
    assert parse_shape("864x480x141").video_rows == 17010
    assert all(parse_shape(shape) for shapes in SHAPES.values() for shape in shapes)
    assert replace(SPEC, mode="hybrid").layout(4) == Layout(sp=2, tp=2)
    assert Spec.from_dict(json.loads(json.dumps(asdict(SPEC)))) == SPEC
    with pytest.raises(PlanError, match="at most 14"):
        SPEC.layout(15)


@pytest.mark.limit(200)
def test_ranks_measure_together_and_one_command_writes_the_record(tmp_path):
    """Two ranks over gloo, started by the command; what each collective sends is what the plan says."""
    out = tmp_path / "bench.json"
    words = ["--size", "small", "--device", "cpu", "--shape", "96x64x5", "--text-rows", "20", "--repeats", "1"]
    command = [sys.executable, "-m", "h3dist", "bench", *words, "--gpus", "2", "--mode", "ulysses", "--out", str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = read_record(out)
    assert "| exchange heads.to |" in done.stdout and list(tmp_path.iterdir()) == [out]
    entry = found["shapes"][0]
    assert entry["parts"]["exchange"].keys() == {"heads.to", "heads.from", "amax"} and entry["failed"] == {}
    plan = SPEC.plan("96x64x5", Layout(sp=2), dtype="float32", capability=None, steps=2)
    assert entry["parts"]["step"]["sent"] == plan.shares[0].sent | {"text": 0}
    one_block = plan.shares[0].sent["heads.to"] / (2 * plan.dims.layers)
    assert entry["parts"]["exchange"]["heads.to"]["bytes"] == one_block


def test_the_command_refuses_in_words(tmp_path):
    def refuse(*words):
        return subprocess.run(
            [sys.executable, "-m", "h3dist", "bench", *words],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
        )

    wrong = refuse("--size", "large")
    assert wrong.returncode == 2 and "--size large: must be one of released, small" in wrong.stderr
    other = tmp_path / "other.json"
    other.write_text('{"form": "x"}')
    assert "is no record of h3dist bench" in refuse("--refresh", str(other)).stderr


def made_up(device: str = "NVIDIA H200", **layout) -> dict:
    """A record as an H200 would leave it, with a rate twice the table's for attention."""
    spec = Spec(("864x480x141", "1344x768x124"), device="cuda")
    shapes = []
    for shape in spec.shapes:
        plan = spec.plan(shape, Layout(), dtype="bfloat16", capability=(9, 0), steps=6)
        share, blocks = plan.shares[0], plan.dims.layers
        cost = step_cost(plan, load_rates().named("H200"), Wires({}, {}))
        S = plan.rows
        flops = 2 * S * 5376 * (4 * 7168 + 3 * 14336)
        found = {
            "products": {"all": {"seconds": cost.products / blocks, "flop": flops}},
            "attention.sdpa": {"seconds": cost.attention / 2 / blocks, "flop": 4 * S * S * 7168, "exact": True},
            "dequantise": {"seconds": 1e-3, "bytes": dequantised_bytes(plan, share) / blocks},
            "elementwise": {"seconds": 1e-3, "bytes": elementwise_bytes(plan, share) / blocks},
            "copy": {"seconds": 1e-3, "bytes": 4e9},
            "host": {"seconds": 5e-4},
            "step": {"seconds": cost.seconds},
        }
        entry = {"shape": shape, "rows": S, "blocks": blocks, "attention": "sdpa", "parts": found, "failed": {}}
        shapes.append(entry | {"ratios": ratios(entry)})
    made = {"device": device, "torch": "2.11.0", "commit": "0123456789abcdef", "made": "2026-11-30T10:00Z", "links": []}
    return {
        "form": "h3dist-bench", "version": 1, "spec": asdict(spec), "layout": {"dp": 1, "sp": 1, "tp": 1} | layout,
        "dtype": "bfloat16", "environment": made, "shapes": shapes,
    }  # fmt: skip


def test_figures_become_rates_that_add_up_to_the_steps(tmp_path):
    record, path = made_up(), tmp_path / "bench.json"
    path.write_text(json.dumps(record))
    table = tmp_path / "rates.json"
    table.write_text(TABLE.read_text())
    rows = {row["what"]: row for row in refresh(path, table)}
    old, new = load_rates(), read_rates(table)
    assert rows["attention.sdpa"]["value"] == pytest.approx(2 * old.named("H200").attention["sdpa"], rel=1e-3)
    assert rows["launch"]["value"] == 5e-4 and rows["copy"]["value"] == pytest.approx(4e12)
    assert rows["product.bfloat16"]["kind"] == "measured" and rows["product.bfloat16"]["date"] == "2026-11-30"
    assert "h3dist bench at 17880, 38110 rows, torch 2.11.0, commit 0123456789ab" in rows["copy"]["source"]
    device = new.named("H200")
    assert device.attention["sdpa"] == rows["attention.sdpa"]["value"] and device.nvlink == old.named("H200").nvlink
    spec = Spec.from_dict(record["spec"])
    plans = [spec.plan(shape, Layout(), dtype="bfloat16", capability=(9, 0), steps=1) for shape in spec.shapes]
    predicted = sum(step_cost(plan, device, Wires({}, {})).seconds for plan in plans)
    assert predicted == pytest.approx(sum(entry["parts"]["step"]["seconds"] for entry in record["shapes"]), rel=1e-3)
    untouched = [row for row in new.rows if row["of"] != "H200"]
    assert untouched == [row for row in old.rows if row["of"] != "H200"]


def test_the_shipped_table_is_as_it_would_be_written():
    text = TABLE.read_text()
    assert written(json.loads(text)) == text
    assert refreshed(text, []) == text
    rows = rows_of(made_up(), load_rates())
    again = refreshed(refreshed(text, rows), rows)
    assert again == refreshed(text, rows) != text


def test_the_exchange_between_gpus_gives_a_rate_of_their_links():
    record = made_up(sp=2)
    record["environment"]["links"] = ["NV18"]
    for entry in record["shapes"]:
        moved = {"seconds": 1e-3, "bytes": 3e8}
        entry["parts"]["exchange"] = {"heads.to": moved, "heads.from": moved}
    rows = rows_of(record, load_rates())
    assert {"of": "NV", "what": "efficiency", "value": round(3e11 / 450e9, 4), "unit": ""}.items() <= rows[-1].items()
    record["environment"]["links"] = ["SYS"]
    assert rows_of(record, load_rates())[-1]["of"] == "SYS" and rows_of(record, load_rates())[-1]["value"] == 3e11
    record["environment"]["links"] = ["NODE", "SYS"]
    assert all(row["of"] == "H200" for row in rows_of(record, load_rates()))


def test_a_device_without_a_class_is_refused():
    with pytest.raises(ConfigError, match=r"NVIDIA A100 is of no class .* rates.json"):
        rows_of(made_up("NVIDIA A100"), load_rates())


def test_the_floor_alone_is_beside_steps_done_otherwise():
    found = run_suite(replace(SPEC, variants=("reused",), floor_only=True, blocks=2, repeats=1))
    entry = found["shapes"][0]
    assert entry["parts"].keys() == {"weights", "products", "attention.sdpa", "velocity", "weights.auto"}
    assert entry["variants"]["reused"]["error"] == 0 and entry["ratios"]["variants"]["reused"]["step_to_floor"] > 0
    assert "| reused |" in summary(found)


def test_blocks_left_in_the_host_s_memory_are_measured_beside_those_on_the_device(monkeypatch):
    ways = tuple(variants.Variant(name, offload=name == "away") for name in ("here", "away"))
    monkeypatch.setattr(variants, "choose", lambda names: ways)
    found = run_suite(replace(SPEC, variants=("all",), floor_only=True, blocks=1, repeats=1))["shapes"][0]
    assert found["variants"]["away"]["error"] == 0 and "offload" not in found["variants"]["here"]
    only = run_suite(replace(SPEC, variants=("all",), parts=False, blocks=1, repeats=1))
    entry = only["shapes"][0]
    assert entry["parts"].keys() == {"weights.auto", "weights.auto.offload"} and entry["failed"] == {}
    away = entry["variants"]["away"]
    assert away["error"] is None and away["offload"]["alone_bytes_per_second"] > 0
    assert away["offload"]["bytes_per_second"] == pytest.approx(away["offload"]["bytes"] / away["seconds"])
    assert "away: 0.0" in summary(only) and "with nothing done between" in summary(only)


@pytest.mark.gpu
def test_blocks_left_in_the_host_s_memory_give_the_same_steps_and_take_two_places():
    with Comm.connect(Ranks(), Layout(), CUDA, backend="auto") as comm:
        plan = replace(SPEC, blocks=8).plan("96x64x5", Layout(), dtype="bfloat16", capability=None, steps=2)
        found = [
            measured_on(variants.Variant("x", fused=True, offload=offload), plan, comm) for offload in (False, True)
        ]
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1]["peak_bytes"] < found[0][1]["peak_bytes"]
    assert found[1][1]["resident_bytes"] < 0.6 * found[0][1]["resident_bytes"]


def measured_on(variant: variants.Variant, plan, comm) -> tuple[torch.Tensor, dict]:
    """A velocity and the variant's figures."""
    weights = random_weights(plan, 0, CUDA, offload=variant.offload)
    velocity_ = velocity(denoiser_of(weights, plan, comm, fused=variant.fused), plan)
    return velocity_, variants.measure(variant, weights, plan, comm, 0, velocity_)


def test_variants_are_chosen_by_set_or_by_name():
    fp8 = {variant.name for variant in variants.choose(["fp8"])}
    assert len(fp8) == 3 and all(name.startswith("gemm.fp8") for name in fp8)
    assert [v.name for v in variants.choose(["reused", "fused"])] == ["fused", "reused"]
    assert variants.choose(["all"]) == variants.ALL and variants.choose([]) == ()
    assert {v.name: v.offload for v in variants.choose(["offload"])} == OFFLOAD
    assert not any(variant.offload for variant in variants.choose(["exact", "fp8", "int8"]))
    assert [v.name for v in variants.choose(["graph"])] == ["fused", "fused, graph"]
    with pytest.raises(ConfigError, match=r"--variants 'fusd'.*exact.*did you mean"):
        variants.choose(["fusd"])
