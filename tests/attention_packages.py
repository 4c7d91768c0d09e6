"""Stand-ins for the optional attention packages: right results, in the layouts and with the arguments of the real ones.

Each takes no argument that the real function does not take, and has the real one's habits: what it returns beside the
output, and what it does to its inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from h3dist.attention import cudnn_fp8


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over [S, h, D] in float64, in the dtype of q."""
    scores = torch.einsum("shd,thd->hst", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("hst,thd->shd", scores.softmax(-1), v.double()).to(q.dtype)


def rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, S, h, D], in any strides with the last dimension contiguous."""
    _check(q, k, v)
    return softmax_attention(q[0], k[0], v[0])[None]


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, h, S, D] likewise."""
    return rows_first(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.ndim == 4 and q.shape == k.shape == v.shape and q.shape[0] == 1, (q.shape, k.shape, v.shape)
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "the last dimension must be contiguous"


def flash2() -> dict[str, ModuleType]:
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        assert (dropout_p, softmax_scale, causal, window_size) == (0.0, None, False, (-1, -1))
        return rows_first(q, k, v)

    return {"flash_attn": module(flash_attn_func=flash_attn_func)}


def flash3(with_lse: bool = False) -> dict[str, ModuleType]:
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), num_splits=1):
        assert softmax_scale is None and not causal
        o = rows_first(q, k, v)
        return (o, o.new_zeros(o.shape[:3])) if with_lse else o

    return {"flash_attn_interface": module(flash_attn_func=flash_attn_func)}


def flash4() -> dict[str, ModuleType]:
    def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, return_lse=False):
        assert qv is None and gather_kv_indices is None and softmax_scale is None and not causal
        return rows_first(q, k, v), None

    cute = module(flash_attn_func=flash_attn_func)
    return {"flash_attn": module(cute=cute), "flash_attn.cute": cute}


def sage1() -> dict[str, ModuleType]:
    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True):
        assert q.shape[-1] in (64, 96, 128) and sm_scale is None and not is_causal
        if smooth_k:
            k -= k.mean(dim=1 if tensor_layout == "NHD" else 2, keepdim=True)
        return (rows_first if tensor_layout == "NHD" else heads_first)(q, k, v)

    core = module(sageattn=sageattn)
    return {"sageattention": module(core=core), "sageattention.core": core}


def sage2(calls: list[dict[str, Any]] | None = None) -> dict[str, ModuleType]:
    """`calls` is told the name and the options of every call."""

    def kernel(name: str, **defaults: str) -> Callable[..., Tensor]:
        def call(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, return_lse=False, **more):
            assert more.keys() <= defaults.keys() and not (is_causal or return_lse) and sm_scale is None and smooth_k
            if calls is not None:
                calls.append({"name": name} | defaults | more)
            return (rows_first if tensor_layout == "NHD" else heads_first)(q, k, v)

        return call

    prefix, gran = "sageattn_qk_int8_pv_", {"qk_quant_gran": "per_thread"}
    core = module(
        sageattn=None,
        **{
            f"{prefix}fp16_triton": kernel("fp16_triton", quantization_backend="triton"),
            f"{prefix}fp16_cuda": kernel("fp16_cuda", **gran, pv_accum_dtype="fp32"),
            f"{prefix}fp8_cuda": kernel("fp8_cuda", **gran, pv_accum_dtype="fp32+fp16"),
            f"{prefix}fp8_cuda_sm90": kernel("fp8_cuda_sm90", **gran, pv_accum_dtype="fp32+fp32"),
        },
    )
    return {"sageattention": module(core=core), "sageattention.core": core}


def sage3() -> dict[str, ModuleType]:
    def sageattn3_blackwell(q, k, v, attn_mask=None, is_causal=False, per_block_mean=True):
        assert attn_mask is None and not is_causal
        k -= k.mean(dim=-2, keepdim=True)
        return heads_first(q, k, v)

    return {"sageattn3": module(sageattn3_blackwell=sageattn3_blackwell)}


