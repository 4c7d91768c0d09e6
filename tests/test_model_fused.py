"""The fused path against its plain twins. Triton's kernels run on a GPU, or on a CPU by its interpreter where triton is
installed and TRITON_INTERPRET=1 is set; the rest runs anywhere.
"""

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp4 import nvfp4
from torch import Tensor
from world import World

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import activation_fp8
from h3dist.bench.spec import Spec
from h3dist.bench.steps import denoiser_of, random_weights, velocity
from h3dist.checkpoint.formats import PlainWeight
from h3dist.comm import Comm
from h3dist.comm.pieces import Place
from h3dist.errors import ConfigError, MissingDependency
from h3dist.fp8 import to_rows_of_fp8
from h3dist.fusing import agree_on_elementwise
from h3dist.model import fused
from h3dist.model.dense import dense_linear
from h3dist.model.elementwise import NORM_EPS, PLAIN, Run
from h3dist.model.narrow import Fp8Rows, activation_of_run, fp8_rounding, narrowed
from h3dist.model.reused import ReusedLinear, made_dense, plain_fill, triton_fill
from h3dist.model.rotary import Rotation, rotate, rotation
from h3dist.plan import Layout
from h3dist.topology import Ranks

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.bfloat16]
RUNS = (Run(0, 3, 1), Run(3, 4, 2), Run(4, 11, 0))
ROWS, C, R = 11, 5376 // 4 + 3, 3


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """As far apart as a few roundings to the dtype allow."""
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def rows(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def table(device: str, dtype: torch.dtype) -> Tensor:
    made = 0.3 * rows("cpu", torch.float32, R, 6, C, seed=1)
    made[:, [1, 4]] += 1
    return made.to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_norm_and_modulation(device: str, dtype: torch.dtype) -> None:
    x, norm = rows(device, dtype, ROWS, C), 1 + rows(device, dtype, C, seed=2) / 4
    for part in (table(device, dtype)[:, :3], table(device, dtype)[:, 3:], table(device, dtype)[:, :2]):
        found = fused.load().modulate(x, norm, part, RUNS)
        close(found, PLAIN.modulate(x, norm, part, RUNS), dtype)
    assert fused.load().modulate(x[:0], norm, part, ()).shape == (0, C)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_gated_addition_norm_and_modulation(device: str, dtype: torch.dtype) -> None:
    x, y, norm = rows(device, dtype, ROWS, C), rows(device, dtype, ROWS, C, seed=3), rows(device, dtype, C, seed=2)
    other = x.clone()
    made = table(device, dtype)
    found = fused.load().add_modulate(x, y, made[:, 2], norm, made[:, 3:], RUNS)
    expected = PLAIN.add_modulate(other, y, made[:, 2], norm, made[:, 3:], RUNS)
    close(x, other, dtype)
    close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 16, 1025])
def test_activation(device: str, dtype: torch.dtype, width: int) -> None:
    gate_up = 4 * rows(device, dtype, 7, 2 * width)
    close(fused.load().activate(gate_up), PLAIN.activate(gate_up), dtype)
    assert fused.load().activate(gate_up[:0]).shape == (0, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 16), (40, 1040), (7, 14336), (0, 32), (3, 0)])
