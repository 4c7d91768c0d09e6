"""The benchmark that tells where a step's time goes: its arithmetic, whose kernel is whose, and small runs of it."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from world import World

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import alone
from kernel_times import ATTENTION, EXCHANGE, Kernel, length, longest, shared, summary, union
from profiled import TURN, kernels_of

from benchmarks import trace
from h3dist.bench.steps import denoiser_of, random_weights
from h3dist.plan import Layout

SMALL = ["--size", "small", "--device", "cpu", "--shape", "64x64x22", "--blocks", "2"]
CPU = torch.device("cpu")


def test_a_union_counts_what_is_covered_once():
    assert union([(5, 7), (0, 2), (1, 3), (3, 4), (5, 6)]) == [(0, 4), (5, 7)]
    assert length([(0, 2), (1, 3), (5, 5)]) == 3
    assert length([]) == 0


def test_shared_time_is_that_of_both():
    assert shared([(0, 4), (6, 8)], [(3, 7)]) == 2
    assert shared([(0, 1)], [(1, 2)]) == 0
    assert shared([(0, 4), (1, 5)], [(2, 3), (2, 3)]) == 1


NAMES = {
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "exchange",
    "Memcpy PtoP (Device -> Device)": "exchange",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "attention",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal>": "products",
    "void comfy::dequantize_nvfp4_kernel<__nv_bfloat16>": "dequantise",
    "_dequantise": "dequantise",
    "void quantize_nvfp4_kernel<true>": "elementwise",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>": "elementwise",
    "Memcpy DtoD (Device -> Device)": "elementwise",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_a_kernel_is_of_a_kind_by_its_name(name, kind):
    assert Kernel(name, 0, 1).category == kind


@pytest.mark.parametrize(
    ("name", "within", "kind"),
    [
        ("direct_copy_kernel_cuda", EXCHANGE, "packing"),
        ("direct_copy_kernel_cuda", ATTENTION, "attention"),
        ("direct_copy_kernel_cuda", TURN, "elementwise"),
        ("ncclDevKernel_SendRecv", EXCHANGE, "exchange"),
        ("ncclDevKernel_SendRecv", ATTENTION, "exchange"),
        ("nvjet_tst_256x128", EXCHANGE, "products"),  # a run of columns, multiplied while another is summed
        ("nvjet_tst_256x128", ATTENTION, "attention"),  # attention by two products
    ],
)
def test_what_has_no_telling_name_belongs_where_it_was_launched(name, within, kind):
    assert Kernel(name, 0, 1, within).category == kind


TIMELINE = [
    Kernel("nvjet", 0, 1000),
    Kernel("direct_copy", 1000, 1200, EXCHANGE),
    Kernel("ncclDevKernel", 1200, 3200, EXCHANGE),  # 800 of it beside attention, 1200 beside nothing
    Kernel("flash_fwd", 2400, 4400, ATTENTION),
    Kernel("silu", 4900, 5000),  # after a gap
    Kernel("ncclDevKernel", 4950, 5000, EXCHANGE),
]


def test_a_trace_of_two_blocks_in_sum():
    found = summary(TIMELINE, 2)
    assert found["categories"] == pytest.approx(
        {"products": 0.5, "attention": 1.0, "dequantise": 0, "exchange": 1.025, "packing": 0.1, "elementwise": 0.05}
    )
    wanted = {"idle": 0.25, "wall": 2.5, "exposed": 0.6, "exposed_share": 0.24, "beside": 0.4}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_what_all_kernels_take_and_idle_time_make_up_the_wall_where_none_is_beside_another():
    alone_ = [kernel for kernel in TIMELINE if kernel.category != "exchange"]
    found = summary(alone_, 1)
    assert sum(found["categories"].values()) + found["idle"] == pytest.approx(found["wall"])
    assert found["exposed"] == found["beside"] == 0


def test_the_longest_kernels_come_first_by_name_and_kind():
    rows = longest([*TIMELINE, Kernel("x" * 101, 0, 9000), Kernel("x" * 102, 0, 9000)], 2, count=3)
    assert [(row["name"], row["category"], row["calls"]) for row in rows] == [
        ("x" * 100, "elementwise", 1.0),
        ("ncclDevKernel", "exchange", 1.0),
        ("flash_fwd", "attention", 0.5),
    ]
    assert rows[0]["ms"] == pytest.approx(9.0)


@dataclass
class Event:
    """One event as the profiler's library gives it; times in nanoseconds."""

    label: str
    start: int
    stop: int
    device: DeviceType = DeviceType.CPU
    correlation: int = 0
    linked: int = 0
    drawn: bool = False
    thread: int = 1
    stream: int = 7

    def __post_init__(self):
        told = {
            "name": self.label, "start_ns": self.start, "end_ns": self.stop, "device_type": self.device,
            "correlation_id": self.correlation, "linked_correlation_id": self.linked,
            "is_user_annotation": self.drawn, "start_thread_id": self.thread,
            "device_resource_id": self.stream,
        }  # fmt: skip
        for name, value in told.items():
            setattr(self, name, lambda value=value: value)


