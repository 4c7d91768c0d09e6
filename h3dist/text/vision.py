"""Pictures as the text encoder's vision tower reads them: resized, normalised, cut into patches.

Shapes: f frames, H W pixels of a picture, n patches; p a patch's 3 channels x 2 frames x 16 x 16 pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from h3dist.conditions import Condition
from h3dist.fitting import Size, in_pairs, sampled_frames, vision_size

PATCH = 16  # pixels
MERGE = 2  # patches a side of what becomes one token
CENTRE = SPREAD = 0.5  # levels over [0, 1] are normalised to [-1, 1]


@dataclass(frozen=True)
class Vision:
    """All that is shown of one kind: patches f32 [n, p], and of each picture or video (pairs, rows, columns)."""

    patches: Tensor
    grids: tuple[tuple[int, int, int], ...]


def look(shown: Sequence[tuple[Condition, np.ndarray]], contract: str) -> dict[str, Vision]:
    """What the vision tower sees of each condition and its fitted frames u8 [F, H, W, 3], by pad "image", "video".

    Conditions that are not shown are passed over. A still fills both frames of its pair.
    """
    seen: dict[str, list[Tensor]] = {"image": [], "video": []}
    for condition, frames in shown:
        if condition.kind == "video":
            seen["video"].append(patches_of(frames[list(sampled_frames(condition.shown))], contract, still=False))
        elif condition.shown:
            seen["image"].append(patches_of(frames[:1], contract, still=True))
    return {pad: Vision(_joined(parts), _grids(parts)) for pad, parts in seen.items() if parts}


def patches_of(frames: np.ndarray, contract: str, *, still: bool) -> Tensor:
    """Patches f32 [pairs, rows, columns, p] of frames u8 [f, H, W, 3]: rows and columns of merged patches' four.

    The four patches of one token are neighbours: [pairs, rows / 2, columns / 2, 2, 2, ...] underneath.
    """
    size = vision_size((frames.shape[2], frames.shape[1]), 0 if still else len(frames), contract)
    scaled = [_resize(frame, size, contract) for frame in frames]
    return torch.stack([_patchify(torch.stack(pair)) for pair in in_pairs(scaled)])


def _resize(frame: np.ndarray, size: Size, contract: str) -> Tensor:
    """One frame u8 [H, W, 3] as f32 [3, H', W'] in [-1, 1].

    official: bicubic with antialiasing, to whole levels. comfy: bilinear without, in float32.
    """
    width, height = size
    same = frame.shape[:2] == (height, width)
    if contract == "official" and not same:
        frame = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC))
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1).to(torch.float32) / 255
    if contract == "comfy" and not same:
        pixels = functional.interpolate(pixels[None], (height, width), mode="bilinear", align_corners=False)[0]
    return (pixels - CENTRE) / SPREAD


def _patchify(pair: Tensor) -> Tensor:
    """[rows, columns, p] of two frames f32 [2, 3, H, W], in the order of Qwen2-VL's processors."""
    block = PATCH * MERGE
    cut = pair.unflatten(3, (-1, MERGE, PATCH)).unflatten(2, (-1, MERGE, PATCH))  # [2, 3, y, my, py, x, mx, px]
    ordered = cut.permute(2, 5, 3, 6, 1, 0, 4, 7).flatten(4)  # [y, x, my, mx, p]
    return ordered.reshape(pair.shape[2] // block * MERGE, pair.shape[3] // block * MERGE, -1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten(0, 2) for part in parts])


def _grids(parts: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    return tuple((part.shape[0], part.shape[1], part.shape[2]) for part in parts)
