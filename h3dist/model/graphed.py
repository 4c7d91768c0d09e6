"""The denoiser's steps as a CUDA graph, `runtime.graph=on`: one launch a step, where the host takes longer to start
kernels than the GPU to do them.

The first step is computed as ever, which compiles, tunes and checks what is done once; then the same is recorded. What
differs between steps, the latents and the modulation, is copied to where the recorded step reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from h3dist.errors import ConfigError
from h3dist.model.denoiser import Denoiser
from h3dist.model.modulation import StepTables

Velocities = tuple[Tensor, Tensor]


class Recorded(NamedTuple):
    """Work that can be done again by `replay`, which leaves its results in `found`, always the same memory."""

    replay: Callable[[], None]
    found: Velocities


Record = Callable[[Callable[[], Velocities]], Recorded]


def record_on_cuda(work: Callable[[], Velocities]) -> Recorded:
    """The work as a CUDA graph of the current device, which keeps the memory that it computes in."""
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    # It records on a stream of torch's own, and where that fails, torch 2.13 stays there.
    with torch.cuda.stream(here), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    return Recorded(graph.replay, found)


@dataclass(frozen=True)
class Inputs:
    """What a step reads that the next one has otherwise, in memory of its own."""

    video: Tensor
    audio: Tensor
    tables: StepTables

    @classmethod
    def like(cls, video: Tensor, audio: Tensor, tables: StepTables, device: torch.device) -> Inputs:
        """A copy of a step's on the device."""
        latents = (x.to(device, copy=True) for x in (video, audio))
        return cls(*latents, StepTables(tuple(table.clone() for table in tables.blocks), tables.final.clone()))

    def take(self, video: Tensor, audio: Tensor, tables: StepTables) -> None:
        """Become another step's."""
        self.video.copy_(video)
        self.audio.copy_(audio)
        torch._foreach_copy_([*self.tables.blocks, self.tables.final], [*tables.blocks, tables.final])


class GraphedDenoiser:
    """A denoiser of one rank, called as one: the first call computes and records, the others replay.

    What it gives is the caller's own. Where a step cannot be recorded: ConfigError. `checked`: so it is where a replay
    does not give the first step's bits; it costs a step, and is for attention that is not torch's own, whose kernels
    might go round the recording.
    """

    def __init__(self, denoiser: Denoiser, *, checked: bool = False, record: Record = record_on_cuda) -> None:
        self.weights = denoiser.weights
        self._denoiser, self._checked, self._record = denoiser, checked, record
        self._inputs: Inputs | None = None
        self._recorded: Recorded | None = None

    @torch.no_grad()
    def __call__(self, video: Tensor, audio: Tensor, step: int) -> Velocities:
        """As `Denoiser.__call__`. Raises ConfigError."""
        tables = self._denoiser.modulation.at(step)
        if self._inputs is None or self._recorded is None:
            return self._first(video, audio, tables)
        self._inputs.take(video, audio, tables)
        self._recorded.replay()
        v_video, v_audio = self._recorded.found
        return v_video.to(video.device, copy=True), v_audio.to(audio.device, copy=True)

    def _first(self, video: Tensor, audio: Tensor, tables: StepTables) -> Velocities:
        """The step itself, from the memory that recorded ones read, so that both are the same work."""
        inputs = self._inputs = Inputs.like(video, audio, tables, self.weights.device)

        def work() -> Velocities:
            return self._denoiser.evaluate(inputs.video, inputs.audio, inputs.tables)

        found = work()
        try:
            self._recorded = self._proved(self._record(work), found)
        except Exception as error:  # of whatever class a kernel raises that cannot be recorded
            first = error.__context__ or error  # the end of a recording that failed raises once more
            why = f"{type(first).__name__}: {(str(first).splitlines() or [''])[0]}"
            raise ConfigError(
                f"runtime.graph=on: a step cannot be recorded here ({why}); use runtime.graph=off"
            ) from error
        return found[0].to(video.device), found[1].to(audio.device)

    def _proved(self, recorded: Recorded, found: Velocities) -> Recorded:
        if self._checked:
            recorded.replay()
            if not all(map(torch.equal, recorded.found, found)):
                raise RuntimeError("a replay does not give what the step gave")
        return recorded