def test_a_kernel_belongs_where_the_host_launched_it_however_late_it_ran():
    gpu = {"device": DeviceType.CUDA}
    events = [
        Event(TURN, 0, 50),
        Event(TURN, 100, 400, correlation=1),
        Event(EXCHANGE, 200, 300, correlation=2),
        Event("aten::copy_", 205, 215, correlation=7),
        Event("cudaLaunchKernel", 210, 212, correlation=90, linked=7),
        Event(ATTENTION, 220, 240, correlation=3),
        Event("cuLaunchKernelEx", 230, 232, correlation=7, linked=3),  # the runtime counts for itself: 7 is another's
        Event("aten::view", 330, 331, correlation=90),  # so do operators
        Event("aten::stack", 250, 260, correlation=8),
        Event("aten::silu", 310, 320, correlation=9),
        Event("cudaLaunchKernel", 40, 41, correlation=89, linked=5),
        Event("first turn's", 110, 120, **gpu, correlation=89, linked=5),
        Event("copy", 900, 950, **gpu, correlation=90, linked=7),
        Event("mine", 950, 990, **gpu, correlation=7, linked=3),
        Event("stacked", 990, 995, **gpu, correlation=91, linked=8),  # its launch is not told, its operator is
        Event("silu", 995, 1999, **gpu, correlation=92, linked=9),
        Event("Memcpy DtoD", 950, 9950, **gpu, correlation=93, linked=8, stream=20),  # from one GPU to another
        Event("nccl:all_to_all", 900, 999, **gpu, linked=2),
        Event(EXCHANGE, 900, 999, **gpu, linked=2),
        Event("anything", 900, 999, **gpu, linked=2, drawn=True),
    ]
    found = kernels_of(events, "cuda")
    assert found == [
        Kernel("copy", 0.9, 0.95, EXCHANGE),
        Kernel("mine", 0.95, 0.99, ATTENTION),
        Kernel("stacked", 0.99, 0.995, EXCHANGE),
        Kernel("silu", 0.995, 1.999, TURN),
        Kernel("Memcpy DtoD", 0.95, 9.95, EXCHANGE, aside=True),
    ]
    assert [kernel.category for kernel in found] == ["packing", "attention", "packing", "elementwise", "exchange"]


def test_a_launch_that_no_operator_made_is_found_by_its_own_id():
    """Triton launches by the driver, from Python: its calls name no operator, whose ids count from 1 as theirs do."""
    gpu = {"device": DeviceType.CUDA}
    events = [
        Event(TURN, 0, 50),
        Event(TURN, 100, 500, correlation=1),
        Event("cuLaunchKernelEx", 40, 41, correlation=4),
        Event(EXCHANGE, 110, 200, correlation=2),
        Event("cuLaunchKernelEx", 120, 122, correlation=5),
        Event("cudaLaunchKernelExC", 130, 132, correlation=6, linked=3),
        Event(ATTENTION, 210, 300, correlation=3),
        Event("cuLaunchKernel", 220, 222, correlation=7),
        Event("cumsum", 310, 320, correlation=9),
        Event("aten::mul", 330, 340, correlation=5),  # an operator's id, not the call's
        Event("aten::add", 110, 120, correlation=8),
        Event("first turn's", 150, 190, **gpu, correlation=4),
        Event("_turn", 215, 290, **gpu, correlation=5),  # it ran in the host's next range
        Event("copy", 290, 295, **gpu, correlation=6, linked=3),
        Event("_fill", 350, 450, **gpu, correlation=7),
        Event("unknown", 460, 470, **gpu, correlation=8),  # its launch is not told; operators have no say in its id
        Event("unknown", 460, 470, **gpu, correlation=9),
    ]
    assert kernels_of(events, "cuda") == [
        Kernel("_turn", 0.215, 0.29, EXCHANGE),
        Kernel("copy", 0.29, 0.295, EXCHANGE),
        Kernel("_fill", 0.35, 0.45, ATTENTION),
        Kernel("unknown", 0.46, 0.47, TURN),
        Kernel("unknown", 0.46, 0.47, TURN),
    ]


