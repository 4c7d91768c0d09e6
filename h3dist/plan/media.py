"""Where keyframes and references are encoded: by rank 0 alone, or job by job by all ranks; what that sends and takes.

Under "parallel" a job is one tile of a clip of 17 frames, or of a still, for the video VAE, or one sound for the audio
VAE. `h3dist.spread` gives them out, sounds first. Rank 0 reads the media and sends pixels and samples; what the VAEs
give comes back to it. Bytes, once a run, for tiles of f frames and y x pixels, t latents along time, C channels of
video latents, N samples of a channel, A audio latents a channel and c of their channels:

    encode.pixels    3 f y x                      a tile that is not rank 0's, sent by rank 0
    encode.sounds    2 N * 4                      a sound likewise
    encode.moments   2 C t (y / 16) (x / 16) * 4  a tile, and 2 c A * 4 a sound, sent by all but rank 0
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from h3dist.clips import Clip, cut_clips
from h3dist.conditions import Condition
from h3dist.geometry import SOUND_CHANNELS
from h3dist.plan.decode import BESIDE
from h3dist.plan.memory import ENCODED_TILE, Stored
from h3dist.spread import Extra, Schedule, makespan, spread

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import DenoiserDims

MEDIA_LABELS = ("encode.pixels", "encode.sounds", "encode.moments")
FLOAT = 4
ALONE = Extra()


def schedule_media(conditions: Sequence[Condition], ranks: int, device: str) -> tuple[tuple[Clip, ...], Schedule]:
    """The clips, and whose each job is: the sounds are the schedule's first chunk, and each clip's tiles another."""
    return cut_clips(conditions), spread(_costs(conditions, device), ranks, ALONE)


def heard(conditions: Sequence[Condition]) -> list[Condition]:
    """Those that have sound, in their order."""
    return [condition for condition in conditions if condition.samples]


def speedup(conditions: Sequence[Condition], ranks: int, device: str) -> float:
    """Of the encoding, by the schedule: no transfer counted."""
    costs = _costs(conditions, device)
    one, all_ = (makespan(spread(costs, count, ALONE), costs, ALONE) for count in (1, ranks))
    return round(one / all_, 3)


def media_sent(conditions: Sequence[Condition], dims: "DenoiserDims", ranks: int, device: str, rank: int) -> list[int]:
    """Bytes that a rank sends, in the order of `MEDIA_LABELS`."""
    clips, schedule = schedule_media(conditions, ranks, device)
    sounds = list(zip(heard(conditions), schedule.chunks[0], strict=True))
    tiles = [(clip, owner) for clip, owners in zip(clips, schedule.chunks[1:], strict=True) for owner in owners]
    if rank == 0:
        pixels = sum(prod(clip.tile) for clip, owner in tiles if owner)
        return [pixels, FLOAT * SOUND_CHANNELS * sum(one.samples for one, owner in sounds if owner), 0]
    moments = sum(prod(clip.latents(dims.video_channels)) for clip, owner in tiles if owner == rank)
    latents = sum(SOUND_CHANNELS * dims.audio_channels * one.audio_latents for one, owner in sounds if owner == rank)
    return [0, 0, FLOAT * (moments + latents)]


def media_bytes(
    conditions: Sequence[Condition], dims: "DenoiserDims", stored: Stored, schedule: Schedule, rank: int
) -> int:
    """What a rank needs: a VAE where it has work for it, the pixels of two clips, and what its jobs gave; rank 0 the
    pixels that it sends, and what all jobs gave, as it came and joined."""
    clips, owners = cut_clips(conditions), schedule.chunks[1:]
    counts = [sum(owner == rank for owner in each) if rank else len(each) for each in owners]
    pixels = max((count * prod(clip.tile) for clip, count in zip(clips, counts, strict=True)), default=0)
    shapes = [count * prod(clip.latents(dims.video_channels)) for clip, count in zip(clips, counts, strict=True)]
    video = any(rank in each for each in owners) * (stored.video_vae + ENCODED_TILE)
    return max(video + 2 * pixels + 2 * FLOAT * sum(shapes), (rank in schedule.chunks[0]) * stored.audio_vae)


def _costs(conditions: Sequence[Condition], device: str) -> list[list[float]]:
    _, latent = BESIDE[device]  # in whole tiles, as measured of decoding
    sounds = [latent * SOUND_CHANNELS * one.audio_latents for one in heard(conditions)]
    return [sounds, *([clip.cost] * len(clip.places) for clip in cut_clips(conditions))]
