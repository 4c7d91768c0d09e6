"""diffusers' own text and reference steps, with transformers' processors where they need no torchvision."""

from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from h3dist.text.tokenizer import tokenize

IMAGES = {"shortest_edge": 65536, "longest_edge": 16777216}  # Qwen3-VL's preprocessor_config.json
VIDEOS = {"shortest_edge": 4096, "longest_edge": 25165824}  # and its video_preprocessor_config.json


def image_processor(size: dict[str, int] = IMAGES) -> Qwen2VLImageProcessorPil:
    half = [0.5, 0.5, 0.5]
    return Qwen2VLImageProcessorPil(
        size=dict(size), patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=half, image_std=half
    )


class VideoProcessor:
    """Qwen3-VL's video processor for frames that need no resizing: two stills of the image processor make a pair."""

    temporal_patch_size = 2

    def __call__(self, videos, do_sample_frames: bool, return_tensors: str) -> dict[str, torch.Tensor]:
        assert not do_sample_frames and return_tensors == "pt"
        parts, grids = [], []
        for frames in videos:
            even = np.concatenate([frames, frames[-1:]]) if len(frames) % 2 else frames
            low, high = VIDEOS["shortest_edge"], VIDEOS["longest_edge"]
            assert low <= even[..., 0].size <= high and not (frames.shape[1] % 32 or frames.shape[2] % 32)
            stills = image_processor()(images=[Image.fromarray(f) for f in even], do_resize=False, return_tensors="pt")
            grid = stills["image_grid_thw"][0].tolist()
            patches = stills["pixel_values"].view(len(even) // 2, 2, grid[1] * grid[2], 3, 2, 16, 16)
            parts.append(torch.stack([patches[:, 0, :, :, 0], patches[:, 1, :, :, 0]], dim=3).flatten(0, 1).flatten(1))
            grids.append([len(even) // 2, *grid[1:]])
        return {"pixel_values_videos": torch.cat(parts), "video_grid_thw": torch.tensor(grids)}


class Processor:
    """The parts of Qwen3VLProcessor that the steps use."""

    def __init__(self, image_token: int, video_token: int) -> None:
        self.image_processor, self.video_processor = image_processor(), VideoProcessor()
        self._types = {image_token: 1, video_token: 2}

    def create_mm_token_type_ids(self, batch: list[list[int]]) -> list[list[int]]:
        return [[self._types.get(token, 0) for token in ids] for ids in batch]


def components(tokenizer, model=None) -> SimpleNamespace:
    """What the text steps take from a pipeline; `model` is a whole Qwen3VLModel."""
    ids = {pad: tokenize(tokenizer, f"<|{pad}_pad|>")[0] for pad in ("image", "video")}
    return SimpleNamespace(
        tokenizer=tokenizer,
        processor=Processor(ids["image"], ids["video"]),
        text_encoder=SimpleNamespace(model=model, config=model.config, dtype=torch.float32) if model else None,
        text_encoder_layer=50,
        text_tag=1,
        video_tag=0,
        fps=24,
        _execution_device=torch.device("cpu"),
    )
