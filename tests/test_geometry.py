"""H3's numbers against published ones and the rules behind them."""

import ast
import sys
from pathlib import Path

import pytest

from h3dist import geometry
from h3dist.geometry import Geometry, align_frames, audio_latents, audio_samples, latent_frames, legal_frames

ASKED_AND_MADE = [
    *[(1, 5), (4, 5), (5, 5), (6, 22), (22, 22), (121, 124), (122, 124), (123, 124), (124, 124), (125, 141)],
    *[(361, 362), (362, 362), (363, 379), (0, 5), (-5, 5)],
]


@pytest.mark.parametrize(("asked", "made"), ASKED_AND_MADE)
def test_frames_are_snapped_up(asked, made):
    assert align_frames(asked) == made


def test_there_are_22_legal_lengths():
    assert len(legal_frames()) == 22
    assert legal_frames()[0] == 5
    assert legal_frames()[-1] == 362
    assert [align_frames(frames) for frames in legal_frames()] == list(legal_frames())
    assert {align_frames(frames) for frames in range(1, 363)} == set(legal_frames())


@pytest.mark.parametrize(
    ("frames", "video", "audio"),
    [(5, 2, 8), (22, 7, 37), (107, 32, 178), (124, 37, 207), (345, 102, 575), (362, 107, 603)],
)
def test_latents(frames, video, audio):
    assert latent_frames(frames) == video
    assert audio_latents(frames) == audio


@pytest.mark.parametrize("frames", legal_frames())
def test_sound_fits_the_picture(frames):
    decoded = audio_latents(frames) * geometry.SAMPLES_PER_AUDIO_LATENT
    assert audio_samples(frames) == frames * 4000 // 3
    assert abs(decoded - audio_samples(frames)) <= geometry.SAMPLES_PER_AUDIO_LATENT // 2 + 1


@pytest.mark.parametrize(
    ("frames", "video", "audio"),
    [(107, 32256, 356), (124, 37296, 414), (243, 72576, 810), (362, 107856, 1206)],
)
def test_rows_at_the_usual_canvas(frames, video, audio):
    clip = Geometry(1344, 768, frames)
    assert (clip.video_rows, clip.audio_rows) == (video, audio)


def test_a_clip_of_another_shape():
    clip = Geometry(96, 64, 22)
    assert (clip.latent_t, clip.latent_h, clip.latent_w) == (7, 4, 6)
    assert clip.video_rows == 7 * 2 * 3
    assert clip.seconds == pytest.approx(22 / 24)


@pytest.mark.parametrize(
    ("side", "legal"),
    [(496, (480, 512)), (480, (480, 480)), (1, (32, 32)), (0, (32, 32)), (-7, (32, 32)), (33, (32, 64))],
)
def test_nearest_canvas_sides(side, legal):
    assert geometry.nearest_multiples(side) == legal


@pytest.mark.parametrize(("seconds", "frames"), [(5, 120), (5.17, 124), (0.001, 1), (15, 360)])
def test_duration_in_frames(seconds, frames):
    assert geometry.frames_for_duration(seconds) == frames


def test_geometry_imports_the_standard_library_alone():
    tree = ast.parse(Path(geometry.__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names <= set(sys.stdlib_module_names)
