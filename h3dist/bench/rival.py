"""diffusers' transformer of the same size on random weights, in the same process: what our step is held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h3dist.checkpoint.denoiser_names import DenoiserDims
from h3dist.geometry import PATCH
from h3dist.packing import Packing

ATTENTION = {"cuda": "_native_cudnn", "cpu": "native"}  # diffusers' fastest without further packages
FULL_TIME = {"time_freq": 256, "time_hidden": 5376, "time_dim": 2688}  # of the released model, which is not pruned


def build(dims: DenoiserDims, device: torch.device, dtype: torch.dtype, *, small: bool) -> Any:
    """The model made on the device, its weights as torch draws them, its float32 layers as diffusers keeps them.

    Raises ImportError without diffusers.
    """
    from diffusers import MiniMaxH3Transformer3DModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.no_grad():
            model = MiniMaxH3Transformer3DModel(**_sizes(dims, small=small))
    finally:
        torch.set_default_dtype(before)
    for name in model._keep_in_fp32_modules:
        getattr(model, name).float()
    return model.eval().requires_grad_(False)


def choose_attention(model: Any, device: torch.device) -> str:
    """Have the model use its fastest attention on the device, or leave it what it has; gives the name."""
    wanted = ATTENTION[device.type]
    try:
        model.set_attention_backend(wanted)
    except (RuntimeError, ValueError, ImportError):
        return "diffusers' default"
    return wanted


def step(model: Any, dims: DenoiserDims, packing: Packing, device: torch.device) -> Callable[[], Any]:
    """One evaluation of the model on random rows of a packing, ready to be called."""
    index = {kind: torch.arange(packing.rows, device=device)[packing.span(kind)] for kind in ("text", "audio", "video")}
    times = torch.zeros(packing.rows, dtype=torch.long)
    times[packing.span("audio")] = 1
    inputs = {
        "hidden_states": _rows(len(index["video"]), PATCH**2 * dims.video_channels, device),
        "audio_hidden_states": _rows(len(index["audio"]), dims.audio_channels, device),
        "encoder_hidden_states": _rows(len(index["text"]), dims.text_dim, device),
        "timestep": torch.tensor([0.4, 0.6], device=device),
        "timestep_indices": times.to(device),
        "token_tags": packing.token_tags.to(device),
        "position_ids": packing.position_ids.to(device),
        "video_indices": index["video"],
        "audio_indices": index["audio"],
        "text_indices": index["text"],
        "return_dict": False,
    }

    @torch.no_grad()
    def call() -> Any:
        return model(**inputs)

    return call


def _sizes(dims: DenoiserDims, *, small: bool) -> dict[str, Any]:
    time = {"time_freq": 32, "time_hidden": dims.hidden, "time_dim": 64} if small else FULL_TIME
    return {
        "num_attention_heads": dims.heads,
        "attention_head_dim": dims.head_dim,
        "hidden_size": dims.hidden,
        "num_layers": dims.layers,
        "num_refiner_layers": dims.refiner_layers,
        "ffn_dim": dims.ffn,
        "in_channels": dims.video_channels,
        "audio_in_channels": dims.audio_channels,
        "text_dim": dims.text_dim,
        "freq_dim": time["time_freq"],
        "time_embed_hidden_dim": time["time_hidden"],
        "time_embed_dim": time["time_dim"],
        "rope_freq_dim": dims.rope_freqs,
    }


def _rows(count: int, width: int, device: torch.device) -> Tensor:
    return torch.randn((1, count, width), device=device)
