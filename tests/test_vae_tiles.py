"""Where videos are cut for decoding, against the released numbers and diffusers' own arithmetic."""

import pytest

from h3dist.errors import RequestError
from h3dist.geometry import latent_frames, legal_frames
from h3dist.tiles import HEAD, TAIL, cut_axis, cut_time, cut_video


@pytest.mark.parametrize(
    ("length", "starts", "overlaps"),
    [
        (32, (0,), ()),
        (256, (0,), ()),
        (480, (0, 112, 224), (144, 144)),
        (544, (0, 144, 288), (112, 112)),
        (768, (0, 160, 336, 512), (96, 80, 80)),
        (1344, (0, 176, 352, 528, 704, 896, 1088), (80, 80, 80, 80, 64, 64)),
    ],
)
def test_published_tiles(length, starts, overlaps):
    axis = cut_axis(length)
    assert (axis.starts, axis.overlaps) == (starts, overlaps)


def test_tiles_are_those_of_diffusers_at_every_length():
    from diffusers import AutoencoderKLMiniMaxH3

    class Ruler:
        spatial_compression_ratio = 16

    for length in range(16, 2064, 16):
        axis = cut_axis(length)
        starts, sizes, overlaps = AutoencoderKLMiniMaxH3._split_tiles(Ruler(), length, 256, 64)
        assert (list(axis.starts), [axis.size] * len(starts), list(axis.overlaps)) == (
            starts,
            sizes,
            overlaps,
        )


def test_a_chunk_is_17_frames_and_a_tail_of_5():
    raw = range(28)
    assert list(raw[HEAD]) == list(range(3, 20)) and list(raw[TAIL]) == list(range(23, 28))


@pytest.mark.parametrize("frames", legal_frames())
def test_chunks_give_exactly_the_planned_frames(frames):
    chunks = cut_time(latent_frames(frames))
    assert sum(chunk.frames for chunk in chunks) == frames
    assert all(len(chunk.latents) == 7 for chunk in chunks)
    assert max(chunk.latents[-1] for chunk in chunks) == latent_frames(frames) - 1


def test_windows_share_two_latents_and_the_shortest_video_repeats_its_last():
    assert [chunk.latents for chunk in cut_time(12)] == [tuple(range(7)), tuple(range(5, 12))]
    assert [(chunk.latents, chunk.frames) for chunk in cut_time(2)] == [((0, 1, 1, 1, 1, 1, 1), 5)]


@pytest.mark.parametrize(("latents", "legal"), [(0, "2 or 7"), (1, "2 or 7"), (6, "2 or 7"), (36, "32 or 37")])
def test_other_latent_lengths_are_refused_with_the_nearest(latents, legal):
    with pytest.raises(RequestError, match=legal):
        cut_time(latents)


def test_jobs_come_chunk_by_chunk_then_row_by_row():
    jobs = list(cut_video(12, 20, 30).jobs())  # 320 x 480 pixels: 2 rows of 3 tiles
    assert len(jobs) == 2 * 2 * 3
    assert [job.cols for job in jobs[:3]] == [(0, 16), (7, 23), (14, 30)]
    assert [job.rows for job in jobs[:6]] == [(0, 16)] * 3 + [(4, 20)] * 3
    assert jobs[6].latents == tuple(range(5, 12))
