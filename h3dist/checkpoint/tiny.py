"""Writes a whole set of small random checkpoints, with the released files' names, dtypes and formats.

Sizes are chosen to bite: heads that 4, 6 and 8 do not divide, a hidden size that is neither heads * head size
nor a multiple of 64, matrices whose rows are no multiple of 128, an MLP of 21 units of 16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Generator, Tensor

from h3dist.checkpoint import audio_names, text_names, tiny_values, video_names
from h3dist.checkpoint.audio_names import AudioDims
from h3dist.checkpoint.denoiser_names import DenoiserDims, denoiser_table
from h3dist.checkpoint.quantise import to_int8, to_nvfp4
from h3dist.checkpoint.text_names import TextDims, VisionDims
from h3dist.checkpoint.tiny_tokenizer import write_tokenizer
from h3dist.checkpoint.video_names import VideoDims
from h3dist.errors import ConfigError, OutputError, nearest

TEXT = TextDims(112, 4, 2, 32, 144, 512, VisionDims(32, 64, 4, 64, (3, 2, 16, 16), merge=4, deepstack=3))
VIDEO = VideoDims((8, 8, 8, 16, 16, 16), 2, latent=24, width=128, ffn=512, layers=2, registers=4)
AUDIO = AudioDims(encoder=4, trunk=64, latent=32, decoder=128)
FULL = DenoiserDims(
    hidden=208, heads=14, head_dim=32, ffn=336, layers=3, refiner_layers=2, text_dim=TEXT.hidden,
    video_channels=VIDEO.latent, audio_channels=AUDIO.latent, rope_freqs=4, form="full", curve_grid=0,
    curve_rank=0, time_freq=32, time_hidden=208, time_dim=104,
)  # fmt: skip
CURVE = replace(FULL, form="curve", curve_grid=129, curve_rank=8, time_freq=0, time_hidden=0, time_dim=8)
FORMS = {"curve": CURVE, "full": FULL}
AUDIO_HEADS = 2
VIDEO_HEAD_DIM = 64
BLOCK_LINEARS = ("attn.qkv_proj.weight", "attn.out_proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
FLOAT32 = ("video_patch_proj.", "audio_patch_proj.", "time_embedder.", "final_layer.video_out.",
           "final_layer.audio_out.", "rope.", "adaln_t_table")  # fmt: skip


def write_tiny(directory: str | Path, form: str = "curve", seed: int = 0) -> dict[str, Path]:
    """Writes a set into `directory` (made if absent; files of these names are replaced) and gives its paths.

    `form` is the denoiser's, of FORMS. The same seed gives the same bytes. `overrides.txt` holds the
    overrides of a run on the CPU, with "@" where the directory's path goes. Raises ConfigError, OutputError.
    """
    if form not in FORMS:
        raise ConfigError(f"form is {form!r}; it may be {' or '.join(FORMS)}{nearest(form, FORMS)}")
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write(folder, form, seed)
    except OSError as error:
        raise OutputError(f"cannot write tiny checkpoints into {folder}: {error}") from None


def denoiser_state(dims: DenoiserDims, seed: int) -> dict[str, Tensor]:
    """The tensors of a random denoiser's file; as in the released one, four linears a block are NVFP4."""
    adaln = torch.float16 if dims.form == "curve" else torch.bfloat16
    state: dict[str, Tensor] = {}
    for name, value in tiny_values.values(denoiser_table(dims), tiny_values.DENOISER, _source(seed)).items():
        if name.startswith("blocks.") and name.endswith(BLOCK_LINEARS):
            state |= _marked(name.removesuffix(".weight"), to_nvfp4(value), {"format": "nvfp4"})
        elif name.startswith(FLOAT32):
            state[name] = value
        else:
            state[name] = value.to(adaln if "adaln_proj" in name else torch.bfloat16)
    return state


def text_state(dims: TextDims, seed: int) -> dict[str, Tensor]:
    """The tensors of a random text encoder's file: NVFP4, AWQ scales on two layers, an int8 embedding."""
    source = _source(seed)
    state: dict[str, Tensor] = {}
    for name, value in tiny_values.values(text_names.text_table(dims), tiny_values.TEXT, source).items():
        layer = name.removesuffix(".weight")
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            if layer.endswith(("o_proj", "down_proj")):
                scale = (0.3 * torch.randn(value.shape[1], generator=source)).exp().bfloat16()
                state[f"{layer}.pre_quant_scale"], value = scale, value / scale.float()
            marker = {"format": "nvfp4", "full_precision_matrix_mult": True}
            state |= _marked(layer, to_nvfp4(value), marker)
        elif layer == "model.embed_tokens":
            state |= _marked(layer, to_int8(value), {"format": "int8_tensorwise"})
        else:
            state[name] = value.bfloat16()
    return state


def video_state(dims: VideoDims, seed: int) -> dict[str, Tensor]:
    """The tensors of a random video VAE's file: float16, the latents' mean and deviation float32."""
    made = tiny_values.values(video_names.video_table(dims), tiny_values.VIDEO, _source(seed))
    made["decoder.mask_token"] = torch.zeros(1, 1, dims.width)
    return {name: value if name.startswith("latents_") else value.half() for name, value in made.items()}


