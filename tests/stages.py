"""What the ranks of a World do in tests of whole runs: the pipeline's own stages, over real files.

Imported by every rank, so it imports nothing that a rank of a run would not.
"""

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from h3dist import pipeline
from h3dist.checkpoint.comfy import DenoiserFile, open_denoiser
from h3dist.checkpoint.tiny import TEXT
from h3dist.comm import Comm
from h3dist.config import Config, compose
from h3dist.job import make_job
from h3dist.outputs import Outputs
from h3dist.plan import Layout
from h3dist.saved import sha256
from h3dist.site import Site
from h3dist.topology import Ranks

HEAVY = ("transformers", "diffusers", "av")  # what rank 0 alone needs


@dataclass(frozen=True)
class Run:
    """A configuration and a job, made once for all ranks."""

    config: Config
    job: dict[str, Any]


@dataclass(frozen=True)
class Walked:
    """What one rank saw of a run up to the clean latents. Rank 0's trace has them last; hashes are SHA-256."""

    hashes: tuple[str, str]
    again: tuple[str, str] | None  # of a second denoising with what was loaded for the first
    sent: dict[str, int]
    planned: dict[str, int]
    file_bytes: tuple[int, int]  # counted, planned
    rows: tuple[int, int]
    trace: dict[str, Any]  # name -> array, on rank 0
    rounding: dict[str, tuple[float, float]]  # of codes, where heads move as such
    kept: dict[str, str]  # the hashes of the conditions' rows, by kind


def prepare_run(
    paths: Mapping[str, Path], request: Mapping[str, Any], folder: Path, *overrides: str, **output: str
) -> Run:
    """A run on the CPU over a set of files as `write_tiny` names them; the MP4 would be `folder`/o.mp4."""
    lines = paths["overrides"].read_text().replace("@", str(paths["overrides"].parent)).splitlines()
    config = compose([*lines, "runtime.threads=1", *overrides])
    named = {"path": str(folder / "o.mp4"), **{name: str(folder / file) for name, file in output.items()}}
    return Run(config, make_job(config, request, named))


def site_of(seat: Any, run: Run, layout: Layout) -> Site:
    """This rank's place in a run, as `pipeline.run` makes it, tied to the others by the seat's rendezvous."""
    one_core(seat.rank)
    ranks = Ranks(seat.rank, seat.rank, seat.world, seat.world)
    outputs = Outputs(**run.job["output"]) if seat.rank == 0 else None
    runtime = run.config.runtime
    comm = seat.connect(layout, timeout=runtime.timeout, stage_timeout=runtime.stage_timeout)
    return Site(run.config, ranks, torch.device("cpu"), comm, outputs, None)


def walk(seat: Any, run: Run, layout: Layout, twice: bool = False) -> Walked:
    """A run up to the clean latents: start, plan, encode, pack, denoise."""
    site, dfile = site_of(seat, run, layout), opened(run.config)
    prepared = pipeline.prepare(site, pipeline.start(site, run.job if site.first else None, dfile))
    denoised = pipeline.denoise(site, pipeline.pack(prepared, site))
    share = prepared.started.plan.shares[seat.rank]
    sent = dict(site.comm.counted)
    second = pipeline.denoise(site, pipeline.pack(prepared, site)) if twice else None
    return Walked(
        hashes=hashes(denoised),
        again=hashes(second) if second else None,
        sent=sent,
        planned=share.sent,
        file_bytes=(dfile.file.bytes_read, share.file_bytes),
        rows=share.rows,
        trace=arrays(prepared.states_Lt, denoised) if site.first else {},
        rounding=site.comm.rounding.sums(),
        kept={kind: sha256(rows) for kind, rows in prepared.kept.items()},
    )


def walk_lean(seat: Any, run: Run, layout: Layout, twice: bool = False) -> Walked:
    """The same, where ranks past the first cannot import what encodes and decodes."""
    with without(HEAVY if seat.rank else ()):
        return walk(seat, run, layout, twice)


@contextmanager
def without(packages: Collection[str]) -> Iterator[None]:
    """Importing any of them is an error meanwhile, whether it was imported before or not."""
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    absent = dict.fromkeys([*packages, *loaded])
    sys.modules.update(absent)  # None in there is what has import fail
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        sys.modules.update(loaded)


def one_core(index: int) -> None:
    """Keep this process to one core, the next index's the next: tiny matrices are slower on more, and on others'."""
    cores = sorted(os.sched_getaffinity(0))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    os.sched_setaffinity(0, {cores[(index + worker) % len(cores)]})


@contextmanager
def on_one_core() -> Iterator[None]:
    """The same for a while, with one thread."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    one_core(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def opened(config: Config) -> DenoiserFile:
    return open_denoiser(config.model.denoiser, config.model.qkv_order)


def hashes(denoised: pipeline.Denoised) -> tuple[str, str]:
    return sha256(denoised.video), sha256(denoised.audio)


def arrays(states_Lt: Tensor, denoised: pipeline.Denoised) -> dict[str, Any]:
    """Text states, the latents after every step, the final ones: as arrays, which travel between processes whole."""
    final = {"video_latents": denoised.video, "audio_latents": denoised.audio}
    return {name: t.numpy() for name, t in {"text_states": states_Lt, **denoised.trace, **final}.items()}


@dataclass(frozen=True)
class Break:
    """A function of `h3dist.pipeline` that raises `error` on one rank: at once, or what it gives when called again."""

    rank: int
    name: str
    error: Exception
    late: bool = False

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.late:
            raise self.error
        return replace(self, late=False)


def run_whole(seat: Any, run: Run, broken: Break | None = None) -> None:
    """`pipeline.run` as a rank calls it, with something broken. A text encoder that says nothing saves its import."""
    one_core(seat.rank)
    ranks = Ranks(seat.rank, seat.rank, seat.world, seat.world)
    changes = {"TextEncoder": Mute} | ({broken.name: broken} if broken and seat.rank == broken.rank else {})
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch.object(pipeline, name, value))
        stack.enter_context(mock.patch.object(Comm, "connect", partial(Comm.connect, store=seat.store)))
        pipeline.run(run.config, run.job if seat.rank == 0 else None, ranks)


class Mute:
    """In the place of the text encoder of a tiny set: hidden states of zeros."""

    @classmethod
    def load(cls, *_: Any) -> "Mute":
        return cls()

    def encode(self, presentation: Any, *_: Any) -> tuple[Tensor, None]:
        return torch.zeros(len(presentation.ids), TEXT.hidden), None

    def release(self) -> None:
        """It holds nothing."""
