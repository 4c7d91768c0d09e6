"""The released checkpoints, each from one pinned revision: repository, file, bytes, and the slot it fills.

Sizes are those of the published files. The tokenizer is a folder of the original model's repository.
"""

from h3dist.cloud.recipe import Checkpoint
from h3dist.text.tokenizer import REPOSITORY, REVISION, SUBFOLDER

_COMFY = {"repo": "Comfy-Org/MiniMax-H3", "revision": "4cc1d817b6184899b41293954329f576cb5ae86b"}

RELEASED = (
    Checkpoint(
        slot="denoiser",
        variable="H3_MODEL_PATH",
        repo="lilcheaty/MiniMax-H3-NVFP4",
        revision="8c5abfed61e1b6a170240792b65253fba1a65b7b",
        file="minimax_h3_fl2va_pruned_nvfp4.safetensors",
        size=12_528_636_800,
    ),
    Checkpoint(
        slot="text_encoder",
        variable="H3_TEXT_ENCODER_PATH",
        file="text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors",
        size=15_687_142_551,
        **_COMFY,
    ),
    Checkpoint(
        slot="video_vae",
        variable="H3_VIDEO_VAE_PATH",
        file="vae/minimax_h3_video_vae_fp16.safetensors",
        size=5_207_808_496,
        **_COMFY,
    ),
    Checkpoint(
        slot="audio_vae",
        variable="H3_AUDIO_VAE_PATH",
        file="vae/minimax_h3_audio_vae_fp32.safetensors",
        size=605_254_808,
        **_COMFY,
    ),
    Checkpoint(
        slot="tokenizer",
        variable="H3_TOKENIZER_PATH",
        repo=REPOSITORY,
        revision=REVISION,
        file=SUBFOLDER,
        folder=True,
    ),
)
