"""How the ranks of a cell, or of a batch of cells, are started, whatever they do."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from h3dist.config import Config
from h3dist.matrix.cells import Planned
from h3dist.topology import threads_per_rank


@dataclass(frozen=True)
class Start:
    """A command that starts ranks, the seconds it may take, its environment, the temporary files it may leave."""

    command: list[str]
    limit: float
    environ: Mapping[str, str]
    parts: list[str] = field(default_factory=list)


Starter = Callable[[Sequence[Planned], Path, float | None], Start]  # of a batch, in its folder, until a time


def ranks_environ(config: Config, planned: Planned, folder: Path) -> dict[str, str]:
    """Threads and GPU of each rank, and NCCL's own account of its transport, unless the user asked NCCL for another."""
    environ = {"OMP_NUM_THREADS": str(threads_per_rank(config.runtime.threads, planned.cell.ranks))}
    if planned.decision and planned.decision.visible:
        environ["CUDA_VISIBLE_DEVICES"] = planned.decision.visible
    if "NCCL_DEBUG" not in os.environ:
        environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{folder}/nccl.%p"}
    return environ
