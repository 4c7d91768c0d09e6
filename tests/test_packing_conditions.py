"""Packing with keyframes and references against diffusers' layouts, and against the Comfy formulas for guides."""

from types import SimpleNamespace

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
)

from h3dist.conditions import Condition
from h3dist.geometry import Geometry, legal_frames
from h3dist.packing import own_segments, pack

TAGS = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1, 1])
RULES = {"patch_size": (1, 2, 2), "audio_channels": 2, "audio_tag": 2, "video_tag": 0}
IMAGE = Condition("image", 96, 64, frames=1)
TALL = Condition("image", 32, 128, frames=1)
FILM = Condition("video", 64, 96, frames=39)
SPEAKING = Condition("video", 64, 96, frames=39, samples=39 * 32000 // 24)
LONG_SOUND = Condition("video", 96, 96, frames=22, samples=60000)
VOICE = Condition("audio", samples=12345)
SONG = Condition("audio", samples=80000)


def rows_of(packing, *kinds):
    """The numbers of all rows of these kinds."""
    found = [torch.arange(s.start, s.stop) for s in packing.segments if s.kind in kinds]
    return torch.cat([torch.arange(0), *found])


def equal(packing, expected) -> None:
    positions, tags, video, audio, text, kept_video, kept_audio = expected
    assert torch.equal(packing.position_ids, positions)  # float64, to the last bit
    assert torch.equal(packing.token_tags, tags)
    assert torch.equal(rows_of(packing, "kept video", "video"), video)
    assert torch.equal(rows_of(packing, "kept audio", "audio"), audio)
    assert torch.equal(rows_of(packing, "text"), text)
    assert len(rows_of(packing, "kept video")) == kept_video
    assert len(rows_of(packing, "kept audio")) == kept_audio


@pytest.mark.parametrize("anchors", [("first",), ("last",), ("first", "last")])
@pytest.mark.parametrize("frames", legal_frames())
def test_keyframes_lie_where_the_official_ones_do(anchors: tuple[str, ...], frames: int) -> None:
    geometry = Geometry(96, 64, frames)
    places = {"first": 0, "last": frames - 1}
    conditions = [Condition("keyframe", 96, 64, frames=1, frame=places[anchor]) for anchor in anchors]
    expected = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        TAGS,
        geometry.latent_t,
        geometry.latent_h,
        geometry.latent_w,
        geometry.audio_latents,
        keyframe_anchors=anchors,
        **RULES,
    )
    equal(pack(geometry, TAGS, conditions), expected)


@pytest.mark.parametrize(
    "references",
    [
        (IMAGE,),
        (IMAGE, VOICE),
        (SPEAKING,),
        (FILM, IMAGE),
        (IMAGE, SONG, VOICE),
        (LONG_SOUND, TALL, VOICE),
        (TALL, VOICE, SPEAKING, IMAGE, FILM, SONG),
    ],
    ids=lambda references: "+".join(reference.kind for reference in references),
)
@pytest.mark.parametrize("size", [(96, 64), (32, 224)])
def test_references_lie_where_the_official_ones_do(references: tuple[Condition, ...], size: tuple[int, int]) -> None:
    geometry = Geometry(*size, 90)
    kinds = [SimpleNamespace(kind=r.kind, has_audio=r.samples > 0) for r in references]
    visual = [torch.empty(1, 24, r.latent_t, r.latent_h, r.latent_w) for r in references if r.latent_t]
    audio = [torch.empty(r.audio_rows, 32) for r in references if r.samples]
    expected = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        TAGS,
        kinds,
        visual,
        audio,
        geometry.latent_t,
        geometry.latent_h,
        geometry.latent_w,
        geometry.audio_latents,
        **RULES,
    )
    equal(pack(geometry, TAGS, references), expected)


def test_a_guide_runs_from_its_frame_on_the_clips_own_clock() -> None:
    geometry, frame = Geometry(96, 64, 124), 41
    guide = Condition("keyframe", 96, 64, frames=22, samples=22 * 32000 // 24, frame=frame)
    packing = pack(geometry, TAGS, [guide])
    origin = len(TAGS) + 5 / 3 * frame
    spans = torch.tensor([0, 1, 5, 9, 13, 17, 18], dtype=torch.float64) * 5 / 3  # frames before each latent
    video = packing.position_ids[rows_of(packing, "kept video")].view(7, 6, 3)
    torch.testing.assert_close(video[:, :, 0], (origin + spans)[:, None].expand(7, 6))
    clip = packing.position_ids[packing.span("video")].view(37, 6, 3)
    assert torch.equal(video[..., 1:], clip[:7, :, 1:])
    audio = packing.position_ids[rows_of(packing, "kept audio")].view(2, 37, 3)
    torch.testing.assert_close(audio[0, :, 0], origin + torch.arange(37, dtype=torch.float64))
    assert torch.equal(audio[:, 0, 1:], packing.position_ids[packing.span("audio")].view(2, -1, 3)[:, 0, 1:])
    order = [segment.kind for segment in packing.segments if segment.kind != "text"]
    assert order == ["kept video", "kept audio", "audio", "video"]


@pytest.mark.parametrize("ranks", [1, 3, 7, 200])
def test_own_segments_of_all_ranks_hold_every_source_row_once(ranks: int) -> None:
    packing = pack(Geometry(64, 32, 22), TAGS, (IMAGE, VOICE, SPEAKING, IMAGE))
    chunk = -(-packing.rows // ranks)
    found: dict[str, list[int]] = {}
    for rank in range(ranks):
        for s in own_segments(packing, min(rank * chunk, packing.rows), min((rank + 1) * chunk, packing.rows)):
            found.setdefault(s.kind, []).extend(range(s.source, s.source + s.stop - s.start))
    counts = {kind: len(rows_of(packing, kind)) for kind in found}
    assert found == {kind: list(range(count)) for kind, count in counts.items()}
    assert sum(counts.values()) == packing.rows
    assert counts["kept video"] == sum(c.video_rows for c in (IMAGE, SPEAKING, IMAGE))
    assert counts["kept audio"] == VOICE.audio_rows + SPEAKING.audio_rows
