"""The packed sequence: which row is what, where it sits in (t, h, w), and how latents become rows and back.

Row order: text, keyframes, references, target audio, target video. H3 runs full self-attention over this one
sequence, so everything that is said of a row (its position, its modality, its noise level) is said here. No
collectives and no devices: every rank builds the same Packing and takes its own slice of it.

Shape letters: S all rows, L text rows, T latent frames, h w latent height and width, A audio latents a
channel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from h3dist.conditions import Condition
from h3dist.geometry import AUDIO_LATENT_RATE, FPS, PATCH, SOUND_CHANNELS, Geometry

# Modality tags: the order of the three sets of modulation in every AdaLN projection.
VIDEO_TAG, TEXT_TAG, AUDIO_TAG = 0, 1, 2

KINDS = ("text", "audio", "video", "kept audio", "kept video")  # "kept" rows are conditions, never stepped

SPATIAL_SCALE = 32  # a square canvas spans [0, 32) on both spatial axes
TIME_PER_FRAME = AUDIO_LATENT_RATE / FPS  # rotary time: one unit is one audio latent
FRAMES_PER_LATENT = (1, 4, 4, 4, 4)  # repeating: the video VAE turns 17 frames into 5 latents


@dataclass(frozen=True)
class Segment:
    """A run of rows [start, stop) of one kind, one noise level and one modality tag.

    kind: where its rows come from, one of KINDS. time: whose time modulates it, that of the clip's
    "video" or "audio", or that of its "kept video" or "kept audio" rows. source: the number of its
    first row among the rows of its kind.
    """

    start: int
    stop: int
    kind: str
    time: str
    tag: int
    source: int = 0


@dataclass(frozen=True)
class Packing:
    """The layout of one request: position_ids f64 [S, 3] as (t, h, w), token_tags i64 [S]."""

    rows: int
    text_rows: int
    segments: tuple[Segment, ...]
    position_ids: Tensor
    token_tags: Tensor
    geometry: Geometry

    def span(self, kind: str) -> slice:
        """All rows of text, of the clip's audio or of its video, each of which is contiguous."""
        mine = [segment for segment in self.segments if segment.kind == kind]
        return slice(mine[0].start, mine[-1].stop)


@dataclass(frozen=True)
class Stretch:
    """Rows still without a place in the sequence: positions f64 [n, 3] and one tag a row."""

    kind: str
    time: str
    tags: tuple[int, ...]
    positions: Tensor


def pack_t2va(geometry: Geometry, text_tags: Tensor | Sequence[int]) -> Packing:
    """The sequence of a text-to-video-and-audio request: text, audio, video. See `pack`."""
    return pack(geometry, text_tags)


def pack(geometry: Geometry, text_tags: Tensor | Sequence[int], conditions: Sequence[Condition] = ()) -> Packing:
    """The whole sequence: text, keyframes, references, the clip's audio, its video.

    text_tags [L] holds the modality of each text row. Positions are those of the official packing: text rows
    count 0, 1, 2, ... on the time axis, the clip's media start where the references end, and each reference
    moves that start on; keyframes share the clip's own clock.
    """
    tags = tuple(int(tag) for tag in text_tags)
    references = [condition for condition in conditions if condition.kind != "keyframe"]
    blocks, origin = _reference_stretches(references, geometry, float(len(tags)))
    keyframes = [condition for condition in conditions if condition.kind == "keyframe"]
    anchored = [part for condition in keyframes for part in _keyframe_stretches(condition, geometry, origin)]
    grid = (geometry.latent_h, geometry.latent_w)
    stretches = (
        Stretch("text", "video", tags, _text_positions(len(tags))),
        *anchored,
        *blocks,
        _audio_stretch("audio", geometry.audio_latents, grid, origin),
        _video_stretch("video", _latent_times(geometry.latent_t, origin), grid),
    )
    return _pack(geometry, stretches)


def _keyframe_stretches(condition: Condition, geometry: Geometry, origin: float) -> list[Stretch]:
    """A keyframe on the clip's own grid: its video rows, then its audio rows if it is a guide with sound."""
    grid = (geometry.latent_h, geometry.latent_w)
    start = _frame_time(condition.frame, geometry, origin)
    stretches = [_video_stretch("kept video", _latent_times(condition.latent_t, start), grid)]
    if condition.audio_latents:
        stretches.append(_audio_stretch("kept audio", condition.audio_latents, grid, start))
    return stretches


def _reference_stretches(
    references: Sequence[Condition], geometry: Geometry, origin: float
) -> tuple[list[Stretch], float]:
    """Every reference's rows, audio before video, one after the other in time; and the time where they end.

    An image takes one unit of time, a sound one for each latent, a video the longer of picture and sound. A
    sound without a picture lies at the sides of the clip's grid, a soundtrack at those of its own video's.
    """
    stretches = []
    for reference in references:
        own = (reference.latent_h, reference.latent_w)
        grid = own if reference.latent_t else (geometry.latent_h, geometry.latent_w)
        if reference.audio_latents:
            stretches.append(_audio_stretch("kept audio", reference.audio_latents, grid, origin))
        if reference.latent_t:
            stretches.append(_video_stretch("kept video", _latent_times(reference.latent_t, origin), own))
        span = 1.0 if reference.kind == "image" else _span(reference.latent_t)
        origin += max(float(reference.audio_latents), span)
    return stretches, origin


def _pack(geometry: Geometry, stretches: Sequence[Stretch]) -> Packing:
    tags = [tag for stretch in stretches for tag in stretch.tags]
    return Packing(
        rows=len(tags),
        text_rows=sum(len(stretch.tags) for stretch in stretches if stretch.kind == "text"),
        segments=_segments(stretches),
        position_ids=torch.cat([stretch.positions for stretch in stretches]),
        token_tags=torch.tensor(tags, dtype=torch.int64),
        geometry=geometry,
    )


