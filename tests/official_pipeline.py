"""diffusers' whole MiniMax H3 pipeline over one of our sets, in float32: what runs of contract "official" must give.

Its blocks run as they are, from the prompt to frames and sound. Weights come by safetensors and comfy-kitchen; the
VAEs' names are mapped by our own tables, which have tests of their own.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy_kitchen
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Blocks, MiniMaxH3ModularPipeline
from oracle import transformer
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from h3dist.checkpoint.comfy import open_audio_vae, open_denoiser, open_video_vae
from h3dist.checkpoint.vae_names import audio_state, video_state

HELPERS = ("weight_scale", "weight_scale_2", "comfy_quant", "pre_quant_scale", "input_scale")


class Tracing(MiniMaxH3Scheduler):
    """diffusers' scheduler, which also keeps what every step gives."""

    trace: list[Tensor]

    def step(self, *args: Any, **options: Any) -> Any:
        given = super().step(*args, **options)
        self.trace.append(given[0].clone())
        return given


class Short(MiniMaxH3ModularPipeline):
    """diffusers' pipeline without its lower bound of five seconds."""

    min_duration = 0.0


class TextOnly:
    """Stands in for the image processor, of which a prompt needs this alone."""

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(row) for row in ids]


def official_pipeline(paths: Mapping[str, Path]) -> Short:
    """diffusers' pipeline over the files of a set, as `write_tiny` names them."""
    pipe = MiniMaxH3Blocks().get_workflow("t2va").init_pipeline()
    pipe.__class__ = Short
    pipe.update_components(
        transformer=transformer(open_denoiser(paths["denoiser"])),
        text_encoder=text_encoder(paths["text_encoder"], paths["text_encoder_config"]),
        tokenizer=AutoTokenizer.from_pretrained(paths["tokenizer"]),
        processor=TextOnly(),
        vae=filled(AutoencoderKLMiniMaxH3, paths["video_vae_config"], video_state(open_video_vae(paths["video_vae"]))),
        audio_vae=filled(
            AutoencoderKLMiniMaxH3Audio, paths["audio_vae_config"], audio_state(open_audio_vae(paths["audio_vae"]))
        ),
        scheduler=Tracing(shift=12.0),
        audio_scheduler=Tracing(shift=3.0),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_official(pipe: Short, request: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a request gives, under the names and in the shapes of our intermediates and traces."""
    pipe.scheduler.trace, pipe.audio_scheduler.trace = [], []
    state = pipe(
        prompt=request["prompt"],
        width=request["width"],
        height=request["height"],
        num_frames=request["frames"],
        num_inference_steps=request["steps"] + 1,  # diffusers counts the levels, clean included
        generator=torch.Generator().manual_seed(request["seed"]),
        output_type="pt",
    ).values
    shape = tuple(state[name] for name in ("num_latent_frames", "latent_height", "latent_width"))
    found = {
        "text_states": state["prompt_embeds"][0],
        "text_tags": state["text_token_tags"],
        "position_ids": state["position_ids"],
        "token_tags": state["token_tags"],
        "video_latents": state["latents"],
        "audio_latents": state["audio_latents"].transpose(0, 1)[None],
        "frames": (state["videos"][0].permute(0, 2, 3, 1) * 255).round().to(torch.uint8),
        "audio": state["audio"][0],
    }
    for index, (video, audio) in enumerate(zip(pipe.scheduler.trace, pipe.audio_scheduler.trace, strict=True)):
        found[f"step.{index + 1:03d}.video_latents"] = as_video(video, *shape)
        found[f"step.{index + 1:03d}.audio_latents"] = audio.view(2, -1, 32).permute(2, 0, 1)[None]
    return found


def as_video(rows: Tensor, frames: int, height: int, width: int) -> Tensor:
    """Rows [T * h/2 * w/2, 24 * 2 * 2], frame by frame and row by row, as latents [1, 24, T, h, w]."""
    patches = rows.view(frames, height // 2, width // 2, 24, 2, 2)
    return patches.permute(3, 0, 1, 4, 2, 5).reshape(1, 24, frames, height, width)


def text_encoder(path: Path, config: Path) -> Qwen3VLForConditionalGeneration:
    """transformers' whole model, with more layers than the file has: the pipeline reads hidden state 50."""
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**json.loads(config.read_text())))
    missing, unexpected = model.load_state_dict(text_state(path, model), strict=False)
    assert not unexpected, unexpected
    past = ("layers.50.", "layers.51.", "language_model.norm.", "lm_head.")  # of what the pipeline reads
    assert all(any(part in name for part in past) for name in missing), missing
    return model.float().eval().requires_grad_(False)


def text_state(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The file's tensors in float32, by transformers' names: dequantised, cropped, AWQ's scales multiplied in."""
    shapes, state = {name: tensor.shape for name, tensor in model.state_dict().items()}, {}
    with safe_open(path, framework="pt") as file:
        kept = set(file.keys())
        for name in (name for name in kept if not name.endswith(HELPERS)):
            theirs = f"model.{name}".replace("model.model.", "model.language_model.", 1)
            tensor, layer = file.get_tensor(name), name.removesuffix("weight")
            if f"{name}_scale_2" in kept:
                scales = file.get_tensor(f"{name}_scale").view(torch.float8_e4m3fn)
                scale = file.get_tensor(f"{name}_scale_2")
                tensor = comfy_kitchen.dequantize_nvfp4(tensor, scale, scales, torch.float32)
                tensor = tensor[: shapes[theirs][0], : shapes[theirs][1]]
            elif tensor.dtype == torch.int8:
                tensor = tensor.float() * file.get_tensor(f"{name}_scale")
            if f"{layer}pre_quant_scale" in kept:
                tensor = tensor * file.get_tensor(f"{layer}pre_quant_scale").float()
            state[theirs] = tensor.float()
    return state


def filled(kind: type[nn.Module], config: Path, state: Mapping[str, Tensor]) -> nn.Module:
    """diffusers' VAE `kind`, as its configuration says, with weights in float32."""
    model = kind(**json.loads(config.read_text()))
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval().requires_grad_(False)
