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
from h3dist.errors import PlanError, RankError
from h3dist.job import make_job, write_job
from h3dist.outputs import Outputs, claimed
from h3dist.plan import Plan
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

    The clip's path, once it is there, goes to stdout.

    Raises an `H3Error` for what is refused before any rank starts, and SystemExit where a signal comes
    before; what fails later is told on stderr.
    """
    with on_signals(leave):
        config = compose(job.overrides)
        made = make_job(config, job.request, job.output, job.inputs)
        with claimed(Outputs(**made["output"]).targets().values()):
            code = _decide_and_run(config, made, job)
        if code == 0:
            print(made["output"]["path"], flush=True)
        return code


def _decide_and_run(config: Config, made: dict[str, Any], job: Job) -> int:
    from h3dist.planner import decide_run

    decision = decide_run(config, made["request"], job.gpus)
    plan = decision.plan
    check_devices(config, plan.layout.world)
    for note in (*made["notes"], *decision.notes):
        print(f"h3dist: {note}", file=sys.stderr)
    print(f"h3dist: starting {plan.layout.world} rank{'s' * (plan.layout.world > 1)}: {plan.layout}", file=sys.stderr)
    environ = {"OMP_NUM_THREADS": str(threads_per_rank(config.runtime.threads, plan.layout.world))}
    if decision.visible:
        environ["CUDA_VISIBLE_DEVICES"] = decision.visible
    return _run(made, job, plan, environ)


def _run(made: dict[str, Any], job: Job, plan: Plan, environ: dict[str, str]) -> int:
    folder, world = run_folder(), plan.layout.world
    made |= {"layout": asdict(plan.layout), "exchange": asdict(plan.exchange), "encode": plan.encode.text}
    made |= {"status_dir": str(folder / "status"), "verbose": job.verbose}
    try:
        write_job(made, folder / "job.json")
        outcome = launch_ranks(
            torchrun(folder, world, "h3dist.generate", [f"job={folder}/job.json", *job.overrides]),
            folder / "status",
            world,
            list(made["output"]["parts"].values()),
            environ=environ,
            log=folder / "torchrun.log",
        )
    except BaseException:  # before a rank ran, or in the middle of its watch: nothing there would explain it
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return report(outcome, folder, world, job.verbose)


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
    """Tell on stderr why a run failed. Gives the exit code.

    The run's logs go, but where they may tell more than that: of what nobody foresaw, of a rank that died, or if
    `verbose`; then their place is told.
    """
    cause = outcome.cause
    if cause is not None:
        print(f"h3dist: error: {cause.text(world)}", file=sys.stderr)
        trace = folder / "status" / f"rank{cause.rank}.traceback"
        if verbose and trace.exists():
            print(trace.read_text(errors="replace"), file=sys.stderr, end="")
        if verbose or cause.exit_code in (1, RankError.exit_code):
            print(f"h3dist: logs of this run: {folder}", file=sys.stderr)
            return outcome.exit_code
    shutil.rmtree(folder, ignore_errors=True)
    return outcome.exit_code