def kitchen(available: bool = True) -> dict[str, ModuleType]:
    import comfy_kitchen

    def int8_attention(q, k, v, *, scale=None, attn_mask=None):
        assert scale is None and attn_mask is None and min(q.shape) > 0
        return heads_first(q, k, v)

    same = {"sol_attn": comfy_kitchen.sol_attn, "sol_attn_is_available": lambda device=None: available}
    stand_in = module(int8_attention=int8_attention, int8_attention_is_available=lambda device=None: available, **same)
    return {"comfy_kitchen": stand_in}


class Symbol:
    """A tensor of cuDNN's graph, or an output of it, with what was said of it."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def __getattr__(self, name: str) -> Callable[[Any], Symbol]:
        assert name in ("set_output", "set_dim", "set_stride", "set_data_type"), name

        def note(value: Any) -> Symbol:
            self.said[name.removeprefix("set_")] = value
            return self

        return note


class CudnnGraph:
    """`cudnn.pygraph` as far as `sdpa_fp8` needs it: computes from the FP8 values what the kernel computes."""

    TYPES = SimpleNamespace(FP8_E4M3=torch.float8_e4m3fn, FLOAT=torch.float32, BFLOAT16=torch.bfloat16, HALF=torch.half)

    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle) -> None:
        assert (io_data_type, compute_data_type) == (torch.float8_e4m3fn, torch.float32)
        self.built = False

    def tensor(self, name, dim, stride, data_type) -> Symbol:
        return Symbol(dim=tuple(dim), stride=tuple(stride), data_type=data_type)

    def sdpa_fp8(self, q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, **options):
        assert options.keys() <= {"attn_scale", "is_inference", "name"} and options["is_inference"]
        self.inputs = (q, k, v)
        self.scales = (descale_q, descale_k, descale_v, descale_s, scale_s, scale_o)
        self.scale = options["attn_scale"]
        self.outputs = tuple(Symbol() for _ in range(4))
        return self.outputs

    def build(self, modes) -> None:
        o, _, *amax = self.outputs
        assert o.said["output"] and all(x.said["data_type"] == torch.float32 for x in amax)
        self.built = True

    def get_workspace_size(self) -> int:
        return 16

    def execute(self, pack, workspace, handle) -> None:
        assert self.built and workspace.nbytes == 16
        for symbol in self.inputs:
            dim, stride = symbol.said["dim"], symbol.said["stride"]
            heads_rows = pack[symbol].transpose(0, 1)[None]
            assert heads_rows.shape == dim and heads_rows.stride()[1:] == stride[1:]
            assert heads_rows.dtype == symbol.said["data_type"]
        dq, dk, dv, ds, ss, so = (pack[symbol].reshape(()) for symbol in self.scales)
        q, k, v = (pack[symbol].float() * d for symbol, d in zip(self.inputs, (dq, dk, dv), strict=True))
        scores = torch.einsum("shd,thd->hst", q, k) * self.scale
        probabilities = (scores.softmax(-1) * ss).to(torch.float8_e4m3fn).float() * ds
        o = torch.einsum("hst,thd->shd", probabilities, v)
        largest = {torch.float8_e4m3fn: 448.0}.get(self.outputs[0].said["data_type"], float("inf"))
        assert (o * so).abs().max() <= largest, "the output's scale lets it overflow"
        pack[self.outputs[0]].copy_((o * so).to(pack[self.outputs[0]].dtype))


def cudnn() -> dict[str, ModuleType]:
    names = {"pygraph": CudnnGraph, "data_type": CudnnGraph.TYPES, "create_handle": object}
    return {"cudnn": module(heur_mode=SimpleNamespace(A="A", FALLBACK="B"), **names)}


def module(**names: Any) -> ModuleType:
    made = ModuleType("stand_in")
    vars(made).update(names)
    return made


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType | None]) -> None:
    """Puts modules in place for one test; None makes an import fail."""
    cudnn_fp8.graph_for.cache_clear()
    for name, stand_in in modules.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