def audio_state(dims: AudioDims, seed: int) -> dict[str, Tensor]:
    """The tensors of a random audio VAE's file: float32."""
    return tiny_values.values(audio_names.audio_table(dims), tiny_values.AUDIO, _source(seed))


def _write(folder: Path, form: str, seed: int) -> dict[str, Path]:
    paths = {
        "denoiser": folder / "h3_tiny_nvfp4.safetensors",
        "text_encoder": folder / "qwen3vl_tiny_nvfp4_awq.safetensors",
        "text_encoder_config": folder / "text_encoder_config.json",
        "tokenizer": folder / "tokenizer",
        "video_vae": folder / "video_vae_tiny_fp16.safetensors",
        "video_vae_config": folder / "video_vae_config.json",
        "audio_vae": folder / "audio_vae_tiny_fp32.safetensors",
        "audio_vae_config": folder / "audio_vae_config.json",
    }
    tokens = write_tokenizer(paths["tokenizer"])
    _save(paths["denoiser"], denoiser_state(FORMS[form], 4 * seed), {})
    layers = {"num_hidden_layers": text_names.LAYERS, "output": "unnormalized_hidden_after_layer_50"}
    _save(paths["text_encoder"], text_state(TEXT, 4 * seed + 1), {"minimax_h3_te": layers})
    _json(paths["text_encoder_config"], _text_config(TEXT, tokens))
    video = video_state(VIDEO, 4 * seed + 2)
    facts = _latents(video)
    _save(
        paths["video_vae"],
        video,
        {"minimax_h3_video_vae": facts | {"vae_clip_length": 17, "vae_token_drop": 3}},
    )
    _json(paths["video_vae_config"], _video_config(VIDEO) | facts)
    audio = audio_state(AUDIO, 4 * seed + 3)
    facts = _latents(audio)
    _save(
        paths["audio_vae"],
        audio,
        {"minimax_h3_audio_vae": facts | {"sample_rate": 32000, "output_channel": 2}},
    )
    _json(paths["audio_vae_config"], _audio_config(AUDIO) | facts)
    lines = [f"model.{slot}=@/{path.name}" for slot, path in paths.items()]
    lines += ["runtime.device=cpu", "runtime.dtype=float32"]
    overrides = folder / "overrides.txt"
    overrides.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths | {"overrides": overrides}


def _source(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def _marked(layer: str, parts: Mapping[str, Tensor], marker: Mapping[str, Any]) -> dict[str, Tensor]:
    mark = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
    return {f"{layer}.{part}": value for part, value in parts.items()} | {f"{layer}.comfy_quant": mark}


def _save(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    path.write_bytes(save({name: value.contiguous() for name, value in state.items()}, texts or None))


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _latents(state: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: state[name].tolist() for name in ("latents_mean", "latents_std")}


def _video_config(dims: VideoDims) -> dict[str, Any]:
    return {
        "block_out_channels": list(dims.channels),
        "layers_per_block": dims.blocks_per_level,
        "norm_num_groups": 4,
        "decoder_num_layers": dims.layers,
        "decoder_num_attention_heads": dims.width // VIDEO_HEAD_DIM,
        "decoder_attention_head_dim": VIDEO_HEAD_DIM,
    }


def _audio_config(dims: AudioDims) -> dict[str, Any]:
    return {
        "encoder_dim": dims.encoder,
        "latent_dim": dims.trunk,
        "decoder_dim": dims.decoder,
        "num_attention_heads": AUDIO_HEADS,
    }


def _text_config(dims: TextDims, tokens: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "image_token_id": tokens["<|image_pad|>"],
        "video_token_id": tokens["<|video_pad|>"],
        "vision_start_token_id": tokens["<|vision_start|>"],
        "vision_end_token_id": tokens["<|vision_end|>"],
        "tie_word_embeddings": False,
        "text_config": _language_config(dims),
        "vision_config": _vision_config(dims),
    }


def _language_config(dims: TextDims) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "intermediate_size": dims.ffn,
        "max_position_embeddings": 4096,
        "num_attention_heads": dims.heads,
        "num_hidden_layers": text_names.LAYERS + 2,  # more than the file has, as the released model's config
        "num_key_value_heads": dims.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
            "rope_theta": 5000000.0,
            "rope_type": "default",
        },
        "vocab_size": dims.vocab,
    }


def _vision_config(dims: TextDims) -> dict[str, Any]:
    vision = dims.vision
    channels, frames, height, _ = vision.patch
    return {
        "model_type": "qwen3_vl_vision",
        "deepstack_visual_indexes": list(range(1, 1 + vision.deepstack)),
        "depth": vision.layers,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": vision.hidden,
        "in_channels": channels,
        "intermediate_size": vision.ffn,
        "num_heads": 2,
        "num_position_embeddings": vision.positions,
        "out_hidden_size": dims.hidden,
        "patch_size": height,
        "spatial_merge_size": int(vision.merge**0.5),
        "temporal_patch_size": frames,
    }
