"""Attention by sageattention 2.x: int8 q and k, v in float16 or FP8. Approximate. Each kernel and its accumulator is a
backend; `sage2` is the one for this GPU.

Layout [1, S, h, D] ("NHD"), as a view; heads of up to 128, padded by the package to 64 or 128. Any S; noise has been
reported from FP8 kernels past 160 000 rows on compute capability 12.0. All are functions of `sageattention.core` with
(q, k, v, tensor_layout=, is_causal=, qk_quant_gran=, sm_scale=, pv_accum_dtype=, smooth_k=, return_lse=) and give the
output alone; k is centred in a copy of theirs. The package's own dispatch refuses compute capabilities 10.0, 10.3 and
12.1, so the kernel is chosen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from h3dist.attention.backend import Attention, Backend, Package, Task, not_of, not_on

INSTALL = (
    "git clone https://github.com/thu-ml/SageAttention && pip install --no-build-isolation ./SageAttention "
    "(the sageattention of PyPI is 1.x)"
)


@dataclass(frozen=True)
class Kernel:
    """One function of the package with its accumulator for P V; the compute capabilities that it is for, by major."""

    function: str
    least: tuple[int, int]
    majors: tuple[int, ...]
    options: Mapping[str, str] = field(default_factory=dict)


PREFIX = "sageattn_qk_int8_pv_"
KERNELS = {
    "fp16_triton": Kernel(f"{PREFIX}fp16_triton", (8, 0), (8, 9, 10, 11)),  # faults on 12.0, as reported
    "fp16_cuda": Kernel(f"{PREFIX}fp16_cuda", (8, 0), (8, 9, 10, 11, 12), {"pv_accum_dtype": "fp32"}),
    "fp8_cuda": Kernel(f"{PREFIX}fp8_cuda", (8, 9), (8, 12), {"pv_accum_dtype": "fp32+fp32"}),
    "fp8_cuda_fast": Kernel(f"{PREFIX}fp8_cuda", (8, 9), (8, 12), {"pv_accum_dtype": "fp32+fp16"}),  # "2++"
    "fp8_cuda_sm90": Kernel(f"{PREFIX}fp8_cuda_sm90", (9, 0), (9,), {"pv_accum_dtype": "fp32+fp32"}),
}
PACKAGES = {name: Package("sageattention.core", kernel.function, INSTALL) for name, kernel in KERNELS.items()}
BOUND = 0.08


def kernel_for(capability: tuple[int, int]) -> str:
    """The kernel for a GPU: what the package's dispatch takes, and where that refuses the nearest that exists.

    8.0 float16 with float32 sums; 8.6, 8.7 and 10.x to 11.x Triton's, which is compiled for any GPU; 8.9 and 12.x FP8
    with float16 sums gathered in float32; 9.0 its own.
    """
    by_minor = {(8, 0): "fp16_cuda", (8, 9): "fp8_cuda_fast"}
    by_major = {9: "fp8_cuda_sm90", 12: "fp8_cuda_fast"}
    return by_minor.get(capability) or by_major.get(capability[0], "fp16_triton")


def build(name: str, task: Task, found: Any) -> Attention:
    """By the kernel called `name` in KERNELS. Raises MissingDependency."""
    sage, options = PACKAGES[name].load(), dict(KERNELS[name].options)
    if task.capability is not None and task.capability[0] == 12 and name.startswith("fp8"):
        options["qk_quant_gran"] = "per_warp"  # as the package's dispatch has it there

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        return sage(q_ShD[None], k_ShD[None], v_ShD[None], tensor_layout="NHD", **options).squeeze(0).contiguous()

    return attention


def refuses(name: str, task: Task) -> str | None:
    """By what the kernel was written for."""
    kernel = KERNELS[name]
    return not_on(task, least=kernel.least, sizes=(1, 128)) or not_of(task, kernel.majors)


def _chosen(task: Task) -> str:
    return kernel_for(task.capability or (8, 0))


def _backend(name: str) -> Backend:
    kernel = KERNELS[name]
    least, sums = "{}.{}".format(*kernel.least), kernel.options.get("pv_accum_dtype", "fp16 to fp32")
    return Backend(
        name=f"sage2_{name}",
        exact=False,
        needs=f"sageattention 2, built from source; sums in {sums}; compute capability {least}, of "
        f"{', '.join(f'{major}.x' for major in kernel.majors)}; 16 bits, heads of up to 128",
        build=partial(build, name),
        refuses=partial(refuses, name),
        lacks=PACKAGES[name].lacks,
        bound=BOUND,
    )


BACKEND = Backend(
    name="sage2",
    exact=False,
    needs="sageattention 2, built from source; its kernel by compute capability; 8.0, 16 bits, heads of up to 128",
    build=lambda task, found: build(_chosen(task), task, found),
    refuses=lambda task: not_on(task, sizes=(1, 128)) or refuses(_chosen(task), task),
    lacks=lambda task: PACKAGES[_chosen(task)].lacks(task),
    bound=BOUND,
)
VARIANTS = tuple(_backend(name) for name in KERNELS)
