"""One rank of cells on random weights, the module that torchrun starts: `python -m h3dist.matrix.cell TOLD`.

TOLD is the JSON that `random_run.start_random` wrote. Rank 0 leaves, of one cell after the other, the latents and then
every rank's report. Weights are made once for all cells that a rank takes the same cuts for.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
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
    from h3dist.model.weights import DenoiserWeights
    from h3dist.plan import Plan, Share

LOAD_SECONDS = 5.0  # that a cell is given beside its evaluations


def main() -> None:
    """Do this rank's part of the cells."""
    told, ranks = json.loads(Path(sys.argv[1]).read_text(encoding="ascii")), read_ranks()
    workers.run(lambda: work(told, ranks), ranks, told["status_dir"], [])


def work(told: Mapping[str, Any], ranks: Ranks) -> None:
    """Measure, and leave the reports. torch is imported here: by now the rank has said that it is there."""
    begun = time.perf_counter()
    import torch

    from h3dist.comm import Comm
    from h3dist.fusing import agree_on_elementwise
    from h3dist.model.elementwise import PLAIN
    from h3dist.site import pick_device

    runtime, status = RuntimeConfig(**told["runtime"]), StatusFile.of(told["status_dir"], ranks.rank)
    torch.set_num_threads(threads_per_rank(runtime.threads, ranks.local_world))
    plans = [plan_of(Spec(**each["spec"])) for each in told["cells"]]
    device = pick_device(Config(runtime=runtime), ranks)
    transports = {plan.exchange.on(plan.layout).transport for plan in plans}
    how = {"timeout": runtime.timeout, "stage_timeout": runtime.stage_timeout}
    how |= {"transport": max(transports, key=("collective", "auto", "copy").index)}
    status.enter("start")
    with Comm.connect(ranks, plans[0].layout, device, backend=runtime.backend, **how) as comm:
        comm.same("the plans", [plan.digest for plan in plans])
        with comm.stage("start"):
            fused = agree_on_elementwise(comm, runtime.fused, device) is not PLAIN
        made = Weights(comm, device)
        for each, plan in in_time(comm, told, plans):
            stages = {"start": time.perf_counter() - begun}
            measured = measure(plan, comm, made, stages, status, each["spec"]["seed"], fused)
            with comm.stage("report"):
                reports = comm.collect("reports", json.dumps(report(measured, stages, device)))
                if ranks.rank == 0:
                    leave(Path(each["home"]), plan, measured, reports)
            begun = time.perf_counter()


def in_time(comm: "Comm", told: Mapping[str, Any], plans: "list[Plan]") -> "Iterator[tuple[Mapping[str, Any], Plan]]":
    """The cells that are expected to end by `until`, as rank 0 sees it, each once the one before it is done.

    What is predicted is multiplied by what that came to for the one before; of the first one nothing is expected.
    """
    slower, until = 0.0, told["until"]
    for each, plan in zip(told["cells"], plans, strict=True):
        expected, begun = each["expected"] or 0.0, time.time()
        if comm.share(until is None or begun + slower * expected + LOAD_SECONDS * (slower > 0) < until):
            yield each, plan
            slower = max(0.0, time.time() - begun - LOAD_SECONDS) / expected if expected else 0.0


class Weights:
    """This rank's random weights, made anew where a cell takes other cuts of them."""

    def __init__(self, comm: "Comm", device: "torch.device") -> None:
        self._rank, self._device = comm.rank, device
        self._of: object = None
        self._made: DenoiserWeights | None = None

    def of(self, plan: "Plan", seed: int) -> "DenoiserWeights":
        """Those of a plan."""
        from h3dist.bench.steps import random_weights

        of = seed, plan.dims, plan.gemm, plan.dtype, cuts(plan.shares[self._rank])
        if self._made is None or self._of != of:
            self._made = None  # what there was goes before more comes
            self._made, self._of = random_weights(plan, self._rank, self._device, seed=seed), of
        return self._made


def cuts(share: "Share") -> tuple[object, ...]:
    """What of the weights a rank takes."""
    return share.projected_heads, share.tp_heads, share.ffn


def measure(
    plan: "Plan", comm: "Comm", made: Weights, stages: dict[str, float], status: StatusFile, seed: int, fused: bool
) -> "Measured":
    """Load and run the plan's evaluations; `stages` gets the seconds of both. No rank steps before all have loaded."""
    from h3dist.bench.steps import denoiser_of, run_steps

    begun = time.perf_counter()
    status.enter("load")
    with comm.stage("load"):
        denoiser = denoiser_of(made.of(plan, seed), plan, comm, seed=seed, fused=fused, reused=fused)
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


def leave(home: Path, plan: "Plan", measured: "Measured", reports: list[str]) -> None:
    """Write the latents, which are the same on every rank, then all ranks' reports, which say that the cell is done."""
    from safetensors.torch import save_file

    save_file({"latents": measured.latents}, home / "latents.safetensors")
    result = {"plan_digest": plan.digest, "ranks": [json.loads(text) for text in reports]}
    (home / "result.part").write_text(json.dumps(result, allow_nan=False), encoding="ascii")
    os.replace(home / "result.part", home / "result.json")


if __name__ == "__main__":
    main()
