"""Keyframes and references encoded by all ranks: tile by tile, and sound by sound, as the plan gives them out.

Rank 0 reads the media. It sends each rank its sounds, and then, clip by clip, the pixels of its tiles, the next clip's
while this one's are encoded; what the VAEs give comes back, and rank 0 joins it in the serial order. So the rows are
those of rank 0 alone to the last bit: a tile is the same call of the same encoder wherever it is made.

Shape letters: f y x frames and pixels of a tile, N samples of a channel, C video latent channels, t h w latents.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from h3dist.clips import Clip
from h3dist.comm import Comm
from h3dist.comm.encoding import RankEncoding
from h3dist.conditioning import audio_rows, by_kind, video_rows
from h3dist.conditions import Condition
from h3dist.config import ModelConfig
from h3dist.decoding import Vaes
from h3dist.geometry import SOUND_CHANNELS
from h3dist.material import Material
from h3dist.plan import Plan
from h3dist.plan.media import heard, schedule_media
from h3dist.spread import Schedule
from h3dist.vae import AudioVae, VideoVae
from h3dist.vae.blend import stitch
from h3dist.vae.encode import choose_latents, clips_of, cut_tile, encode_tile

GIVEN = "encode.moments"


@dataclass(frozen=True)
class MediaWork:
    """What all ranks know of the conditions' encoding, this rank's ties to the others, and the VAEs' files."""

    plan: Plan
    comm: Comm
    files: Vaes
    model: ModelConfig

    @cached_property
    def ranks(self) -> RankEncoding:
        """The others."""
        return self.comm.encoding()

    @cached_property
    def cut(self) -> tuple[tuple[Clip, ...], Schedule]:
        """The clips, and who has which job."""
        return schedule_media(self.plan.conditions, self.plan.layout.ranks, self.plan.decode.device)

    def audio_vae(self) -> AudioVae:
        """The audio VAE's encoder, read."""
        return AudioVae.load(self.files.audio, self.model.audio_vae_config, self.comm.device, encoder=True)

    def video_vae(self, *, encoder: bool) -> VideoVae:
        """The video VAE, read: its encoder, or its latents' statistics alone."""
        config, device = self.model.video_vae_config, self.comm.device
        return VideoVae.load(self.files.video, config, device, encoder=encoder, decoder=False)


def encode_media(work: MediaWork, material: Sequence[Material], *, contract: str, seed: int) -> dict[str, Tensor]:
    """Rank 0's part: the conditions' rows by kind, as `encode_conditions` gives them.

    The others are at `assist_media` meanwhile. Raises as the VAEs do, on any rank.
    """
    work.comm.agree("the text encoder")
    sounds = encode_sounds(work, [item.sound for item in material if item.sound is not None])
    seen = [item for item in material if item.frames is not None]
    pixels = [clip for item in seen for clip in clips_of(item.frames[: item.condition.frames])]
    moments_of: dict[int, list[Tensor]] = {}
    for clip, moments in zip(work.cut[0], encode_clips(work, pixels), strict=True):
        moments_of.setdefault(clip.condition, []).append(moments)
    latents = []
    if moments_of:
        statistics = work.video_vae(encoder=False).statistics
        latents = [choose_latents(clips, contract, statistics) for clips in moments_of.values()]
    rows = video_rows(latents, [item.condition for item in seen], contract, seed)
    return by_kind(rows, audio_rows(sounds))


def assist_media(work: MediaWork) -> None:
    """The same, as another rank: encodes what it is sent, and hands it in."""
    work.comm.agree("the text encoder")  # nobody waits on the tensors' groups while rank 0 works alone
    encode_sounds(work, None)
    for _ in encode_clips(work, None):
        pass


def encode_sounds(work: MediaWork, sounds: Sequence[np.ndarray] | None) -> list[Tensor]:
    """Latents f32 [1, c, 2, A] of every sound f32 [2, N], which rank 0 gives; there all, in order, elsewhere none."""
    conditions, owners = heard(work.plan.conditions), work.cut[1].chunks[0]
    if not conditions:
        return []
    given = [torch.from_numpy(np.ascontiguousarray(sound)) for sound in sounds] if sounds is not None else None
    shapes = [(SOUND_CHANNELS, one.samples) for one in conditions]
    mine = hand_out(work, "encode.sounds", given, owners, shapes, torch.float32)()
    vae = work.audio_vae() if mine else None
    own = [vae.encode(sound).to(work.comm.device) for sound in mine] if vae else []
    return [latents.cpu() for latents in hand_in(work, own, owners, [_latents(work, one) for one in conditions])()]


