"""How the blocks' linear layers are multiplied: which ways there are, which one a run takes, and what each holds.

    dense    the weight is made dense in the compute dtype for each product: exact
    nvfp4    NVFP4 weights meet activations quantised to NVFP4; layers of other formats are dense
    fp8      weights become E4M3 at load, one scale an output channel; activations E4M3, one scale a row
    int8     likewise in int8

Imports no torch.
"""

from math import prod
from typing import TYPE_CHECKING

from h3dist.errors import ConfigError
from h3dist.plan.weights import F32, FP4_CAPABILITY, linear_shapes

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import DenoiserDims

GEMMS = ("auto", "dense", "nvfp4", "fp8", "int8")
NARROW = ("fp8", "int8")  # one byte a weight, whatever the file holds
NEEDS = {"nvfp4": FP4_CAPABILITY, "fp8": (8, 9), "int8": (7, 5)}
HALF_ONLY = ("nvfp4", "fp8")  # on GPUs their results are of 16 bits


def choose_gemm(asked: str, capability: tuple[int, int] | None, dtype: str) -> str:
    """What a run does where `asked` was typed: "auto" is nvfp4 on GPUs that multiply FP4, with bfloat16, else dense.

    capability: the lowest of the ranks' GPUs, None on CPUs, where fp8 and int8 are computed in plain torch, to the same
    numbers and slowly. Raises ConfigError for what the GPUs or the compute dtype cannot do.
    """
    if asked == "auto":
        return "nvfp4" if capability is not None and capability >= FP4_CAPABILITY and dtype == "bfloat16" else "dense"
    if asked == "dense" or (capability is None and asked in NARROW):
        return asked
    least = NEEDS[asked]
    if capability is None or capability < least:
        there = "a CPU" if capability is None else "{}.{}".format(*capability)
        raise ConfigError(
            f"runtime.gemm={asked} needs GPUs of compute capability {least[0]}.{least[1]} or later, and this is "
            f"{there}; runtime.gemm=auto runs everywhere"
        )
    if asked in HALF_ONLY and dtype != "bfloat16":
        raise ConfigError(f"runtime.gemm={asked} gives bfloat16, and runtime.dtype={dtype}; use runtime.dtype=bfloat16")
    return asked


def resident_bytes(gemm: str, dims: "DenoiserDims", stored: float) -> float:
    """Bytes of memory for one weight of the blocks' linears, where the file has `stored`; scales included."""
    if gemm not in NARROW:
        return stored
    shapes = linear_shapes(dims, dims.heads, dims.ffn).values()
    return 1 + F32 * sum(rows for rows, _ in shapes) / sum(map(prod, shapes))


def working_bytes(gemm: str, rows: int, shape: tuple[int, int], element: int) -> int:
    """What a product of `rows` with a weight [N, K] holds beside its input and output.

    Narrow ones: the activation scaled and rounded; int8 also its sums in 32 bits, which some GPUs write out. The
    others: the weight made dense.
    """
    outputs, inputs = shape
    if gemm == "fp8":
        return rows * inputs * (element + 1)
    if gemm == "int8":
        return rows * (inputs + F32 * outputs)
    return prod(shape) * element
