"""diffusers' whole pipeline, block after block, on one of our tiny sets: what a run is held against.

Its canvases are small (`SMALL`): a short edge of 64 instead of 768 and 2048, so that a CPU can do it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.minimax_h3 import before_encoder, encoders
from diffusers.modular_pipelines.minimax_h3 import modular_blocks_minimax_h3 as blocks
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.video_processor import VideoProcessor
from official import components
from oracle import transformer
from text_oracle import whole_text_model
from torch import Tensor

from h3dist.checkpoint.comfy import open_audio_vae, open_denoiser, open_video_vae
from h3dist.checkpoint.vae_names import audio_state, video_state
from h3dist.text.tokenizer import load_tokenizer
from h3dist.vae.weights import read_config

SMALL = {"SHORT_EDGE": 64, "MAX_CANVAS_PIXELS": 64 * 112, "IMAGE_SHORT_EDGE": 64}  # for h3dist.fitting
TASKS = {
    "fl2va": (
        before_encoder.MiniMaxH3ResizeStep,
        encoders.MiniMaxH3FL2VATextEncoderStep,
        encoders.MiniMaxH3KeyframeVaeEncoderStep,
        blocks.MiniMaxH3FL2VACoreDenoiseStep,
        blocks.MiniMaxH3DecodeStep,
    ),
    "ref2va": (
        before_encoder.MiniMaxH3Ref2VASetupStep,
        encoders.MiniMaxH3Ref2VATextEncoderStep,
        encoders.MiniMaxH3Ref2VAReferenceEncoderStep,
        blocks.MiniMaxH3Ref2VACoreDenoiseStep,
        blocks.MiniMaxH3DecodeStep,
    ),
}


@dataclass(frozen=True)
class Official:
    """Rows of both streams after every step, the final frames f32 [F, 3, H, W] in [0, 1], the sound [2, N]."""

    video_rows: list[Tensor]
    audio_rows: list[Tensor]
    states: Tensor
    frames: Tensor
    sound: Tensor


class Recorder(MiniMaxH3Scheduler):
    """Keeps what every step gives."""

    def step(self, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        found = super().step(*args, **kwargs)
        self.seen.append(found[0].clone())
        return found


def recorder(shift: float) -> Recorder:
    made = Recorder(shift=shift)
    made.seen = []
    return made


def load(paths: Mapping[str, Path]) -> SimpleNamespace:
    """All models of a tiny set as a pipeline's components."""
    tokenizer = load_tokenizer(str(paths["tokenizer"]))
    made = components(tokenizer, whole_text_model(paths["text_encoder"], paths["text_encoder_config"]))
    model = transformer(open_denoiser(paths["denoiser"]))
    config = {"canvas_short_edge": 64, "canvas_max_pixels": 64 * 112, "reference_image_short_edge": 64}
    made.__dict__.update(
        transformer=model,
        transformer_ref=model,
        vae=vae(AutoencoderKLMiniMaxH3, video_state(open_video_vae(paths["video_vae"])), paths["video_vae_config"]),
        audio_vae=vae(
            AutoencoderKLMiniMaxH3Audio, audio_state(open_audio_vae(paths["audio_vae"])), paths["audio_vae_config"]
        ),
        config=SimpleNamespace(**config),
        image_processor=VaeImageProcessor(vae_scale_factor=16),
        video_processor=VideoProcessor(vae_scale_factor=16, do_normalize=False),
        pixel_mean=(0.485, 0.456, 0.406),
        pixel_std=(0.229, 0.224, 0.225),
        keyframe_encode_seed=42,
        keyframe_noise_aug=0.999,
        canvas_multiple=32,
        patch_size=(1, 2, 2),
        vae_latent_channels=24,
        vae_spatial_compression_ratio=16,
        vae_frames_per_chunk=17,
        vae_latents_per_chunk=5,
        audio_channels=2,
        audio_latent_channels=32,
        audio_sampling_rate=32000,
        audio_tag=2,
        min_duration=0.0,  # short clips are quicker
        max_duration=15.0,
    )
    return made


def vae(kind: type, state: Mapping[str, Tensor], config: Path) -> torch.nn.Module:
    settings = {name: value for name, value in read_config(config, kind).items() if value is not None}
    model = kind(**settings)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)
    return model.eval().requires_grad_(False)


def run(made: SimpleNamespace, task: str, *, steps: int, seed: int, **inputs: Any) -> Official:
    """The blocks of a task in order; `steps` counts evaluations."""
    made.scheduler, made.audio_scheduler = recorder(12.0), recorder(3.0)
    state = PipelineState()
    state.set("generator", torch.Generator("cpu").manual_seed(seed))
    state.set("num_inference_steps", steps + 1)
    state.set("output_type", "pt")
    for name, value in inputs.items():
        state.set(name, value)
    with torch.no_grad():
        for block in TASKS[task]:
            made, state = block()(made, state)
    return Official(
        made.scheduler.seen,
        made.audio_scheduler.seen,
        state.get("prompt_embeds")[0],
        state.get("videos")[0],
        state.get("audio")[0],
    )
