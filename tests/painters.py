"""Ranks that decode together, with stand-ins for the VAEs: quick, and nothing of diffusers is imported.

A stand-in tile depends on its latents, its place and its chunk, and neighbours differ where they overlap, so that a
tile in the wrong place, or blended in another order, shows.
"""

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from h3dist.checkpoint.comfy import DenoiserDims
from h3dist.comm import Comm
from h3dist.decoding import Clean, assist, decode_together
from h3dist.geometry import align_frames
from h3dist.plan import DECODE_LABELS, Layout, Plan, make_plan, schedule_decode
from h3dist.request import Resolved
from h3dist.tiles import HEAD, TAIL, Job, cut_video
from h3dist.vae.frames import finish
from h3dist.vae.video import tile_dtype

DIMS = DenoiserDims(
    hidden=160, heads=14, head_dim=32, ffn=1024, layers=1, refiner_layers=1, text_dim=96, video_channels=24,
    audio_channels=32, rope_freqs=4, form="full", curve_grid=0, curve_rank=0, time_freq=32, time_hidden=160,
    time_dim=80,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A clip's size."""

    width: int
    height: int
    frames: int
    batch: int = 1  # tiles of a call at most

    def plan(self, ranks: int, device: str = "cpu") -> Plan:
        resolved = Resolved("t2va", "x", self.width, self.height, self.frames, align_frames(self.frames), 7, 1, True)
        options = {"dtype": "float32", "attention": "sdpa", "steps": 1, "decode": "parallel", "device": device}
        options["decode_batch"] = self.batch
        return make_plan(resolved, DIMS, 3, Layout(sp=ranks), **options)

    def latents(self) -> tuple[Tensor, Tensor]:
        clip = self.plan(1).geometry
        generator = torch.Generator().manual_seed(self.frames)
        video = torch.randn(1, 24, clip.latent_t, clip.latent_h, clip.latent_w, generator=generator)
        return video, torch.randn(1, 32, 2, clip.audio_latents, generator=generator)


class Same:
    """Statistics that change nothing."""

    @staticmethod
    def restore(latents: Tensor) -> Tensor:
        return latents


@dataclass
class Painter:
    """In the place of the video VAE's decoder. `trouble` is what goes wrong, if anything: NaN at its first job, all
    else at its second."""

    rank: int
    trouble: str | None
    begun: list[tuple[tuple[int, ...], float]]  # of every job: its latents, and when
    calls: list[int] = field(default_factory=list)  # how many jobs each has
    statistics: type[Same] = Same

    def decode_jobs(self, latents: Tensor, jobs: Sequence[Job], batch: int) -> list[Tensor]:
        """Each tile by itself; those of a call that is not full would be the last one again."""
        assert 0 < len(jobs) <= batch
        self.calls.append(len(jobs))
        return [self.decode_job(latents, job) for job in jobs]

    def decode_job(self, latents: Tensor, job: Job) -> Tensor:
        self.begun.append((job.latents, time.monotonic()))
        tile = latents[0, :3, list(job.latents), slice(*job.rows), slice(*job.cols)]
        raw = tile.repeat_interleave(4, 1).repeat_interleave(16, 2).repeat_interleave(16, 3)
        raw = raw * (1 + 0.1 * torch.linspace(0, 1, raw.shape[3], device=raw.device)) + 0.01 * (
            job.rows[0] + job.cols[0]
        )
        raw = torch.cat([raw[:, HEAD], raw[:, TAIL]], dim=1)
        due = 1 if self.trouble == "nan" else 2
        raw = raw.to(tile_dtype(raw.device))
        return self._go_wrong(raw) if self.trouble and len(self.begun) == due else raw

    def _go_wrong(self, raw: Tensor) -> Tensor:
        if self.trouble == "raise":
            raise MemoryError("no memory for a tile")
        if self.trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == "sleep":
            time.sleep(4)
        return raw * float("nan") if self.trouble == "nan" else raw


@dataclass(frozen=True)
class Painted(Clean):
    """Latents with a painter, and a sound made of them."""

    painter: Painter | None = None

    def sound(self) -> Tensor:
        return self.audio[0, 0].repeat_interleave(800, 1).sin()

    def video_vae(self) -> Any:
        assert self.painter is not None
        return self.painter


@dataclass(frozen=True)
class Saw:
    """What one rank saw."""

    frames: str | None  # SHA-256, on rank 0
    sound: str | None
    sent: dict[str, int]
    planned: dict[str, int]
    begun: list[tuple[tuple[int, ...], float]]
    had: list[float]  # when rank 0 had each chunk
    calls: list[int]  # tiles of each call


def painted(shape: Shape, rank: int, trouble: str | None = None, device: str = "cpu") -> Painted:
    video, audio = (latents.to(device) for latents in shape.latents())
    how = {"batch": shape.plan(1).decode.batch, "painter": Painter(rank, trouble, [])}
    return Painted(video, audio, None, None, torch.device(device), **how)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def serial(shape: Shape, device: str = "cpu") -> tuple[str, str]:
    """Frames and sound as one rank makes them."""
    clean = painted(shape, 0, device=device)
    cuts = cut_video(*clean.video.shape[2:])
    frames = finish((clean.video_vae().decode_job(clean.video, job) for job in cuts.jobs()), cuts)
    return digest(torch.cat(list(frames))), digest(clean.sound().cpu())


def decode(seat: Any, shape: Shape, troubles: dict[int, str], pause: float = 0.0, timeout: float = 20) -> Saw:
    """One rank's part; `pause` is what rank 0 takes over a chunk."""
    comm = seat.connect(Layout(sp=seat.world), timeout=timeout)
    return decode_over(comm, seat, shape, troubles, pause)


def decode_all(seat: Any, shapes: list[Shape]) -> list[Saw]:
    """Several clips, one after the other, over the same groups."""
    comm = seat.connect(Layout(sp=seat.world))
    return [decode_over(comm, seat, shape, {}, 0.0) for shape in shapes]


def decode_on_gpus(seat: Any, shape: Shape, backend: str) -> Saw:
    """One rank's part on a GPU: its own over NCCL, one for all over gloo."""
    device = f"cuda:{seat.rank if backend == 'nccl' else 0}"
    comm = seat.connect(Layout(sp=seat.world), device=device, backend=backend)
    return decode_over(comm, seat, shape, {}, 0.0)


def decode_over(comm: Comm, seat: Any, shape: Shape, troubles: dict[int, str], pause: float) -> Saw:
    plan = shape.plan(seat.world, device=comm.device.type)
    parts = schedule_decode(plan.geometry, seat.world, comm.device.type, plan.decode.batch, fast=plan.decode.fast)
    comm.counted.update(dict.fromkeys(DECODE_LABELS, 0))
    clean = painted(shape, seat.rank, troubles.get(seat.rank), str(comm.device))
    frames, sound, had = None, None, []
    with comm.stage("decode"):
        if seat.rank:
            assist(clean, comm, *parts)
        else:
            chunks = []
            with decode_together(clean, comm, *parts) as decoded:
                sound = digest(decoded.sound_2N)
                for chunk in decoded.frames:
                    had.append(time.monotonic())
                    chunks.append(chunk)
                    time.sleep(pause)
            frames = digest(torch.cat(chunks))
    sent = {label: comm.counted[label] for label in DECODE_LABELS}
    planned = {label: plan.shares[seat.rank].sent[label] for label in DECODE_LABELS}
    return Saw(frames, sound, sent, planned, clean.painter.begun, had, clean.painter.calls)
