"""How keyframes and references are fitted to what the model reads, as pure functions of their sizes.

Sizes are (width, height) in pixels. Two contracts: "official" is MiniMax's own pipeline (as in diffusers'
`modular_pipelines/minimax_h3`), "comfy" the Comfy convention for H3. Standard library only.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

from h3dist.conditions import Condition
from h3dist.errors import RequestError
from h3dist.geometry import CANVAS_MULTIPLE, CHUNK_FRAMES, TAIL_FRAMES, audio_samples

T = TypeVar("T")
Size = tuple[int, int]
Box = tuple[int, int, int, int]  # left, top, right, bottom

SHORT_EDGE = 768
MAX_CANVAS_PIXELS = 768 * 1344
MAX_ASPECT = 4  # 1:4 to 4:1
IMAGE_SHORT_EDGE = 2048  # of an official image reference

SAMPLED_EVERY = 12  # the text encoder sees 2 of a reference video's 24 frames a second
PAIR = 2  # frames that one vision block merges
VISION_MULTIPLE = 32  # pixels: a vision token stands for 2 x 2 patches of 16
VISION_PIXELS = {  # smallest and largest picture, in pixels
    ("official", "image"): (65536, 16777216),
    ("official", "video"): (4096, 25165824),  # of all sampled frames together
    ("comfy", "image"): (3136, 12845056),
    ("comfy", "video"): (3136, 12845056),  # of each frame
}


def canvas_like(size: Size) -> Size:
    """The canvas of a picture's aspect: short edge 768, at most 768 x 1344 pixels, both sides rounded to 32.

    Raises RequestError for an aspect beyond 1:4 or 4:1.
    """
    width, height = size
    check_aspect(size)
    ratio = width / height
    across, down = (SHORT_EDGE * ratio, SHORT_EDGE) if ratio >= 1 else (SHORT_EDGE, SHORT_EDGE / ratio)
    shrink = min(1.0, (MAX_CANVAS_PIXELS / (across * down)) ** 0.5)
    return _rounded(across * shrink), _rounded(down * shrink)


def check_aspect(size: Size) -> None:
    """Raises RequestError for a picture that is over four times as long as it is wide, either way."""
    width, height = size
    if width > MAX_ASPECT * height or height > MAX_ASPECT * width:
        raise RequestError(f"a picture of {width} x {height} pixels: its aspect must be within 1:4 and 4:1; crop it")


def cover(size: Size, canvas: Size) -> tuple[Size, Box]:
    """How a picture covers a canvas without a change of its aspect: the size it is scaled to, and the part kept."""
    scale = max(canvas[0] / size[0], canvas[1] / size[1])
    scaled = max(canvas[0], round(size[0] * scale)), max(canvas[1], round(size[1] * scale))
    left, top = (scaled[0] - canvas[0]) // 2, (scaled[1] - canvas[1]) // 2
    return scaled, (left, top, left + canvas[0], top + canvas[1])


def image_reference_size(size: Size, canvas: Size, contract: str) -> Size:
    """What an image reference is stretched to. Raises RequestError for an extreme aspect.

    official: a short edge of 2048, enlarging too, with no limit of area. comfy: its own size, or less if the
    picture has more pixels than the clip's canvas. Both: sides rounded to 32.
    """
    check_aspect(size)
    if contract == "official":
        scale = IMAGE_SHORT_EDGE / min(size)
    else:
        scale = min(1.0, math.sqrt(math.prod(canvas) / math.prod(size)))
    return _rounded(size[0] * scale), _rounded(size[1] * scale)


def video_reference_size(size: Size, contract: str) -> Size:
    """What the frames of a video reference are stretched to. Raises RequestError for an extreme aspect.

    official: the canvas of its aspect. comfy: the same, but its own size rounded to 32 where that is smaller.
    """
    canvas = canvas_like(size)
    if contract == "comfy" and math.prod(size) < math.prod(canvas):
        return _rounded(size[0]), _rounded(size[1])
    return canvas


def reference_frames(frames: int, contract: str) -> int:
    """How many of a video reference's frames are encoded: down to 17k + 5.

    For fewer than 22, official takes all of them (the VAE repeats the last), comfy 5.
    """
    chunks = (frames - TAIL_FRAMES) // CHUNK_FRAMES
    if contract == "official":
        return min(frames, max(1, chunks) * CHUNK_FRAMES + TAIL_FRAMES)
    return min(frames, max(0, chunks) * CHUNK_FRAMES + TAIL_FRAMES)


def fit_keyframe(canvas: Size, frames: int, samples: int, frame: int) -> Condition:
    """A keyframe on the clip's canvas: a still, or a guide of 17k + 5 frames with its sound.

    The text encoder is shown stills alone. A guide's sound ends with its picture.
    """
    heard = min(samples, audio_samples(frames)) if frames > 1 else 0
    return Condition("keyframe", *canvas, frames, heard, frame, shown=int(frames == 1))


def fit_reference(
    kind: str, size: Size, frames: int, samples: int, *, canvas: Size, clip_frames: int, contract: str
) -> Condition:
    """A reference of `frames` and `samples`, none of it longer than a clip of `clip_frames` on `canvas`.

    Raises RequestError for an extreme aspect.
    """
    samples = min(samples, audio_samples(clip_frames))
    if kind == "audio":
        return Condition("audio", samples=samples)
    if kind == "image":
        return Condition("image", *image_reference_size(size, canvas, contract), frames=1, shown=1)
    seen = min(frames, clip_frames)
    encoded = reference_frames(seen, contract)
    shown = seen if contract == "official" else encoded
    return Condition("video", *video_reference_size(size, contract), encoded, samples, shown=shown)


# What the text encoder is shown.


def sampled_frames(shown: int) -> tuple[int, ...]:
    """Which of a reference video's frames the text encoder sees: every 12th, 2 a second."""
    return tuple(range(0, shown, SAMPLED_EVERY))


