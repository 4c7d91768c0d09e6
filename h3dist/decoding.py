"""Clean latents to frames and sound: by rank 0 alone, or by all ranks, which hand their tiles to rank 0.

Together, a rank's tiles of a chunk travel while it decodes those of the next, and before those of the one after it
waits until the first chunk is whole on rank 0. So rank 0 blends and encodes in the serial order while the others
decode on, holds the tiles of two chunks at most, and nobody else more than its own of them. Frames and sound are
those of rank 0 alone to the last bit: a tile is made by the same call of the same decoder, beside the same tiles,
wherever that is.

Shape letters: T h w latent frames, height and width; A audio latents a channel; y x pixels of a tile; N samples.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from h3dist.checkpoint.comfy import Slots, StateFile, open_vaes
from h3dist.comm import Comm
from h3dist.config import ModelConfig
from h3dist.geometry import CHUNK_FRAMES, SAMPLES_PER_AUDIO_LATENT, SOUND_CHANNELS, TAIL_FRAMES
from h3dist.plan import Plan
from h3dist.site import all_cores
from h3dist.spread import Schedule
from h3dist.tiles import Cuts
from h3dist.vae import AudioVae, VideoVae
from h3dist.vae.frames import finish
from h3dist.vae.video import check_latents, tile_dtype


class Vaes(NamedTuple):
    """The opened files of the two VAEs."""

    video: StateFile
    audio: StateFile


@dataclass(frozen=True)
class Clean:
    """Clean latents video [1, 24, T, h, w] and audio [1, 32, 2, A], and the VAEs to decode them on `device`."""

    video: Tensor
    audio: Tensor
    files: Vaes
    model: ModelConfig
    device: torch.device
    fast: bool = False  # the video VAE's decoder in fewer steps
    batch: int = 1  # tiles of a call
    gemm: str = "exact"  # how the fast decoder multiplies

    def sound(self) -> Tensor:
        """The sound, f32 [2, 800 A] on the CPU. Its VAE is read, and leaves again."""
        return AudioVae.load(self.files.audio, self.model.audio_vae_config, self.device).decode(self.audio)

    def video_vae(self) -> VideoVae:
        """The video VAE's decoder, read."""
        how = {"fast": self.fast, "gemm": self.gemm}
        return VideoVae.load(self.files.video, self.model.video_vae_config, self.device, **how)


@dataclass(frozen=True)
class Decoded:
    """Sound f32 [2, 800 A] and frames u8 [f, H, W, 3], a chunk at a time, on the CPU.

    `spent`: seconds that the first chunk took, where it is there already.
    """

    sound_2N: Tensor
    frames: Iterator[Tensor]
    spent: float = 0.0


def vaes_for(plan: Plan, slots: Slots | None, model: ModelConfig) -> Vaes | None:
    """The VAEs' files as this rank needs them: rank 0 has opened them, and the others open them if all encode
    conditions or decode.

    Raises CheckpointError.
    """
    if slots is not None:
        return Vaes(slots.video_vae, slots.audio_vae)
    return Vaes(*open_vaes(model)[:2]) if plan.decode.parallel or plan.encode.parallel else None


@contextmanager
def decode_alone(clean: Clean) -> Iterator[Decoded]:
    """Rank 0 decodes, on every core, while the others wait. Raises as the VAEs do."""
    with all_cores():
        yield Decoded(clean.sound(), clean.video_vae().decode(clean.video, clean.batch))


@contextmanager
def decode_together(clean: Clean, comm: Comm, cuts: Cuts, schedule: Schedule) -> Iterator[Decoded]:
    """Rank 0's part where all decode. Raises as the VAEs do, and what stops another rank."""
    check_latents(clean.video)
    sound = hand_in_sound(clean, comm, schedule)
    tiles = _one_by_one(decode_tiles(clean, comm, schedule, cuts))
    frames = finish(tiles, cuts, ahead=clean.device.type == "cuda")
    begun = time.perf_counter()
    first = next(frames)  # before the sound, so that nobody waits for rank 0's own tiles meanwhile
    spent = time.perf_counter() - begun
    yield Decoded(sound().view(SOUND_CHANNELS, -1).cpu(), chain([first], frames), spent)


