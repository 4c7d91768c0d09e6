"""One rank of a run, the module that torchrun starts: a Hydra app around `pipeline.run`.

    torchrun --standalone --nproc-per-node 8 -m h3dist.generate parallel=ulysses request.prompt_file=p.txt

Under the launcher `job=` names what to make. Without it rank 0 reads the request from the configuration.
"""

import sys
from contextlib import ExitStack
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from h3dist import workers
from h3dist.config import conf_dir, register_schema, to_config
from h3dist.errors import ConfigError
from h3dist.job import make_job, read_job
from h3dist.outputs import Outputs, claimed
from h3dist.request import gather_request
from h3dist.topology import Ranks, read_ranks, threads_per_rank


@hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Do this rank's part of the run, and leave with the exit code of the first error."""
    ranks = read_ranks()
    job = read_job(composed.job) if composed.job else None
    parts = list(job["output"]["parts"].values()) if job and ranks.rank == 0 else []
    status_dir = job["status_dir"] if job else None
    workers.run(lambda: _recorded(composed, job, ranks, parts), ranks, status_dir, parts)


def _recorded(composed: DictConfig, job: dict[str, Any] | None, ranks: Ranks, parts: list[str]) -> None:
    """The work, with what it raises kept for torchrun's own report. torch is imported here: it takes seconds,
    and by now the rank has said that it is there."""
    from torch.distributed.elastic.multiprocessing.errors import record

    record(work)(composed, job, ranks, parts)


def work(composed: DictConfig, job: dict[str, Any] | None, ranks: Ranks, parts: list[str]) -> None:
    """Run the pipeline on this rank; `parts` receives the temporary files if rank 0 makes the job itself."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("--multirun would sweep on every rank by itself; h3dist matrix sweeps")
    config = to_config(composed, list(HydraConfig.get().overrides.task))
    with ExitStack() as held:
        if job is None and ranks.rank == 0:
            job = make_job(config, gather_request(vars(config.request)), {})
            held.enter_context(claimed(Outputs(**job["output"]).targets().values()))
            parts.extend(job["output"]["parts"].values())
            for note in job["notes"]:
                print(f"h3dist: {note}", file=sys.stderr)
        import torch

        from h3dist import pipeline

        torch.set_num_threads(threads_per_rank(config.runtime.threads, ranks.local_world))
        pipeline.run(config, job, ranks)


if __name__ == "__main__":
    register_schema()
    main()