def in_pairs(values: Sequence[T]) -> list[tuple[T, T]]:
    """Neighbours two by two, the last one twice where they are odd: what one vision block merges."""
    even = (*values, *values[-1:]) if len(values) % PAIR else tuple(values)
    return list(zip(even[::PAIR], even[1::PAIR], strict=True))


def pair_seconds(shown: int) -> tuple[float, ...]:
    """The time that each vision block of a reference video is told at: the mean of its two frames' times."""
    halves = [index / (SAMPLED_EVERY * PAIR) for index in sampled_frames(shown)]
    return tuple((first + second) / 2 for first, second in in_pairs(halves))


def vision_size(size: Size, frames: int, contract: str) -> Size:
    """The size at which the vision tower sees a still (`frames` 0), or each of a video's `frames`.

    Sides are rounded to 32; a picture of too many or too few pixels is scaled with its aspect kept: to floors or
    to ceilings of 32. (Qwen3-VL's processors; the Comfy convention has other limits, and counts a frame alone.)
    """
    least, most = VISION_PIXELS[contract, "video" if frames else "image"]
    count = frames if frames and contract == "official" else 1
    sides = [round(side / VISION_MULTIPLE) * VISION_MULTIPLE for side in size]
    pixels = math.prod(sides) * (round(count / PAIR) * PAIR if count > 1 else 1)
    if pixels > most:
        shrink = math.sqrt(count * math.prod(size) / most)
        sides = [max(1, math.floor(side / shrink / VISION_MULTIPLE)) * VISION_MULTIPLE for side in size]
    elif pixels < least:
        grow = math.sqrt(least / (count * math.prod(size)))
        sides = [math.ceil(side * grow / VISION_MULTIPLE) * VISION_MULTIPLE for side in size]
    return sides[0], sides[1]


def vision_tokens(condition: Condition, contract: str) -> int:
    """Tokens of each vision block that shows a keyframe or a reference."""
    frames = len(sampled_frames(condition.shown)) if condition.kind == "video" else 0
    width, height = vision_size((condition.width, condition.height), frames, contract)
    return (width // VISION_MULTIPLE) * (height // VISION_MULTIPLE)


def _rounded(side: float) -> int:
    """`side` to the nearest multiple of 32, at least 32."""
    return max(CANVAS_MULTIPLE, round(side / CANVAS_MULTIPLE) * CANVAS_MULTIPLE)