def test_on_a_cpu_an_operator_counts_that_no_other_calls():
    events = [
        Event(TURN, 0, 50),
        Event(TURN, 100, 400),
        Event("aten::linear", 110, 150),
        Event("aten::addmm", 112, 149),
        Event("gloo:all_to_all", 120, 180, thread=2),
        Event(EXCHANGE, 150, 200),
        Event("aten::copy_", 160, 170),
    ]
    found = [(kernel.name, kernel.category) for kernel in kernels_of(events, "cpu")]
    assert found == [("aten::linear", "products"), ("gloo:all_to_all", "exchange"), ("aten::copy_", "packing")]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    with World(2) as world:
        found = world.run(profile, str(folder), ranks=2, limit=90)
    assert found[0] == found[1] | {"environment": found[0]["environment"]}
    return found[0] | {"folder": folder}


def profile(seat, folder):
    words = [*SMALL, "--ways", "heads/1,heads/3,hdden/1,heads/3+copy,hidden/1", "--json", f"{folder}/trace.json"]
    args = trace.arguments([*words, "--chrome", f"{folder}/first.json.gz"])
    spec = trace.spec_of(args, 2)
    return trace.run(args, spec, seat.connect(spec.layout(2)), CPU)


def test_two_ranks_are_profiled_and_a_way_that_fails_stops_no_other(record):
    assert [(way["way"], bool(way["failed"])) for way in record["ways"]] == [
        ("heads/1", False), ("heads/3", False), ("hdden/1", True), ("heads/3+copy", True),
        ("hidden/1", False),
    ]  # fmt: skip
    assert "did you mean 'hidden'" in record["ways"][2]["failed"]
    assert "exchange.transport=copy: " in record["ways"][3]["failed"], "not over gloo"
    kept = json.loads((record["folder"] / "trace.json").read_text())
    assert kept["ways"] == record["ways"] and kept["layout"] == {"sp": 2, "tp": 1, "dp": 1}
    assert (record["folder"] / "first.json.gz").stat().st_size > 1000


def test_a_block_calls_what_its_exchange_asks_for(record):
    """Of q, k and v and of the output one move a group; attention once a group; a block's four products."""
    for way, moves, groups in (("heads/1", 2, 1), ("heads/3", 6, 3), ("hidden/1", 1, 1)):
        found = next(each for each in record["ways"] if each["way"] == way)
        calls = {(row["category"], row["name"]): row["calls"] for row in found["ranks"][0]["kernels"]}
        assert calls["exchange", "gloo:all_to_all"] == moves
        assert calls["attention", "aten::scaled_dot_product_attention"] == groups
        assert calls["products", "aten::linear"] == 3 + 1 / 2  # rank 0 embeds text alone; outputs once
        assert calls["products", "aten::mm"] == (2 if way == "hidden/1" else 1)  # own rows, then the other rank's
        for rank in found["ranks"]:
            assert all(rank["categories"][kind] > 0 for kind in ("products", "attention", "exchange", "packing"))
            assert 0 < rank["exposed"] <= rank["categories"]["exchange"]
            assert rank["unprofiled"] > 0 and rank["quiet"] > 0