def _segments(stretches: Sequence[Stretch]) -> tuple[Segment, ...]:
    segments, start = [], 0
    seen = dict.fromkeys(KINDS, 0)  # rows of each kind so far
    for stretch in stretches:
        for tag, run in itertools.groupby(stretch.tags):
            count = len(list(run))
            source = seen[stretch.kind]
            segments.append(Segment(start, start + count, stretch.kind, stretch.time, tag, source))
            start, seen[stretch.kind] = start + count, source + count
    return tuple(segments)


# Positions. They are exact in float64: the formulas below round in the same order as the official packing.


def _text_positions(count: int) -> Tensor:
    positions = torch.zeros(count, 3, dtype=torch.float64)
    positions[:, 0] = torch.arange(count, dtype=torch.float64)
    return positions


def _axis(size: int, other: int) -> Tensor:
    """Patch coordinates of a latent axis, centred on the square of the same area: f64 [size / 2].

    value_i = 32 * ((1 - r) / 2 + i * r / n), with r = size / sqrt(area) and n = size / 2.
    """
    ratio = size / math.sqrt(size * other)
    left = (1.0 - ratio) / 2.0
    grid = np.linspace(left, left + ratio, size // PATCH, endpoint=False)
    return torch.from_numpy(grid * SPATIAL_SCALE)


def _latent_times(count: int, origin: float) -> Tensor:
    """Rotary time of each latent frame: origin + the frames before it, 5/3 units a frame. f64 [count]."""
    frames = itertools.islice(itertools.cycle(FRAMES_PER_LATENT), count)
    spans = torch.tensor([0.0, *(TIME_PER_FRAME * frame for frame in frames)], dtype=torch.float64)
    return origin + spans[:count].cumsum(0)


def _span(count: int) -> float:
    """The rotary time that `count` latent frames take, summed in their order."""
    return sum(TIME_PER_FRAME * frame for frame in itertools.islice(itertools.cycle(FRAMES_PER_LATENT), count))


def _frame_time(frame: int, geometry: Geometry, origin: float) -> float:
    """The rotary time of a frame of the clip, 5/3 units a frame.

    The last frame's is the clip's whole span less one frame, by a pairwise sum: the official packing's rounding.
    """
    if frame == geometry.frames - 1:
        frames = np.resize(np.array(FRAMES_PER_LATENT, dtype=np.float64), geometry.latent_t)
        return origin + float((frames * TIME_PER_FRAME).sum()) - TIME_PER_FRAME
    return origin + TIME_PER_FRAME * frame


def _audio_stretch(kind: str, latents: int, grid: tuple[int, int], start: float) -> Stretch:
    """Channel-major: the left channel at the first column of a (height, width) grid, the right one at the last."""
    height, width = grid
    width_axis = _axis(width, height)
    positions = torch.zeros(SOUND_CHANNELS, latents, 3, dtype=torch.float64)
    positions[..., 0] = start + torch.arange(latents, dtype=torch.float64)
    positions[0, :, 2], positions[1, :, 2] = width_axis[0], width_axis[-1]
    return Stretch(kind, kind, (AUDIO_TAG,) * (SOUND_CHANNELS * latents), positions.flatten(0, 1))


def _video_stretch(kind: str, times: Tensor, grid: tuple[int, int]) -> Stretch:
    """Rows in the order (t, y, x), x fastest, on a (height, width) grid of latents."""
    height, width = grid
    axes = (times, _axis(height, width), _axis(width, height))
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)
    return Stretch(kind, kind, (VIDEO_TAG,) * len(positions), positions)


# A rank's own rows.


def own_segments(packing: Packing, start: int, stop: int) -> tuple[Segment, ...]:
    """The segments that meet rows [start, stop), clipped to them and counted from start."""
    clipped = []
    for segment in packing.segments:
        first, last = max(segment.start, start), min(segment.stop, stop)
        if first < last:
            source = segment.source + first - segment.start
            clipped.append(Segment(first - start, last - start, segment.kind, segment.time, segment.tag, source))
    return tuple(clipped)


# Latents to rows and back.


def patchify(video: Tensor) -> Tensor:
    """Video latents [1, C, T, h, w] as rows [T * h/2 * w/2, 4C]: feature 4c + 2p + q, p row and q column."""
    _, channels, frames, height, width = video.shape
    patches = video[0].reshape(channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * PATCH * PATCH)  # [t y x, c p q]


def unpatchify(rows: Tensor, geometry: Geometry) -> Tensor:
    """Rows [T * h/2 * w/2, 4C] back as video latents [1, C, T, h, w]."""
    height, width = geometry.latent_h // PATCH, geometry.latent_w // PATCH
    patches = rows.reshape(geometry.latent_t, height, width, -1, PATCH, PATCH)  # [t, y, x, c, p, q]
    video = patches.permute(3, 0, 1, 4, 2, 5)  # [c, t, y, p, x, q]
    return video.reshape(1, -1, geometry.latent_t, geometry.latent_h, geometry.latent_w)


def audio_to_rows(audio: Tensor) -> Tensor:
    """Audio latents [1, C, 2, A] as rows [2A, C], all of the left channel first."""
    return audio[0].permute(1, 2, 0).flatten(0, 1)


def rows_to_audio(rows: Tensor) -> Tensor:
    """Rows [2A, C] back as audio latents [1, C, 2, A]."""
    return rows.unflatten(0, (SOUND_CHANNELS, -1)).permute(2, 0, 1).unsqueeze(0).contiguous()
