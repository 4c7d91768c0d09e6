"""A tiny random denoiser in Comfy names, and diffusers' transformer holding the same numbers.

The oracle is built by names and formulas alone: it shares no code with h3dist. Diffusers has no curve form,
so there its time embedder is replaced by an interpolated table and its AdaLN projections by ones without
SiLU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import MiniMaxH3Transformer3DModel
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
    shapes |= _biased("final_layer.adaln_proj.linear", 2 * HIDDEN, width) | {
        "final_layer.norm.weight": (HIDDEN,)
    }
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


RENAMED = (
    ("token_refiner.blocks.", "token_refiner.refiner_blocks."),
    ("blocks.", "transformer_blocks."),
    ("video_patch_proj.", "proj_in."),
    ("audio_patch_proj.", "audio_proj_in."),
    ("condition_proj.", "context_embedder."),
    ("time_embedder.proj_in.", "time_embedder.linear_1."),
    ("time_embedder.proj_out.", "time_embedder.linear_2."),
    ("final_layer.norm.", "norm_out.norm."),
    ("final_layer.adaln_proj.linear.", "norm_out.linear."),
    ("final_layer.video_out.", "proj_out."),
    ("final_layer.audio_out.", "audio_proj_out."),
    (".q_norm.", ".norm_q."),
    (".k_norm.", ".norm_k."),
    (".out_proj.", ".to_out.0."),
    (".mlp.fc2.", ".ff.net.2."),
)


def diffusers_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers in float32 under diffusers' names: q, k, v apart and the gate after the value."""
    renamed = {}
    for name, tensor in state.items():
        if name in ("rope.inv_freq", "adaln_t_table"):
            continue
        for old, new in RENAMED:
            if name.startswith(old) or (old.startswith(".") and old in name):
                name = name.replace(old, new, 1)
        if ".qkv_proj." in name:
            for part, band in zip("qkv", tensor.float().chunk(3), strict=True):
                renamed[name.replace("qkv_proj", f"to_{part}")] = band
        elif ".mlp.fc1." in name:
            gate, up = tensor.float().chunk(2)
            renamed[name.replace(".mlp.fc1.", ".ff.net.0.proj.")] = torch.cat([up, gate])
        else:
            renamed[name] = tensor.float()
    return renamed


class Curve(nn.Module):
    """Stands for diffusers' time embedder: the table, linear between grid points."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, t: Tensor) -> Tensor:
        grid = self.table.shape[0] - 1
        below = (t * grid).floor().clamp(0, grid - 1)
        part = (t * grid - below)[:, None]
        return self.table[below.long()] + part * (self.table[below.long() + 1] - self.table[below.long()])


class CurveModulation(nn.Module):
    """Stands for diffusers' block modulation, without its SiLU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, temb: Tensor) -> tuple[Tensor, ...]:
        return self.linear(temb).view(-1, 6 * HIDDEN).chunk(6, dim=-1)


class CurveNormOut(nn.Module):
    """Stands for diffusers' final norm, without its SiLU."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = module.norm, module.linear

    def forward(self, hidden: Tensor, temb: Tensor, timestep_indices: Tensor) -> Tensor:
        shift, scale = self.linear(temb).chunk(2, dim=-1)
        return self.norm(hidden) * (1 + scale[timestep_indices]) + shift[timestep_indices]


def oracle(state: dict[str, Tensor]) -> MiniMaxH3Transformer3DModel:
    """Diffusers' transformer in float32 with the state's numbers."""
    curve = state.get("adaln_t_table")
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_refiner_layers=REFINER_LAYERS,
        ffn_dim=FFN,
        text_dim=TEXT_DIM,
        freq_dim=TIME_FREQ,
        time_embed_hidden_dim=TIME_HIDDEN,
        time_embed_dim=TIME_DIM if curve is None else CURVE_RANK,
        rope_freq_dim=ROPE_FREQS,
    ).eval()
    if curve is not None:
        model.time_proj, model.time_embedder = nn.Identity(), Curve(curve)
    state = diffusers_state(state) | ({} if curve is None else {"time_embedder.table": curve})
    model.load_state_dict(state, strict=True)
    if curve is not None:
        for block in model.transformer_blocks:
            block.adaln_proj = CurveModulation(block.adaln_proj.linear)
        model.norm_out = CurveNormOut(model.norm_out)
    return model.requires_grad_(False)


@dataclass
class OracleStep:
    """What diffusers computes in one forward: hidden states around every block, and both outputs."""

    hidden: list[Tensor]
    text: Tensor
    video: Tensor
    audio: Tensor


def oracle_step(
    model: MiniMaxH3Transformer3DModel,
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
        model.transformer_blocks[0].register_forward_pre_hook(
            lambda m, i: seen["hidden"].append(i[0][0].clone())
        )
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