def test_rows_rounded_to_fp8_are_those_of_the_plain_form(
    device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Rows of every size, one of zeros, and those whose largest value is 448 times a power of two, or just not."""
    x = rows("cpu", torch.float32, *shape) * torch.logspace(-6, 6, shape[0])[:, None]
    if shape[0] > 4:
        x[1] = 0
        x[2:5] = x[2:5] / x[2:5].abs().amax(1, keepdim=True) * torch.tensor([[7 / 4], [28.0], [1.7578125 * 2**-20]])
    x = x.to(device, dtype)
    found, scales = fp8_rounding()(x)
    codes, expected = to_rows_of_fp8(x)
    assert torch.equal(scales, expected)
    if device == "cuda":  # the interpreter's E4M3 is not a GPU's
        assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 16), (9, 1040), (7, 14336), (0, 32), (3, 0)])
def test_an_activation_rounded_to_fp8_is_that_of_two_kernels_to_the_bit(
    device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    g, f = shape
    gate_up = (3 * rows("cpu", torch.float32, g, 2 * f) * torch.logspace(-3, 3, g)[:, None]).to(device, dtype)
    if g > 4:
        gate_up[1] = 0
    layer = narrowed(nvfp4(torch.randn(16, 16)), "fp8", dtype)
    found = activation_of_run(fused.load(), [layer]).activate(gate_up)
    codes, scale = fp8_rounding()(fused.load().activate(gate_up))
    assert isinstance(found, Fp8Rows) and found.dtype == dtype and found.shape == shape
    assert torch.equal(found.scale, scale) and torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_the_benchmark_of_that_activation_runs(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "activation.json"
    monkeypatch.setattr(activation_fp8, "WARPS", (8,))
    words = ["--device", device, "--rows", "5", "--width", "48", "--repeats", "2", "--json", str(out)]
    assert activation_fp8.main(words) == 0
    rows = json.loads(out.read_text())["measured"]
    assert [row["same"] for row in rows] == [None] * 3 + [True] * 3 and all(row["seconds"] > 0 for row in rows)


@pytest.mark.gpu
def test_a_step_of_fp8_products_is_the_same_whether_or_not_the_activation_rounds() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 products on this GPU")
    spec, cuda = Spec(("64x64x5",), size="small", blocks=2, text_rows=7), torch.device("cuda", 0)
    with Comm.connect(Ranks(), Layout(), cuda) as comm:
        plan = spec.plan("64x64x5", Layout(), dtype="bfloat16", capability=(9, 0), steps=1, gemm="fp8")
        denoiser = denoiser_of(random_weights(plan, 0, cuda), plan, comm, fused=True)
        assert isinstance(denoiser.view.elementwise.activate(torch.ones(1, 32, device=cuda)), Fp8Rows)
        found = velocity(denoiser, plan)
        denoiser.view = replace(denoiser.view, elementwise=fused.load())
        assert torch.equal(found, velocity(denoiser, plan))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (130, 1040), (17, 48), (257, 80)])
def test_weights_made_dense_in_place_are_those_of_the_plain_form_to_the_bit(
    device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    values = rows("cpu", torch.float32, *shape) * torch.logspace(-4, 2, shape[0])[:, None]  # scales of every size
    weight = nvfp4(values)
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    triton_fill()(weight.to(device), out)
    if device == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts to bfloat16, where a GPU rounds
        torch.testing.assert_close(out, weight.dense(dtype), rtol=2**-7, atol=0)
    else:
        assert torch.equal(out.cpu(), weight.dense(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_gated_addition(device: str, dtype: torch.dtype) -> None:
    x, y = rows(device, dtype, ROWS, C), rows(device, dtype, ROWS, C, seed=3)
    other = x.clone()
    fused.load().add(x, y, table(device, dtype)[:, 5], RUNS)
    PLAIN.add(other, y, table(device, dtype)[:, 5], RUNS)
    close(x, other, dtype)
    fused.load().add(x[:0], y[:0], table(device, dtype)[:, 5], ())


HEADS = [(9, 3, 32, 4), (1, 2, 128, 16), (5, 1, 64, 8), (3, 5, 24, 4), (2, 35, 128, 16), (0, 2, 32, 4)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["where they lie", "into a packet"])
@pytest.mark.parametrize(("p", "j", "D", "freqs"), HEADS)
def test_norm_and_rotation_of_queries_and_keys(
    device: str, dtype: torch.dtype, place: str, p: int, j: int, D: int, freqs: int
) -> None:
    """Of some heads of one product's result; v goes with them as it is, or is not touched."""
    qkv = rows(device, dtype, p, 3, j + 2, D)
    positions = torch.arange(3 * p, dtype=torch.float64).view(p, 3) % 7
    angles = rotation(positions, (10000 ** (-torch.arange(freqs) / freqs)).to(device), dtype)
    norms = [1 + rows(device, dtype, D, seed=seed) / 4 for seed in (4, 5)]
    heads, before = tuple(x[:, 1 : j + 1] for x in qkv.unbind(1)), qkv.clone()
    packet = torch.full_like(qkv[:, :, :j], torch.nan).contiguous()
    out = heads if place == "where they lie" else packet.unbind(1)
    expected = tuple(torch.empty_like(x) for x in heads)
    for a, b, norm in zip(before.unbind(1), expected, norms, strict=False):
        rotate(F.rms_norm(a[:, 1 : j + 1], (D,), norm, NORM_EPS), angles, out=b)
    way = fused.load()
    turn = way.turn(*norms, way.prepare(angles))
    turn.lay(qkv.unbind(1), (Place(0, (0, p), (1, j + 1)),), None if out is heads else packet.flatten())
    for a, b in zip(out[:2], expected[:2], strict=True):
        close(a, b, dtype)
    assert torch.equal(out[2], before[:, 2, 1 : j + 1])
    assert torch.equal(qkv[:, :, [0, -1]], before[:, :, [0, -1]])  # the heads beside them
    assert place == "where they lie" or torch.equal(qkv, before)
    if p and dtype == torch.float32:
        plain = F.rms_norm(before[:, 0, 1 : j + 1], (D,), norms[0], NORM_EPS)
        torch.testing.assert_close(out[0][..., 6 * freqs :], plain[..., 6 * freqs :], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_offsets_past_32_bits_are_counted_in_rotation_and_activation() -> None:
    """362 frames at 1344x768 are 109 000 rows: times 21504 columns of q, k and v, or 28672 of gate and up."""
    way, dtype, tail = fused.load(), torch.bfloat16, slice(-64, None)
    qkv = torch.randn(2**31 // (3 * 56 * 128) + 64, 3, 56, 128, device="cuda", dtype=dtype)
    before = qkv[tail].clone()
    positions = torch.arange(3 * len(qkv), dtype=torch.float64).view(-1, 3) % 97
    angles = rotation(positions, torch.logspace(0, -3, 16, device="cuda"), dtype)
    norms = [1 + rows("cuda", dtype, 128, seed=seed) / 4 for seed in (4, 5)]
    way.turn(*norms, way.prepare(angles)).where_they_lie(qkv.unbind(1))
    PLAIN.turn(*norms, Rotation(angles.cos[tail], angles.sin[tail])).where_they_lie(before.unbind(1))
    for a, b in zip(qkv[tail].unbind(1), before.unbind(1), strict=True):
        close(a, b, dtype)
    del qkv
    gate_up = torch.randn(2**31 // 28672 + 64, 28672, device="cuda", dtype=dtype)
    close(way.activate(gate_up)[tail], PLAIN.activate(gate_up[tail]), dtype)


def test_rows_know_their_row_of_the_table() -> None:
    assert fused.pairs_of(RUNS, ROWS, torch.device("cpu")).tolist() == [1, 1, 1, 2] + [0] * 7


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_the_error_says_so() -> None:
    with pytest.raises(MissingDependency, match=r"runtime\.fused=on needs triton"):
        fused.load()
    with pytest.raises(MissingDependency, match=r"runtime\.fused=on needs triton"):
        triton_fill()


def layers(count: int = 4) -> list[Any]:
    """Of several shapes and formats, one with a scale for its input."""
    shapes = [(48, 32), (32, 16), (64, 32), (32, 32)] * (count // 4)
    made: list[Any] = [nvfp4(torch.randn(shape)) for shape in shapes]
    made[1] = PlainWeight(torch.randn(shapes[1]))
    made[2] = replace(made[2], pre_quant_scale=torch.rand(32) + 0.5)
    return made


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_made_dense_in_one_memory_give_the_dense_products(device: str) -> None:
    order = [weight.to(device) for weight in layers(8)]
    linear = ReusedLinear(plain_fill, torch.float32, torch.device(device))
    for index in (*range(8), 5, 5, 2, 7, 0, 0):
        x = torch.randn(3, order[index].shape[1], device=device)
        assert torch.equal(linear(x, order[index]), dense_linear(x, order[index]))
    first, second = (made_dense(linear, weight, torch.float32) for weight in (order[0], order[2]))
    assert first.data_ptr() == second.data_ptr() and linear._memory.numel() == 64 * 32


def test_weights_that_are_dense_as_they_lie_are_not_copied() -> None:
    linear = ReusedLinear(plain_fill, torch.bfloat16, torch.device("cpu"))
    plain = PlainWeight(torch.randn(8, 8, dtype=torch.bfloat16))
    assert linear.dense(plain) is plain.tensor and linear._memory.numel() == 0
    assert torch.equal(linear.dense(PlainWeight(plain.tensor.float())), plain.tensor) and linear._memory.numel() == 64


@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_step_is_that_of_the_plain_forms(device: str) -> None:
    """Norms, rotation, gates and the end of the model, with what lies between computed alike."""
    spec = Spec(("64x64x5",), size="small", blocks=2, text_rows=7)
    with Comm.connect(Ranks(), Layout(), torch.device(device)) as comm:
        plan = spec.plan("64x64x5", Layout(), dtype="float32", capability=None, steps=1)
        denoiser = denoiser_of(random_weights(plan, 0, torch.device(device)), plan, comm)
        plain, way = velocity(denoiser, plan), fused.load()
        view = denoiser.view
        denoiser.view = replace(view, elementwise=way, rotation=way.prepare(view.rotation))
        found = velocity(denoiser, plan)
    assert (found - plain).norm() / plain.norm() < (1e-5 if device == "cpu" else 1e-3)


def one_lacks_triton(seat) -> tuple[bool, str]:
    """Rank 1 says that triton is missing; the others say that they have all they need."""
    from h3dist import fusing

    comm, asked = seat.connect(Layout(sp=seat.world)), []
    fusing.lacks = lambda device: "no triton here" if seat.rank == 1 and seat.world > 2 else None
    fusing.choose_elementwise = lambda way, device: asked.append(way) or "fused"
    taken = fusing.agree_on_elementwise(comm, "auto", torch.device("cpu"))
    return taken is PLAIN, "".join(asked)


def test_all_ranks_take_the_plain_forms_where_one_has_no_others() -> None:
    with World(3) as world:
        assert world.run(one_lacks_triton, ranks=3) == [(True, "")] * 3
        assert world.run(one_lacks_triton, ranks=2) == [(False, "on")] * 2


def test_a_cpu_takes_the_plain_forms_and_says_why_it_cannot_take_others() -> None:
    cpu = torch.device("cpu")
    with Comm.connect(Ranks(), Layout(), cpu) as comm:
        assert agree_on_elementwise(comm, "auto", cpu) is PLAIN and agree_on_elementwise(comm, "off", cpu) is PLAIN
        with pytest.raises(ConfigError, match=r"runtime\.fused=on is for CUDA devices.*use runtime\.fused=auto"):
            agree_on_elementwise(comm, "on", cpu)
