"""What a file is, by the names of its tensors: one of the four models, several merged, or another thing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from h3dist.checkpoint.file import TensorFile, TensorInfo
from h3dist.errors import CheckpointError

Kind = Literal["denoiser", "text_encoder", "video_vae", "audio_vae"]

# names that together tell a model; any prefix that ends in a dot may stand before all of them
ANCHORS: dict[Kind, tuple[str, ...]] = {
    "denoiser": ("video_patch_proj.weight", "audio_patch_proj.weight"),
    "text_encoder": ("visual.deepstack_merger_list.0.norm.weight", "model.layers.0.self_attn.q_proj.weight"),
    "video_vae": ("decoder.transformer_blocks.0.scale1", "encoder.down.5.block.0.conv1.weight"),
    "audio_vae": ("pre_block.attn.zero_k_bias",),
}
NAMES: dict[Kind, str] = {
    "denoiser": "the denoiser",
    "text_encoder": "the text encoder",
    "video_vae": "the video VAE",
    "audio_vae": "the audio VAE",
}
# parts of names -> what a file with such a tensor looks like; the first that matches is told
LOOKALIKES: dict[str, str] = {
    "lora_": "a LoRA adapter",
    "h3_pdd.": "a side-car of an H3 denoiser, not the denoiser",
    "transformer_blocks.0.adaln_proj.linear.weight": "an H3 denoiser in diffusers' form",
    "encoder.down_blocks.0.resnets.0.conv1.weight": "an H3 VAE in diffusers' form",
    "language_model.layers.0.": "a whole Qwen-VL model in Hugging Face's form",
    "double_blocks.0.img_attn": "a FLUX or HunyuanVideo model",
    "joint_blocks.0.": "a Stable Diffusion 3 model",
    "input_blocks.0.0.weight": "a Stable Diffusion model",
    "patchify_proj.weight": "an LTX-Video model",
    "blocks.0.self_attn.q.weight": "a Wan video model",
    "add_q_proj.weight": "a Qwen-Image or other two-stream model",
    "encoder.block.0.layer.0.SelfAttention": "a T5 text encoder",
    "text_model.encoder.layers.0.": "a CLIP text encoder",
    "decoder.up.0.block.0.conv1.weight": "an image VAE",
    "model.layers.0.self_attn.q_proj.weight": "a text-only language model, without the vision tower",
    "blocks.0.attn.qkv_proj.weight": "a shard of an H3 denoiser, or one without its patch projections",
}


def find_parts(file: TensorFile) -> dict[Kind, str]:
    """Which models a file holds, each with the prefix of its names ("" where they are plain).

    Raises CheckpointError where one model is there twice under different prefixes.
    """
    found: dict[Kind, str] = {}
    for kind, anchors in ANCHORS.items():
        prefixes = [
            prefix
            for prefix in _prefixes(file.tensors, anchors[0])
            if all(prefix + anchor in file.tensors for anchor in anchors)
        ]
        if len(prefixes) > 1:
            listed = ", ".join(repr(prefix) for prefix in sorted(prefixes))
            raise CheckpointError(f"{file.path} holds {NAMES[kind]} {len(prefixes)} times, under {listed}")
        if prefixes:
            found[kind] = prefixes[0]
    return found


def identify(file: TensorFile) -> Kind | Literal["merged"]:
    """What a file is. Raises CheckpointError, saying what it looks like, where it is nothing that H3 uses."""
    parts = find_parts(file)
    if not parts:
        raise CheckpointError(f"{file.path} is no H3 model: {looks_like(file.tensors)}")
    return next(iter(parts)) if len(parts) == 1 else "merged"


def own_tensors(file: TensorFile, kind: Kind, parts: dict[Kind, str]) -> dict[str, TensorInfo]:
    """The tensors of one of the file's parts, by name without its prefix."""
    prefix = parts[kind]
    others = tuple(other for other in parts.values() if len(other) > len(prefix))
    return {
        name.removeprefix(prefix): info
        for name, info in file.tensors.items()
        if name.startswith(prefix) and not name.startswith(others)
    }


def looks_like(names: Iterable[str]) -> str:
    """A guess at what tensors of these names are, as the tail of a message."""
    names = list(names)
    for part, meaning in LOOKALIKES.items():
        if any(part in name for name in names):
            return f"it looks like {meaning}"
    shown = ", ".join(sorted(names)[:3])
    return f"its tensors are of no model known here ({shown or 'it has none'})"


def _prefixes(names: Iterable[str], anchor: str) -> list[str]:
    ends = [name.removesuffix(anchor) for name in names if name.endswith(anchor)]
    return [prefix for prefix in ends if not prefix or prefix.endswith(".")]
