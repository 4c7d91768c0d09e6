"""Linear layers: which path a layer takes, and FP4 arithmetic that N ranks do as one would."""

from dataclasses import dataclass, field, replace

import comfy_kitchen
import pytest
import torch
from fp4 import EMULATED, nvfp4
from lockstep import HandExchange, Lockstep, Part, make_parts, spread
from tiny_model import error
from torch import Tensor

from h3dist.checkpoint.formats import PlainWeight
from h3dist.model.exchange import Alone
from h3dist.model.linear import (
    Fp4Kernels,
    Fp4Linear,
    choose_linear,
    dense_linear,
    kitchen_kernels,
    largest_magnitude,
)


@dataclass
class Recorder:
    """Stands for both kernels and remembers what they were given."""

    calls: list[dict] = field(default_factory=list)

    def quantize(self, x: Tensor, scale: Tensor, pad_16x: bool) -> tuple[Tensor, Tensor]:
        self.calls.append({"x": x, "scale": scale})
        return comfy_kitchen.quantize_nvfp4(x, scale, pad_16x=pad_16x)

    def matmul(self, a: Tensor, b: Tensor, **rest: Tensor) -> Tensor:
        self.calls.append({"a": a, "b": b} | rest)
        return torch.ones(a.shape[0], b.shape[0], dtype=rest["out_dtype"])

    @property
    def kernels(self) -> Fp4Kernels:
        return Fp4Kernels(self.quantize, self.matmul)


@dataclass
class CountedAlone(Alone):
    amax_calls: int = 0

    def amax(self, x: Tensor) -> Tensor:
        self.amax_calls += 1
        return super().amax(x)


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0)])
def test_older_devices_multiply_dense(capability: tuple[int, int] | None) -> None:
    assert choose_linear(capability, Alone()) is dense_linear


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0)])
def test_newer_devices_multiply_in_fp4(capability: tuple[int, int]) -> None:
    linear = choose_linear(capability, Alone(), torch.bfloat16)
    assert isinstance(linear, Fp4Linear)
    assert linear.kernels == kitchen_kernels()
    assert choose_linear(capability, Alone(), torch.float32) is dense_linear


def test_only_nvfp4_layers_that_allow_it_use_the_kernels() -> None:
    values, x = torch.randn(32, 64), torch.randn(5, 64)
    weight = nvfp4(values)
    for other in (PlainWeight(values), replace(weight, full_precision=True)):
        recorder, exchange = Recorder(), CountedAlone()
        y = Fp4Linear(exchange, recorder.kernels)(x, other)
        assert torch.equal(y, dense_linear(x, other))
        assert recorder.calls == []
        assert exchange.amax_calls == 0
    recorder, exchange = Recorder(), CountedAlone()
    y = Fp4Linear(exchange, recorder.kernels)(x, weight)
    assert y.shape == (5, 32)
    assert exchange.amax_calls == 1
    quantised, multiplied = recorder.calls
    assert torch.equal(quantised["scale"], x.abs().amax() / (448 * 6))
    assert quantised["x"].data_ptr() == x.data_ptr(), "nothing to pad, so no copy"
    assert multiplied["b"].data_ptr() == weight.codes.data_ptr()
    assert torch.equal(multiplied["tensor_scale_b"], weight.global_scale)
    assert multiplied["block_scale_b"].dtype == torch.float8_e4m3fn
    assert multiplied["tensor_scale_a"] is quantised["scale"]
    assert multiplied["out_dtype"] == x.dtype


def test_a_stored_input_scale_is_used_without_agreement() -> None:
    recorder, exchange = Recorder(), CountedAlone()
    weight = replace(nvfp4(torch.randn(16, 32)), input_scale=torch.tensor(0.25))
    Fp4Linear(exchange, recorder.kernels)(torch.randn(3, 32), weight)
    assert recorder.calls[0]["scale"] == 0.25
    assert exchange.amax_calls == 0


def test_a_rank_without_rows_agrees_but_does_not_multiply() -> None:
    recorder, exchange = Recorder(), CountedAlone()
    y = Fp4Linear(exchange, recorder.kernels)(torch.randn(0, 32), nvfp4(torch.randn(16, 32)))
    assert y.shape == (0, 16)
    assert exchange.amax_calls == 1
    assert recorder.calls == []


def test_zero_activations_give_zeros() -> None:
    y = Fp4Linear(Alone(), EMULATED)(torch.zeros(4, 32), nvfp4(torch.randn(16, 32)))
    assert torch.equal(y, torch.zeros(4, 16))


def test_a_pre_quant_scale_multiplies_the_activation_on_both_paths() -> None:
    x, factors = torch.randn(6, 32), torch.rand(32) + 0.5
    plain = nvfp4(torch.randn(16, 32))
    scaled = replace(plain, pre_quant_scale=factors)
    for linear in (dense_linear, Fp4Linear(Alone(), EMULATED)):
        assert torch.equal(linear(x, scaled), linear(x * factors, plain))


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 16), (17, 30, 48), (40, 128, 80), (3, 129, 64)])
def test_fp4_product_is_that_of_both_operands_quantised(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    values, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    weight = nvfp4(values)
    y = Fp4Linear(Alone(), EMULATED)(x, weight)
    x_quantised = nvfp4(x).dense(torch.float32)  # the same rule gives an activation its scales
    assert error(y, x_quantised @ weight.dense(torch.float32).T) < 1e-6
    assert 0 < (x_quantised - x).abs().max() < 0.2 * x.abs().max()


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_that_split_rows_quantise_as_one_would(ranks: int) -> None:
    torch.manual_seed(ranks)
    weight = nvfp4(torch.randn(48, 64))
    x = torch.randn(29, 64) * torch.linspace(0.1, 3, 29)[:, None]  # each rank's own amax is another
    whole = Fp4Linear(Alone(), EMULATED)(x, weight)
    cuts = spread(0, 29, ranks)

    def rank_main(rank: int, part: Part, exchange: HandExchange) -> Tensor:
        return Fp4Linear(exchange, EMULATED)(x[slice(*cuts[rank])], weight)

    together = Lockstep(make_parts(29, 7, 16 * ranks, ranks, 1)).run(rank_main)
    assert error(torch.cat(together), whole) < 1e-6
    alone = [Fp4Linear(Alone(), EMULATED)(x[slice(*cut)], weight) for cut in cuts]
    assert error(torch.cat(alone), whole) > 1e-3  # without the agreement they would not


def test_largest_magnitude_looks_at_both_ends() -> None:
    assert largest_magnitude(torch.tensor([-3.0, 1.0])) == 3
    assert largest_magnitude(torch.tensor([-1.0, 2.0], dtype=torch.bfloat16)).dtype == torch.float32
    assert largest_magnitude(torch.empty(0, 4)) == 0
