"""The two VAEs' tensors in the names and orders of diffusers' modules (AutoencoderKLMiniMaxH3 and …Audio).

Comfy's video file keeps the decoder's q, k and v head by head and the gate of the MLP first, where diffusers
has three layers and the gate second; its audio file has folded weights where diffusers' modules keep
magnitude and direction.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from h3dist.checkpoint.audio_names import normalised_weights
from h3dist.checkpoint.comfy import StateFile

LATENTS = ("latents_mean", "latents_std")
DOWN = r"encoder.down_blocks.\1.resnets.\2."
# Comfy's name -> diffusers' name, for what is neither split nor swapped
VIDEO = {
    r"encoder\.down\.(\d+)\.block\.(\d+)\.nin_shortcut\.": DOWN + "conv_shortcut.",
    r"encoder\.down\.(\d+)\.block\.(\d+)\.": DOWN,
    r"encoder\.down\.(\d+)\.downsample\.conv\.": r"encoder.down_blocks.\1.downsamplers.0.conv.",
    r"decoder\.x_embedder\.": r"decoder.proj_in.",
    r"(decoder\.transformer_blocks\.\d+)\.attn\.to_out\.": r"\1.attn.to_out.0.",
    r"(decoder\.transformer_blocks\.\d+)\.ff\.w2\.": r"\1.ff.net.2.",
}


def video_state(state: StateFile, head_dim: int = 64) -> dict[str, Tensor]:
    """The state dict of AutoencoderKLMiniMaxH3, dtypes as in the file, without latents_mean and latents_std.

    `head_dim` is the decoder's, which no shape tells. Quantised layers come as float32.
    """
    found: dict[str, Tensor] = {}
    for name in state.table:
        if name not in LATENTS:
            found |= _video_tensor(name, state.tensor(name), head_dim)
    return found


def audio_state(state: StateFile) -> dict[str, Tensor]:
    """The state dict of AutoencoderKLMiniMaxH3Audio, without latents_mean and latents_std.

    A folded weight W goes back as direction W and magnitude |W| (norm over all but the first dimension),
    which the modules multiply to W again.
    """
    found = {name: state.tensor(name) for name in state.table if name not in LATENTS}
    for layer in normalised_weights(state.dims):
        weight = found.pop(f"{layer}.weight")
        found[f"{layer}.weight_v"] = weight
        found[f"{layer}.weight_g"] = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.ndim - 1))
    return found


def _video_tensor(name: str, tensor: Tensor, head_dim: int) -> dict[str, Tensor]:
    stem, _, kind = name.rpartition(".")
    if stem.endswith("attn.to_qkv"):
        heads = tensor.unflatten(0, (-1, 3, head_dim))  # [heads, q k v, D, …]
        base = stem.removesuffix("to_qkv")
        return {f"{base}to_{part}.{kind}": heads[:, at].flatten(0, 1) for at, part in enumerate("qkv")}
    if stem.endswith("ff.w1"):
        gate, up = tensor.chunk(2)
        return {f"{stem.removesuffix('w1')}net.0.proj.{kind}": torch.cat([up, gate])}
    for pattern, replacement in VIDEO.items():
        renamed, hits = re.subn(pattern, replacement, name)
        if hits:
            return {renamed: tensor}
    return {name: tensor}
