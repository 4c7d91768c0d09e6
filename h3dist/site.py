"""Where a rank works: its device, its ties to the other ranks, the stage it is in and how long each took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from h3dist.comm import Comm
from h3dist.config import Config
from h3dist.errors import PlanError
from h3dist.outputs import Outputs
from h3dist.progress import announce
from h3dist.status import StatusFile
from h3dist.topology import Ranks, cores


@dataclass(frozen=True)
class Site:
    """One rank of a run. `outputs` are rank 0's; `status` is None where no launcher listens."""

    config: Config
    ranks: Ranks
    device: torch.device
    comm: Comm
    outputs: Outputs | None = None
    status: StatusFile | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which speaks, encodes, decodes and writes."""
        return self.ranks.rank == 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of the run: all ranks leave it together, or all raise the first error."""
        if self.status:
            self.status.enter(name)
        if self.first:
            announce(name)
        begun = time.perf_counter()
        with self.comm.stage(name):
            yield
            self._settle()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def peak_memory(self) -> int:
        """The most bytes this rank held at once: of its GPU, or resident on the host."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) + self.comm.transport.held
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def all_cores() -> Iterator[None]:
    """While one rank works alone it may use every core; the others wait without one."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(config: Config, ranks: Ranks) -> torch.device:
    """This rank's device: its own GPU, a shared one over gloo, or the CPU. Raises `PlanError`."""
    wanted = config.runtime.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlanError("runtime.device=cuda: no GPU is visible; runtime.device=cpu runs on the processor")
    count = torch.cuda.device_count()
    if ranks.local_rank >= count and config.runtime.backend != "gloo":
        raise PlanError(
            f"{ranks.local_world} ranks on this machine, {count} GPUs visible: NCCL needs one for each; "
            f"start {count}, or let ranks share GPUs with runtime.backend=gloo"
        )
    device = torch.device("cuda", ranks.local_rank % count)
    torch.cuda.set_device(device)
    return device


def free_memory(device: torch.device, ranks: Ranks) -> int | None:
    """Bytes that this rank may still take of its GPU, which other ranks may share; None on the CPU."""
    if device.type != "cuda":
        return None
    users = len(range(device.index, ranks.local_world, torch.cuda.device_count()))
    return torch.cuda.mem_get_info(device)[0] // max(1, users)
