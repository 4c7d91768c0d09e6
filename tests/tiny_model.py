"""A tiny random denoiser in Comfy names, unquantised, and one forward of diffusers taken apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

# Sizes that bite: heads that 2, 4 and 6 do not divide, hidden other than heads * head size.
HIDDEN, HEADS, HEAD_DIM, FFN, LAYERS, REFINER_LAYERS = 80, 7, 16, 192, 3, 2
TEXT_DIM, TIME_FREQ, TIME_HIDDEN, TIME_DIM, ROPE_FREQS = 24, 16, 40, 32, 2
CURVE_GRID, CURVE_RANK = 33, 5
INNER = HEADS * HEAD_DIM
FLOAT32 = ("video_patch_proj", "audio_patch_proj", "time_embedder", "_out.", "rope", "adaln_t_table")


def random_state(form: str, seed: int = 0) -> dict[str, Tensor]:
    """A Comfy-named state dict, form "full" or "curve", with the released files' dtypes."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in _shapes(form).items():
        value = _spread(name, torch.randn(shape, generator=generator))
        state[name] = value if any(part in name for part in FLOAT32) else value.to(torch.bfloat16)
    state["rope.inv_freq"] = 1 / 10000 ** (torch.arange(ROPE_FREQS) / ROPE_FREQS)
    return state


def _spread(name: str, noise: Tensor) -> Tensor:
    """Scales at which every part of a block matters to its output: gates near 1, attention not flat."""
    if "norm" in name:
        return 1.5 + 0.3 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    gain = 3.0 if "adaln_proj" in name else 1.2
    return gain * noise / noise.shape[-1] ** 0.5


def _shapes(form: str) -> dict[str, tuple[int, ...]]:
    width = CURVE_RANK if form == "curve" else TIME_DIM
    shapes = _biased("video_patch_proj", HIDDEN, 96) | _biased("audio_patch_proj", HIDDEN, 32)
    shapes |= _biased("condition_proj", HIDDEN, TEXT_DIM) | {"token_refiner.final_norm.weight": (HIDDEN,)}
    shapes |= _biased("final_layer.video_out", 96, HIDDEN) | _biased("final_layer.audio_out", 32, HIDDEN)
    shapes |= _biased("final_layer.adaln_proj.linear", 2 * HIDDEN, width) | {"final_layer.norm.weight": (HIDDEN,)}
    for index in range(REFINER_LAYERS):
        shapes |= _block(f"token_refiner.blocks.{index}")
    for index in range(LAYERS):
        name = f"blocks.{index}"
        shapes |= _block(name) | _biased(f"{name}.adaln_proj.linear", 18 * HIDDEN, width)
    if form == "curve":
        return shapes | {"adaln_t_table": (CURVE_GRID, CURVE_RANK)}
    shapes |= _biased("time_embedder.proj_in", TIME_HIDDEN, TIME_FREQ)
    return shapes | _biased("time_embedder.proj_out", TIME_DIM, TIME_HIDDEN)


def _biased(name: str, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)}


def _block(name: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.norm1.weight": (HIDDEN,),
        f"{name}.norm2.weight": (HIDDEN,),
        f"{name}.attn.q_norm.weight": (HEAD_DIM,),
        f"{name}.attn.k_norm.weight": (HEAD_DIM,),
        f"{name}.attn.qkv_proj.weight": (3 * INNER, HIDDEN),
        f"{name}.attn.out_proj.weight": (HIDDEN, INNER),
        f"{name}.mlp.fc1.weight": (2 * FFN, HIDDEN),
        f"{name}.mlp.fc2.weight": (HIDDEN, FFN),
    }


def write(state: dict[str, Tensor], path: Path) -> Path:
    save_file(state, path)
    return path


@dataclass
class OracleStep:
    """What diffusers computes in one forward: hidden states around every block, and both outputs."""

    hidden: list[Tensor]
    text: Tensor
    video: Tensor
    audio: Tensor


def oracle_step(
    model: nn.Module,
    packed: SimpleNamespace,
    states_Lt: Tensor,
    video_rows: Tensor,
    audio_rows: Tensor,
    times: tuple[float, float],
) -> OracleStep:
    """One forward with video (and text) rows at times[0] and audio rows at times[1]."""
    seen: dict[str, list[Tensor]] = {"hidden": [], "text": []}
    handles = [model.token_refiner.register_forward_hook(lambda m, i, o: seen["text"].append(o[0].clone()))]
    handles.append(
        model.transformer_blocks[0].register_forward_pre_hook(lambda m, i: seen["hidden"].append(i[0][0].clone()))
    )
    for block in model.transformer_blocks:
        handles.append(block.register_forward_hook(lambda m, i, o: seen["hidden"].append(o[0].clone())))
    indices = torch.zeros(packed.position_ids.shape[0], dtype=torch.int64)
    indices[packed.audio_indices] = 1
    video, audio = model(
        hidden_states=video_rows[None],
        audio_hidden_states=audio_rows[None],
        encoder_hidden_states=states_Lt[None],
        timestep=torch.tensor(times),
        timestep_indices=indices,
        token_tags=packed.token_tags,
        position_ids=packed.position_ids,
        video_indices=packed.video_indices,
        audio_indices=packed.audio_indices,
        text_indices=packed.text_indices,
        return_dict=False,
    )
    for handle in handles:
        handle.remove()
    return OracleStep(seen["hidden"], seen["text"][0], video[0], audio[0])


def error(value: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, relative to the largest magnitude expected."""
    assert value.shape == expected.shape, (value.shape, expected.shape)
    return ((value.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