@pytest.mark.parametrize(("way", "pieces"), [("heads/1", 4), ("heads/3", 12), ("hidden/1", 0), ("hidden/3", 0)])
def test_alone_a_rank_does_its_own_part_of_the_exchange_and_counts_its_bytes(way, pieces):
    """Each piece is packed once and unpacked once, also to itself."""
    args = trace.arguments([*SMALL, "--ways", way, "--json", "-"])
    plan = trace.plan_of(way, args, trace.replace(trace.spec_of(args, 1), blocks=1), Layout(sp=4), CPU)
    comm = alone.still_comm(plan, 3, CPU)
    denoiser = denoiser_of(random_weights(plan, 3, CPU), plan, comm)
    moves, _ = alone.moves_of(plan, 3, denoiser, denoiser.view.exchange)
    before = dict(comm.counted)
    moves()
    counted = {label: count - before[label] for label, count in comm.counted.items() if label != "outputs"}
    assert counted == {label: plan.shares[3].sent.get(label, 0) / trace.EVALUATIONS for label in counted}
    calls = {row["name"]: row["calls"] for row in alone.measure(plan, 3, CPU, fused=False)["kernels"]}
    rotated = 2 * pieces if pieces else 2  # q and k of each piece, or where they lie
    assert calls["aten::rms_norm"] == rotated
    # Channels that do not turn, of q and k; v of each piece; the output of each.
    assert calls["aten::copy_"] == rotated + pieces + 4 * plan.exchange.groups
    assert not [name for name in calls if "attention" in name]


def test_alone_tells_every_way_and_goes_on_after_one_that_fails(tmp_path, capsys):
    out = tmp_path / "alone.json"
    ways = "heads/2/int8,hidden/1+pcked,hidden/1+packed,heads/1"
    words = [*SMALL, "--alone", "2", "--ways", ways, "--json", str(out)]
    trace.main(words)
    rows = json.loads(out.read_text())["alone"]
    assert [(row["way"], bool(row["failed"])) for row in rows] == [
        ("heads/2/int8", False), ("hidden/1+pcked", True), ("hidden/1+packed", False), ("heads/1", False),
    ]  # fmt: skip
    told = [row for row in rows if not row["failed"]]
    for row in told:
        assert row["rank"] == 0 and row["turn"] > 0
        assert row["share"] == pytest.approx((row["moves"] - row["turn"]) / row["block"])
        assert sum(row["parts"].values()) == pytest.approx(row["moves"] - row["turn"], rel=1e-6)
        assert sum(row["shares"].values()) == pytest.approx(row["share"], rel=1e-6)
    coded = ("unpack", "quantise", "dequantise")
    found = [[part for part in coded if row["parts"][part] > 0] for row in told]
    assert found == [[*coded], ["unpack"], ["unpack"]], "of codes the output of own rows is taken as it is"
    packed = {row["name"]: row["calls"] for row in rows[2]["kernels"]}
    assert packed["aten::cat"] == 1, "codes and scales, side by side"
    assert "+pcked must be one of packed, copy; did you mean 'packed'?" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_found_and_told_apart(tmp_path):
    out, gpu = tmp_path / "trace.json", ["--size", "small", "--device", "cuda", "--shape", "192x128x39"]
    trace.main([*gpu, "--blocks", "2", "--ways", "heads/1", "--json", str(out)])
    (way,) = json.loads(out.read_text())["ways"]
    (rank,) = way["ranks"]
    assert all(rank["categories"][kind] > 0 for kind in ("products", "attention", "elementwise"))
    assert rank["categories"]["exchange"] == rank["exposed"] == 0, "one rank has nobody to talk to"
    assert sum(rank["categories"].values()) + rank["idle"] == pytest.approx(rank["wall"], rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "kernels"),
    [
        ("heads/2", {"_turn": 2, "_take": 2}),  # a group
        ("hidden/2", {"_turn": 1, "_take": 2}),
        ("heads/1/int8", {"_turn": 1, "_encode_turned": 1, "_encode": 1, "_decode": 2, "_take": 1}),
    ],
)
def test_on_a_gpu_all_pieces_are_packed_and_unpacked_by_one_kernel_each(tmp_path, way, kernels):
    out, gpu = tmp_path / "alone.json", ["--size", "small", "--device", "cuda", "--shape", "192x128x39"]
    trace.main([*gpu, "--fused", "--alone", "2", "--ways", way, "--json", str(out)])
    (row,) = json.loads(out.read_text())["alone"]
    assert row["failed"] is None
    calls = {kernel["name"]: kernel["calls"] for kernel in row["kernels"]}
    others = sum(calls.values()) - sum(kernels.values())
    assert calls | kernels == calls and others <= 2, "attention may not leave a group's output as it is sent"
