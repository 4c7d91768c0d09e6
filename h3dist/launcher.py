"""Start the ranks of one run under torchrun, watch them, and bring back one exit code.

torchrun waits 30 s for ranks that do not leave, returns 1 whatever happened, and starts every rank in a
session of its own. So the launcher reads the ranks' status files, tells the first cause once, and ends what
is left (`processes.py`).
"""

import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from h3dist.config import Config, compose
from h3dist.errors import PlanError
from h3dist.job import make_job, write_job
from h3dist.plan import Layout
from h3dist.processes import Outcome, launch_ranks, leave, on_signals
from h3dist.topology import threads_per_rank, visible_devices
from h3dist.torchrun import run_folder, torchrun


@dataclass(frozen=True)
class Job:
    """What the command line asks for: fields of the request and of the output; no `gpus` stands for auto.

    `inputs` are the files that the request was read from.
    """

    request: dict[str, Any]
    overrides: list[str] = field(default_factory=list)
    gpus: int | None = None
    output: dict[str, Any] = field(default_factory=dict)
    verbose: bool = False
    inputs: tuple[str, ...] = ()


def run_generate(job: Job) -> int:
    """Make a clip: check everything that can be checked here, start the ranks, wait. Gives the exit code.

    Raises an `H3Error` for what is refused before any rank starts, and SystemExit where a signal comes
    before; what fails later is told on stderr.
    """
    from h3dist.planner import decide_run

    with on_signals(leave):
        config = compose(job.overrides)
        made = make_job(config, job.request, job.output, job.inputs)
        decision = decide_run(config, made["request"], job.gpus)
        layout = decision.plan.layout
        check_devices(config, layout.world)
        for note in (*made["notes"], *decision.notes):
            print(f"h3dist: {note}", file=sys.stderr)
        environ = {"OMP_NUM_THREADS": str(threads_per_rank(config.runtime.threads, layout.world))}
        if decision.visible:
            environ["CUDA_VISIBLE_DEVICES"] = decision.visible
        return _run(made, job, layout, environ)


def _run(made: dict[str, Any], job: Job, layout: Layout, environ: dict[str, str]) -> int:
    folder = run_folder()
    made |= {"status_dir": str(folder / "status"), "verbose": job.verbose, "layout": asdict(layout)}
    write_job(made, folder / "job.json")
    outcome = launch_ranks(
        torchrun(folder, layout.world, "h3dist.generate", [f"job={folder}/job.json", *job.overrides]),
        folder / "status",
        layout.world,
        list(made["output"]["parts"].values()),
        environ=environ,
        log=folder / "torchrun.log",
    )
    return report(outcome, folder, layout.world, job.verbose)


def check_devices(config: Config, world: int) -> None:
    """Raise `PlanError` where more ranks are asked for than GPUs are visible. Over gloo, ranks may share."""
    runtime = config.runtime
    visible = len(visible_devices()) if runtime.device != "cpu" else 0
    if runtime.device == "cuda" and not visible:
        raise PlanError("runtime.device=cuda: no GPU is visible; runtime.device=cpu runs on the processor")
    if visible and world > visible and runtime.backend != "gloo":
        raise PlanError(
            f"{world} GPUs asked, {visible} visible; use --gpus {visible}, or runtime.device=cpu for "
            f"{world} ranks on the processor"
        )


def report(outcome: Outcome, folder: Path, world: int, verbose: bool) -> int:
    """Tell on stderr why a run failed and where its logs are; otherwise remove them. Gives the exit code."""
    if outcome.cause is None:
        shutil.rmtree(folder, ignore_errors=True)
        return outcome.exit_code
    print(f"h3dist: error: {outcome.cause.text(world)}", file=sys.stderr)
    trace = folder / "status" / f"rank{outcome.cause.rank}.traceback"
    if verbose and trace.exists():
        print(trace.read_text(errors="replace"), file=sys.stderr, end="")
    print(f"h3dist: logs of this run: {folder}", file=sys.stderr)
    return outcome.exit_code