def _latents(work: MediaWork, condition: Condition) -> tuple[int, ...]:
    return 1, work.plan.dims.audio_channels, SOUND_CHANNELS, condition.audio_latents


def encode_clips(work: MediaWork, clips: Sequence[np.ndarray] | None) -> Iterator[Tensor | None]:
    """Clip by clip on rank 0 its moments f32 [2C, t, h, w], from `clips` u8 [f, H, W, 3]; elsewhere None, as often.

    A rank without jobs reads no VAE.
    """
    cuts, schedule = work.cut
    owned = any(work.comm.rank in owners for owners in schedule.chunks[1:])
    vae = work.video_vae(encoder=True) if owned else None
    coming = _send(work, clips, 0) if cuts else None
    waiting: Callable[[], list[Tensor]] | None = None
    for index, clip in enumerate(cuts):
        tiles = coming()
        coming = _send(work, clips, index + 1) if index + 1 < len(cuts) else None
        own = [encode_tile(vae, tile) for tile in tiles]
        begun = hand_in(work, own, schedule.chunks[1 + index], _moments(work, clip))
        if waiting:
            yield _joined(cuts[index - 1], waiting())
        waiting = begun
    if waiting:
        yield _joined(cuts[-1], waiting())


def _send(work: MediaWork, clips: Sequence[np.ndarray] | None, index: int) -> Callable[[], list[Tensor]]:
    """Begins to move a clip's pixels to the ranks of its tiles."""
    clip, owners = work.cut[0][index], work.cut[1].chunks[1 + index]
    size = clip.rows.size, clip.cols.size
    given = [cut_tile(clips[index], corner, size) for corner in clip.places] if clips is not None else None
    return hand_out(work, "encode.pixels", given, owners, [clip.tile] * len(owners), torch.uint8)


def _moments(work: MediaWork, clip: Clip) -> list[tuple[int, ...]]:
    return [clip.latents(work.plan.dims.video_channels)] * len(clip.places)


def _joined(clip: Clip, tiles: list[Tensor]) -> Tensor | None:
    return stitch(iter(tiles), clip.rows.in_latents(), clip.cols.in_latents()) if tiles else None


def hand_out(
    work: MediaWork,
    label: str,
    given: Sequence[Tensor] | None,
    owners: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
) -> Callable[[], list[Tensor]]:
    """Begins to move `given`, one tensor for each job, which rank 0 has, to the ranks of the jobs.

    What it gives waits, and gives this rank's, in the order of the jobs, on its device.
    """
    leaving = None
    if given is not None:
        away = [given[place].flatten() for place in _by_rank(owners)]
        leaving = torch.cat([torch.empty(0, dtype=dtype), *away])
    arrived = work.ranks.hand_out(label, leaving, _counts(work, owners, shapes), dtype)
    mine = [place for place, owner in enumerate(owners) if owner == work.comm.rank]

    def whole() -> list[Tensor]:
        theirs = arrived()
        if given is not None:
            return [given[place] for place in mine]
        return _apart(theirs, [shapes[place] for place in mine])

    return whole


def hand_in(
    work: MediaWork, own: Sequence[Tensor], owners: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> Callable[[], list[Tensor]]:
    """Begins to move what the jobs gave, f32, to rank 0; what it gives waits, and gives all, in order, on rank 0."""
    first = work.comm.rank == 0
    leaving = [torch.empty(0, device=work.comm.device), *(tensor.flatten() for tensor in ([] if first else own))]
    arrived = work.comm.hand_in(GIVEN, torch.cat(leaving), _counts(work, owners, shapes))

    def whole() -> list[Tensor]:
        theirs = arrived()
        if not first:
            return []
        order = [*(place for place, owner in enumerate(owners) if owner == 0), *_by_rank(owners)]
        away = [shapes[place] for place in _by_rank(owners)]
        found = dict(zip(order, [*own, *_apart(theirs, away)], strict=True))
        return [found[place] for place in range(len(owners))]

    return whole


def _by_rank(owners: Sequence[int]) -> list[int]:
    """The places of all jobs that are not rank 0's, rank by rank."""
    return sorted((place for place, owner in enumerate(owners) if owner), key=owners.__getitem__)


def _counts(work: MediaWork, owners: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """How many elements of each rank's jobs travel: none of rank 0's."""
    counts = [0] * work.plan.layout.ranks
    for owner, shape in zip(owners, shapes, strict=True):
        counts[owner] += prod(shape) if owner else 0
    return counts


def _apart(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes that lie end to end."""
    parts = flat.split([prod(shape) for shape in shapes]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
