"""Packing against diffusers' packed sequence, and rows against latents."""

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    patchify_video_latents,
)

from h3dist.geometry import Geometry, legal_frames
from h3dist.packing import (
    audio_to_rows,
    own_segments,
    pack_t2va,
    patchify,
    rows_to_audio,
    unpatchify,
)


def official_packing(geometry: Geometry, text_tags: torch.Tensor) -> tuple:
    return MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        text_tags,
        geometry.latent_t,
        geometry.latent_h,
        geometry.latent_w,
        geometry.audio_latents,
        patch_size=(1, 2, 2),
        audio_channels=2,
        audio_tag=2,
        video_tag=0,
    )


@pytest.mark.parametrize("size", [(96, 64), (32, 32), (64, 224), (1344, 768), (480, 864)])
@pytest.mark.parametrize("text_rows", [1, 23, 1000])
def test_positions_and_tags_equal_the_official_ones(size: tuple[int, int], text_rows: int) -> None:
    geometry = Geometry(*size, frames=39)
    tags = torch.ones(text_rows, dtype=torch.int64)
    packing = pack_t2va(geometry, tags)
    positions, token_tags, video, audio, text, *_ = official_packing(geometry, tags)
    assert torch.equal(packing.position_ids, positions)  # float64, to the last bit
    assert packing.position_ids.dtype == torch.float64
    assert torch.equal(packing.token_tags, token_tags)
    rows = torch.arange(packing.rows)
    assert torch.equal(rows[packing.span("video")], video)
    assert torch.equal(rows[packing.span("audio")], audio)
    assert torch.equal(rows[packing.span("text")], text)


@pytest.mark.parametrize("frames", legal_frames())
def test_every_legal_length_has_the_official_clock(frames: int) -> None:
    geometry = Geometry(64, 32, frames)
    tags = torch.ones(7, dtype=torch.int64)
    assert torch.equal(pack_t2va(geometry, tags).position_ids, official_packing(geometry, tags)[0])


def test_segments_cover_every_row_and_split_where_a_text_tag_changes() -> None:
    packing = pack_t2va(Geometry(32, 32, 5), [1, 1, 0, 0, 0, 1])
    text = [segment for segment in packing.segments if segment.kind == "text"]
    assert [(s.start, s.stop, s.tag, s.source) for s in text] == [(0, 2, 1, 0), (2, 5, 0, 2), (5, 6, 1, 5)]
    assert packing.span("text") == slice(0, 6)
    assert packing.text_rows == 6
    stops = [0, *(segment.stop for segment in packing.segments)]
    assert [segment.start for segment in packing.segments] == stops[:-1]
    assert stops[-1] == packing.rows
    for segment in packing.segments:
        assert set(packing.token_tags[segment.start : segment.stop].tolist()) == {segment.tag}


@pytest.mark.parametrize("ranks", [1, 3, 7, 64])
def test_own_segments_of_all_ranks_make_up_the_sequence(ranks: int) -> None:
    packing = pack_t2va(Geometry(32, 64, 22), [1, 1, 0, 1])
    chunk = -(-packing.rows // ranks)
    seen = []
    for rank in range(ranks):
        start, stop = min(rank * chunk, packing.rows), min((rank + 1) * chunk, packing.rows)
        for part in own_segments(packing, start, stop):
            assert 0 <= part.start < part.stop <= stop - start
            first = packing.span(part.kind).start
            for offset in range(part.stop - part.start):
                assert start + part.start + offset == first + part.source + offset
                seen.append((start + part.start + offset, part.kind, part.tag))
    assert [row for row, *_ in seen] == list(range(packing.rows))
    assert [tag for *_, tag in seen] == packing.token_tags.tolist()


def test_a_rank_without_rows_has_no_segments() -> None:
    packing = pack_t2va(Geometry(32, 32, 5), [1])
    assert own_segments(packing, packing.rows, packing.rows) == ()


def test_video_rows_are_the_official_ones_and_go_back() -> None:
    geometry = Geometry(96, 64, 22)
    video = torch.randn(1, 24, geometry.latent_t, geometry.latent_h, geometry.latent_w)
    rows = patchify(video)
    assert rows.shape == (geometry.video_rows, 96)
    assert torch.equal(rows, patchify_video_latents(video, (1, 2, 2)))
    assert torch.equal(unpatchify(rows, geometry), video)
    assert rows[1, 4 * 5 + 2 * 1 + 0] == video[0, 5, 0, 1, 2]  # feature 4c + 2p + q of the patch at x = 1


def test_audio_rows_are_channel_major_and_go_back() -> None:
    audio = torch.randn(1, 32, 2, 9)
    rows = audio_to_rows(audio)
    assert torch.equal(rows[9 + 4], audio[0, :, 1, 4])
    assert torch.equal(rows_to_audio(rows), audio)
