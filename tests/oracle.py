"""diffusers' own transformer with one of our files' weights, in float32: what our model is held against.

Read by safetensors and dequantised by comfy-kitchen's eager code: no value here comes from our reader.
"""

import comfy_kitchen
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors import safe_open
from torch import Tensor, nn

from h3dist.checkpoint.comfy import DenoiserFile

# Comfy name -> diffusers name, outside the blocks
TOP = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "token_refiner.final_norm": "token_refiner.final_norm",
    "final_layer.norm": "norm_out.norm",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
}
# Comfy name -> diffusers name, inside a block, for what is neither split nor swapped
BLOCK = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.q_norm": "attn.norm_q",
    "attn.k_norm": "attn.norm_k",
    "attn.out_proj": "attn.to_out.0",
    "mlp.fc2": "ff.net.2",
    "adaln_proj.linear": "adaln_proj.linear",
}


def dense_state(dfile: DenoiserFile) -> dict[str, Tensor]:
    """Comfy name without prefix -> tensor in float32, quantised weights dequantised and cropped."""
    state = {}
    with safe_open(dfile.file.path, framework="pt") as file:
        keys = set(file.keys())
        for name, spec in dfile.table.items():
            full = dfile.prefix + name
            tensor = file.get_tensor(full)
            if full.removesuffix("weight") + "weight_scale_2" in keys:
                tensor = comfy_kitchen.dequantize_nvfp4(
                    tensor,
                    file.get_tensor(full + "_scale_2"),
                    file.get_tensor(full + "_scale").view(torch.float8_e4m3fn),
                    torch.float32,
                )
            elif tensor.dtype == torch.int8:
                tensor = tensor.float() * file.get_tensor(full + "_scale")
            rows = spec.shape[0]
            state[name] = tensor[:rows, : spec.shape[1]].float() if tensor.ndim == 2 else tensor.float()
    return state


def denoiser_state_for_diffusers(dfile: DenoiserFile) -> dict[str, Tensor]:
    """The state dict, float32, that `MiniMaxH3Transformer3DModel` loads. The curve's table is left out."""
    dims, found = dfile.dims, {}
    for name, tensor in dense_state(dfile).items():
        stem, _, kind = name.rpartition(".")
        if stem in TOP:
            found[f"{TOP[stem]}.{kind}"] = tensor
        elif "blocks." in stem:
            base, part = _block_parts(stem)
            if part == "attn.qkv_proj":
                heads = _bands(tensor, dims.heads, dims.head_dim, dfile.qkv_order)
                found |= {f"{base}.attn.to_{letter}.weight": rows for letter, rows in zip("qkv", heads, strict=True)}
            elif part == "mlp.fc1":
                gate, up = tensor.chunk(2)
                found[f"{base}.ff.net.0.proj.weight"] = torch.cat([up, gate])
            else:
                found[f"{base}.{BLOCK[part]}.{kind}"] = tensor
    return found


def diffusers_transformer(dfile: DenoiserFile) -> MiniMaxH3Transformer3DModel:
    """diffusers' transformer with the file's weights in float32, in eval mode. Full form only."""
    assert dfile.dims.form == "full"
    return _loaded(dfile, denoiser_state_for_diffusers(dfile))


def curve_transformer(dfile: DenoiserFile) -> MiniMaxH3Transformer3DModel:
    """The same for the curve form: AdaLN projections read the curve at each time, no activation between."""
    assert dfile.dims.form == "curve"
    state = denoiser_state_for_diffusers(dfile)
    model = _loaded(dfile, state)
    model.time_proj = nn.Identity()
    model.time_embedder = Curve(dense_state(dfile)["adaln_t_table"])
    for block in model.transformer_blocks:
        block.adaln_proj = BlockModulation(block.adaln_proj.linear)
    model.norm_out = FinalModulation(model.norm_out.norm, model.norm_out.linear)
    return model


def transformer(dfile: DenoiserFile) -> MiniMaxH3Transformer3DModel:
    """`diffusers_transformer` or `curve_transformer`, as the file's form is."""
    return diffusers_transformer(dfile) if dfile.dims.form == "full" else curve_transformer(dfile)


class Curve(nn.Module):
    """c(t): linear interpolation of a table [G, k] over [0, 1]; times [n] to [n, k]."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, times: Tensor) -> Tensor:
        grid = self.table.shape[0]
        place = times.float().clamp(0, 1) * (grid - 1)
        low = place.floor().clamp(max=grid - 2)
        first, second = self.table[low.long()], self.table[low.long() + 1]
        return first + (place - low)[:, None] * (second - first)


class BlockModulation(nn.Module):
    """A block's six modulations straight from the curve: [n, k] to six of [n * 3 modalities, C]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, curve: Tensor) -> tuple[Tensor, ...]:
        rows = self.linear(curve)
        return rows.view(3 * curve.shape[0], -1).chunk(6, dim=-1)


class FinalModulation(nn.Module):
    """The final norm, shift and scale straight from the curve."""

    def __init__(self, norm: nn.Module, linear: nn.Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, hidden_states: Tensor, curve: Tensor, timestep_indices: Tensor) -> Tensor:
        shift, scale = (part[timestep_indices] for part in self.linear(curve).chunk(2, dim=-1))
        return self.norm(hidden_states) * (1 + scale) + shift


def _block_parts(stem: str) -> tuple[str, str]:
    """A name such as "token_refiner.blocks.0.attn.qkv_proj" as diffusers' block and the rest of our name."""
    where, _, rest = stem.partition("blocks.")
    index, _, part = rest.partition(".")
    return f"{'token_refiner.refiner_blocks' if where else 'transformer_blocks'}.{index}", part


def _bands(rows: Tensor, heads: int, size: int, order: str) -> tuple[Tensor, ...]:
    if order == "bands":
        return rows.chunk(3)
    return rows.view(heads, 3, size, -1).transpose(0, 1).reshape(3, heads * size, -1).unbind()


def _loaded(dfile: DenoiserFile, state: dict[str, Tensor]) -> MiniMaxH3Transformer3DModel:
    dims = dfile.dims
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=dims.heads,
        attention_head_dim=dims.head_dim,
        hidden_size=dims.hidden,
        num_layers=dims.layers,
        num_refiner_layers=dims.refiner_layers,
        ffn_dim=dims.ffn,
        in_channels=dims.video_channels,
        audio_in_channels=dims.audio_channels,
        text_dim=dims.text_dim,
        freq_dim=dims.time_freq or 2,
        time_embed_hidden_dim=dims.time_hidden or 2,
        time_embed_dim=dims.time_dim,
        rope_freq_dim=dims.rope_freqs,
    )
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all(name.startswith("time_embedder.") for name in missing) and (not missing or dims.form == "curve"), missing
    return model.float().eval().requires_grad_(False)
