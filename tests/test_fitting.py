"""Sizes of keyframes and references against diffusers' and transformers' rules, and the Comfy ones by hand."""

import random

import numpy as np
import pytest
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from h3dist import fitting
from h3dist.conditions import Condition
from h3dist.errors import RequestError

SIZES = [(random.Random(seed).randint(40, 5000), random.Random(-seed).randint(40, 5000)) for seed in range(300)]
LEGAL = [size for size in SIZES if max(size) <= 4 * min(size)]


@pytest.mark.parametrize("size", [(16, 9), (160, 90), (1920, 1080), (1080, 1920), (4, 1), (1, 4), (500, 500), *LEGAL])
def test_the_canvas_is_diffusers(size: tuple[int, int]) -> None:
    assert fitting.canvas_like(size) == resolve_canvas_size(*size, 32, 768, 768 * 1344)[::-1]


def test_known_canvases() -> None:
    assert fitting.canvas_like((1920, 1080)) == (1344, 768)
    assert fitting.canvas_like((90, 160)) == (768, 1344)
    assert fitting.canvas_like((1000, 1000)) == (768, 768)


@pytest.mark.parametrize("size", [(401, 100), (100, 401)])
def test_extreme_aspects_are_refused(size: tuple[int, int]) -> None:
    for fit in (
        lambda: fitting.canvas_like(size),
        lambda: fitting.image_reference_size(size, (96, 64), "comfy"),
        lambda: fitting.image_reference_size(size, (96, 64), "official"),
        lambda: fitting.video_reference_size(size, "official"),
    ):
        with pytest.raises(RequestError, match="1:4 and 4:1"):
            fit()


def covered(picture: Image.Image, width: int, height: int) -> Image.Image:
    """What diffusers does to a keyframe that follows another (its resize step, which is no function)."""
    scale = max(width / picture.size[0], height / picture.size[1])
    size = max(width, round(picture.size[0] * scale)), max(height, round(picture.size[1] * scale))
    left, top = max(0, (size[0] - width) // 2), max(0, (size[1] - height) // 2)
    return picture.resize(size, Image.Resampling.LANCZOS).crop((left, top, left + width, top + height))


@pytest.mark.parametrize("size", [(160, 90), (90, 160), (97, 61), (96, 64), (31, 500)])
def test_a_cover_keeps_the_aspect_and_the_middle(size: tuple[int, int]) -> None:
    scaled, box = fitting.cover(size, (96, 64))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    found = picture.resize(scaled, Image.Resampling.LANCZOS).crop(box)
    assert found.size == (96, 64)
    assert np.array_equal(np.asarray(found), np.asarray(covered(picture, 96, 64)))
    assert scaled[0] / scaled[1] == pytest.approx(size[0] / size[1], rel=0.02)


@pytest.mark.parametrize("size", LEGAL)
def test_an_official_image_reference_has_a_short_edge_of_2048(size: tuple[int, int]) -> None:
    scale = 2048 / min(size)
    wanted = tuple(max(32, round(side * scale / 32) * 32) for side in size)
    assert fitting.image_reference_size(size, (1344, 768), "official") == wanted
    assert min(wanted) == 2048


def test_a_comfy_image_reference_is_no_larger_than_the_clip() -> None:
    assert fitting.image_reference_size((640, 480), (1344, 768), "comfy") == (640, 480)
    assert fitting.image_reference_size((650, 470), (1344, 768), "comfy") == (640, 480)
    assert fitting.image_reference_size((2688, 1536), (1344, 768), "comfy") == (1344, 768)
    assert fitting.image_reference_size((10, 10), (1344, 768), "comfy") == (32, 32)


def test_a_small_video_reference_stays_small_under_comfy_alone() -> None:
    assert fitting.video_reference_size((320, 180), "official") == (1344, 768)
    assert fitting.video_reference_size((320, 180), "comfy") == (320, 192)
    assert fitting.video_reference_size((1920, 1080), "comfy") == (1344, 768)


@pytest.mark.parametrize(("frames", "official", "comfy"), [(4, 4, 4), (10, 10, 5), (21, 21, 5), (22, 22, 22)])
def test_few_frames(frames: int, official: int, comfy: int) -> None:
    assert fitting.reference_frames(frames, "official") == official
    assert fitting.reference_frames(frames, "comfy") == comfy


@pytest.mark.parametrize("frames", range(22, 400, 7))
def test_a_reference_is_cut_down_to_17k_and_5(frames: int) -> None:
    found = {fitting.reference_frames(frames, contract) for contract in ("official", "comfy")}
    (kept,) = found
    assert kept % 17 == 5 and 0 <= frames - kept < 17


def test_references_end_with_the_clip() -> None:
    common = {"canvas": (96, 64), "clip_frames": 124, "contract": "official"}
    film = fitting.fit_reference("video", (1344, 768), 361, 480000, **common)
    assert film == Condition("video", 1344, 768, 124, 165333, shown=124)
    assert fitting.fit_reference("audio", (0, 0), 0, 10**9, **common) == Condition("audio", samples=165333)
    assert fitting.fit_reference("audio", (0, 0), 0, 801, **common).audio_latents == 2


def test_a_still_keyframe_has_no_sound_and_a_guides_ends_with_its_picture() -> None:
    assert fitting.fit_keyframe((96, 64), 1, 0, 7) == Condition("keyframe", 96, 64, 1, frame=7, shown=1)
    guide = fitting.fit_keyframe((96, 64), 22, 10**6, 7)
    assert guide == Condition("keyframe", 96, 64, 22, 29333, 7)
    assert (guide.latent_t, guide.video_rows, guide.audio_latents, guide.audio_rows) == (7, 42, 37, 74)


@pytest.mark.parametrize("size", [(96, 64), (32, 32), (5000, 4000), (8192, 3000), *SIZES])
def test_pictures_are_seen_at_the_size_of_qwens_processor(size: tuple[int, int]) -> None:
    limits = {"official": (65536, 16777216), "comfy": (3136, 12845056)}
    for contract, (low, high) in limits.items():
        height, width = smart_resize(size[1], size[0], 32, low, high)
        assert fitting.vision_size(size, 0, contract) == (width, height)


@pytest.mark.parametrize("frames", [2, 3, 5, 15, 30, 31])
@pytest.mark.parametrize("size", [(1344, 768), (768, 1344), (96, 64), (1600, 800), (32, 32)])
def test_frames_are_seen_at_the_size_of_qwens_video_processor(size: tuple[int, int], frames: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_resize

    height, width = video_resize(frames, size[1], size[0], 2, 32, 4096, 25165824)
    assert fitting.vision_size(size, frames, "official") == (width, height)
    assert fitting.vision_size(size, frames, "comfy") == smart_resize(*size, 32, 3136, 12845056)  # each frame alone
    assert fitting.vision_size((1344, 768), 31, "official") != (1344, 768)  # 15 s of the largest canvas are too much