def assist(clean: Clean, comm: Comm, cuts: Cuts, schedule: Schedule) -> None:
    """The same, as another rank: decodes its tiles and perhaps the sound, and hands them in."""
    sound = hand_in_sound(clean, comm, schedule)
    for _ in decode_tiles(clean, comm, schedule, cuts):
        pass
    sound()


def hand_in_sound(clean: Clean, comm: Comm, schedule: Schedule) -> Callable[[], Tensor]:
    """Begins to move the sound from the rank that decodes it to rank 0; what it gives waits for it."""
    count = SOUND_CHANNELS * SAMPLES_PER_AUDIO_LATENT * clean.audio.shape[-1]
    counts = [count if rank == schedule.sound else 0 for rank in range(schedule.ranks)]
    mine = clean.sound() if comm.rank == schedule.sound else torch.empty(0)
    return comm.hand_in("decode.sound", mine.flatten().to(clean.device), counts)


def decode_tiles(clean: Clean, comm: Comm, schedule: Schedule, cuts: Cuts) -> Iterator[list[Tensor]]:
    """Chunk by chunk on rank 0 all its tiles [3, 22, y, x] in serial order; on the others nothing, as often.

    A rank without jobs reads no VAE.
    """
    vae = clean.video_vae() if schedule.total(comm.rank) else None
    restored = vae.statistics.restore(clean.video) if vae else None
    jobs = list(cuts.jobs())
    waiting: Callable[[], list[Tensor]] | None = None
    for chunk, owners in enumerate(schedule.chunks):
        calls = schedule.calls(comm.rank, chunk, clean.batch)
        mine = [[jobs[chunk * cuts.tiles + place] for place in call] for call in calls]
        own = [tile for call in mine for tile in vae.decode_jobs(restored, call, clean.batch)] if vae else []
        begun = hand_in_tiles(own, owners, comm, (3, CHUNK_FRAMES + TAIL_FRAMES, cuts.rows.size, cuts.cols.size))
        if waiting:
            yield waiting()
        waiting = begun
    assert waiting is not None
    yield waiting()


def hand_in_tiles(
    own: list[Tensor], owners: Sequence[int], comm: Comm, shape: tuple[int, ...]
) -> Callable[[], list[Tensor]]:
    """Begins to move a chunk's tiles, of `shape`, to rank 0; what it gives waits for them, in serial order."""
    size = shape[0] * shape[1] * shape[2] * shape[3]
    counts = [0, *(owners.count(rank) * size for rank in range(1, comm.layout.ranks))]
    assert all(tile.dtype == tile_dtype(comm.device) for tile in own), "what the others expect"
    leaving = own if comm.rank else []
    mine = torch.cat([torch.empty(0, dtype=tile_dtype(comm.device), device=comm.device), *map(torch.flatten, leaving)])
    arrived = comm.hand_in("decode.tiles", mine, counts)
    kept = [] if comm.rank else own

    def whole() -> list[Tensor]:
        theirs = arrived().view(-1, *shape)
        return [] if comm.rank else in_serial_order(kept, theirs, owners)

    return whole


def in_serial_order(own: Sequence[Tensor], theirs: Tensor, owners: Sequence[int]) -> list[Tensor]:
    """All tiles of a chunk as `owners` come, from rank 0's `own` and `theirs`, the others' by rank."""
    queues, start = [iter(own)], 0
    for rank in range(1, max(owners) + 1):
        count = owners.count(rank)
        queues.append(iter(theirs[start : start + count]))
        start += count
    return [next(queues[owner]) for owner in owners]


def _one_by_one(chunks: Iterator[list[Tensor]]) -> Iterator[Tensor]:
    """Every tile, none of them kept: else a third chunk's would stay while two are in work."""
    for tiles in chunks:
        tiles.reverse()
        while tiles:
            yield tiles.pop()
