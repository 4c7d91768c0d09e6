"""One rank of a cell on random weights, the module that torchrun starts: `python -m h3dist.matrix.cell TOLD`.

TOLD is the JSON that `random_run.start_random` wrote. Rank 0 leaves every rank's report and the latents.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h3dist import workers
from h3dist.config import Config, RuntimeConfig
from h3dist.errors import NumericsError
from h3dist.matrix.random_run import Spec, plan_of
from h3dist.status import StatusFile
from h3dist.topology import Ranks, read_ranks, threads_per_rank

if TYPE_CHECKING:
    import torch

    from h3dist.bench.steps import Measured
    from h3dist.comm import Comm
    from h3dist.plan import Plan


def main() -> None:
    """Do this rank's part of the cell."""
    told, ranks = json.loads(Path(sys.argv[1]).read_text(encoding="ascii")), read_ranks()
    workers.run(lambda: work(told, ranks), ranks, told["status_dir"], [])


def work(told: Mapping[str, Any], ranks: Ranks) -> None:
    """Measure, and leave the reports. torch is imported here: by now the rank has said that it is there."""
    begun = time.perf_counter()
    import torch

    from h3dist.comm import Comm
    from h3dist.site import pick_device

    runtime, status = RuntimeConfig(**told["runtime"]), StatusFile.of(told["status_dir"], ranks.rank)
    torch.set_num_threads(threads_per_rank(runtime.threads, ranks.local_world))
    plan, device = plan_of(Spec(**told["spec"])), pick_device(Config(runtime=runtime), ranks)
    how = {"timeout": runtime.timeout, "stage_timeout": runtime.stage_timeout, "transport": plan.exchange.transport}
    status.enter("start")
    with Comm.connect(ranks, plan.layout, device, backend=runtime.backend, **how) as comm:
        comm.same("the plan", plan.digest)
        stages = {"start": time.perf_counter() - begun}
        measured = measure(plan, comm, stages, status, told["spec"]["seed"], runtime.fused)
        with comm.stage("report"):
            reports = comm.collect("reports", json.dumps(report(measured, stages, device)))
            if ranks.rank == 0:
                leave(told, plan, measured, reports)


def measure(
    plan: "Plan", comm: "Comm", stages: dict[str, float], status: StatusFile, seed: int, fused: str
) -> "Measured":
    """Load and run the plan's evaluations; `stages` gets the seconds of both. No rank steps before all have loaded."""
    from h3dist.bench.steps import random_run, run_steps
    from h3dist.fusing import agree_on_elementwise
    from h3dist.model.elementwise import PLAIN

    begun = time.perf_counter()
    status.enter("load")
    with comm.stage("load"):
        taken = agree_on_elementwise(comm, fused, comm.device) is not PLAIN
        denoiser = random_run(plan, comm, comm.device, seed=seed, fused=taken)
    stages["load"] = time.perf_counter() - begun
    status.enter("denoise")
    with comm.stage("denoise"):
        measured = run_steps(denoiser, plan, comm, seed=seed)
    stages["denoise"] = sum(measured.seconds)
    if not measured.latents.isfinite().all():
        raise NumericsError("the latents hold NaN or infinity")
    return measured


def report(measured: "Measured", stages: Mapping[str, float], device: "torch.device") -> dict[str, Any]:
    """One rank's figures: seconds, and bytes of memory and sent."""
    import resource

    import torch

    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "step_seconds": list(measured.seconds),
        "stages": dict(stages),
        "sent": measured.sent,
        "resident": measured.resident if cuda else None,
        "peak_memory": measured.peak if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def leave(told: Mapping[str, Any], plan: "Plan", measured: "Measured", reports: list[str]) -> None:
    """Write all ranks' reports and the latents, which are the same on every rank."""
    from safetensors.torch import save_file

    save_file({"latents": measured.latents}, told["latents"])
    result = {"plan_digest": plan.digest, "ranks": [json.loads(text) for text in reports]}
    Path(told["result"]).write_text(json.dumps(result, allow_nan=False), encoding="ascii")


if __name__ == "__main__":
    main()
