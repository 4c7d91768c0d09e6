"""Attention by cuDNN's FP8 kernel through nvidia-cudnn-frontend: q, k, P and v in E4M3. Approximate.

Layout [1, h, S, D] over rows-first memory; heads of up to 128 in multiples of 16. Any S. The graph
`pygraph.sdpa_fp8(q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, attn_scale=, ...)` gives (o,
statistics, amax of S, amax of o). Each tensor has one scale, a power of two from its amax over the rows and heads of
the call, so the rounding depends on how heads are split over ranks. On Hopper the output is E4M3 too, scaled by a bound
that needs no second pass: no output is larger than the largest v. On Blackwell it is in the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from h3dist.attention.backend import Attention, Backend, Package, Task, not_of, not_on
from h3dist.fp8 import power_of_two

PACKAGE = Package("cudnn", "pygraph", "pip install nvidia-cudnn-frontend")
SOFTMAX_SCALE = 256.0  # probabilities are at most 1
HEADROOM = 0.5  # of the output's scale: rounded probabilities may add up to a little over 1
WIDE_OUTPUT = (10,)  # compute capabilities with 16-bit output, by major
SCALARS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def quantised(x_ShD: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [S, h, D] and the power of two, f32 [], that x was multiplied by: exact in bfloat16, so it rounds once."""
    scale = power_of_two(torch.linalg.vector_norm(x_ShD, ord=torch.inf))
    return (x_ShD * scale.to(x_ShD.dtype)).contiguous().to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class Graph:
    """A cuDNN plan of one shape: `run(q, k, v, scalars)` with E4M3 [S, h, D] gives o [S, h, D] in `out`."""

    run: Callable[[Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]
    out: torch.dtype


def build(task: Task, found: Any) -> Attention:
    """Raises MissingDependency."""
    PACKAGE.load()
    wide = task.capability is not None and task.capability[0] in WIDE_OUTPUT
    out = task.dtype if wide else torch.float8_e4m3fn

    def attention(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        if q_ShD.numel() == 0:
            return torch.empty_like(q_ShD)
        return attend(q_ShD, k_ShD, v_ShD, graph_for(tuple(q_ShD.shape), out, q_ShD.device))

    return attention


def attend(q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor, graph: Graph) -> Tensor:
    """o_ShD in the inputs' dtype. k is centred over the rows, which softmax does not see, to fill its range better."""
    centred_ShD = k_ShD - k_ShD.mean(dim=0, keepdim=True)
    (q8, q), (k8, k), (v8, v) = (quantised(x) for x in (q_ShD, centred_ShD, v_ShD))
    soft = torch.full_like(q, SOFTMAX_SCALE)
    output = v * HEADROOM if graph.out == torch.float8_e4m3fn else torch.ones_like(v)
    values = (1 / q, 1 / k, 1 / v, 1 / soft, soft, output)
    o_ShD = graph.run(q8, k8, v8, dict(zip(SCALARS, (value.view(1, 1, 1, 1) for value in values), strict=True)))
    if graph.out == torch.float8_e4m3fn:
        return o_ShD.to(q_ShD.dtype).mul_((1 / output).to(q_ShD.dtype))  # a power of two: exact
    return o_ShD


@cache
def graph_for(shape: tuple[int, int, int], out: torch.dtype, device: torch.device) -> Graph:
    """The plan for [S, h, D] on a device, made once a process."""
    import cudnn

    kinds = {torch.float8_e4m3fn: "FP8_E4M3", torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
    e4m3, f32, kind = (getattr(cudnn.data_type, name) for name in ("FP8_E4M3", "FLOAT", kinds[out]))
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=f32, compute_data_type=f32, handle=handle)
    S, h, D = shape
    place = {"dim": (1, h, S, D), "stride": (S * h * D, D, h * D, 1)}
    one = {"dim": (1, 1, 1, 1), "stride": (1, 1, 1, 1), "data_type": f32}
    q, k, v = (graph.tensor(name=name, data_type=e4m3, **place) for name in "qkv")
    scalars = {name: graph.tensor(name=name, **one) for name in SCALARS}
    o, _, *largest = graph.sdpa_fp8(q=q, k=k, v=v, **scalars, attn_scale=D**-0.5, is_inference=True, name="attention")
    o.set_output(True).set_dim(place["dim"]).set_stride(place["stride"]).set_data_type(kind)
    for amax in largest:
        amax.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(f32)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)

    def run(q8: Tensor, k8: Tensor, v8: Tensor, values: dict[str, Tensor]) -> Tensor:
        o_ShD = torch.empty(shape, dtype=out, device=device)
        given = {q: q8, k: k8, v: v8, o: o_ShD} | {scalars[name]: value for name, value in values.items()}
        given |= {amax: torch.empty((1, 1, 1, 1), device=device) for amax in largest}
        if device.type == "cuda":
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(given, workspace, handle=handle)
        return o_ShD

    return Graph(run, out)


def refuses(task: Task) -> str | None:
    """Hopper, and data-centre Blackwell."""
    return not_on(task, least=(9, 0), sizes=(16, 128)) or not_of(task, (9, 10))


BACKEND = Backend(
    name="cudnn_fp8",
    exact=False,
    needs="nvidia-cudnn-frontend; compute capability 9.x or 10.x, 16 bits, heads of up to 128",
    build=build,
    refuses=refuses,
    lacks=PACKAGE.lacks,
    bound=0.15,
)
