"""Kill or stop one rank in the middle of its steps: do all leave, how soon, and what is said?

    python benchmarks/leave.py --ranks 4 --how killed|hung --json FILE [matrix overrides]

Ranks run steps on random weights, as a cell of the matrix does, under the launcher that every run has. A killed rank
gets SIGKILL; a hung one SIGSTOP, so that it neither answers nor goes. The others must leave: at once, or within
--timeout and what the launcher takes to end what is left. Exit code 1 where they do not, or where no rank is named.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

sys.path.insert(0, str(Path(__file__).parent.parent))

from points import keep

from h3dist.matrix.cells import Planned
from h3dist.matrix.config import compose_matrix
from h3dist.matrix.prepare import Matrix, prepare
from h3dist.processes import GRACE_SECONDS, Outcome, launch_ranks
from h3dist.status import load_all
from h3dist.torchrun import run_folder

SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}
SLACK = 10.0  # seconds beyond a time limit: roll call, the launcher's grace
LIMIT = 420.0  # for all of it


class Blow:
    """Strikes one rank as soon as all have been denoising for a while; knows when."""

    def __init__(self, status_dir: Path, ranks: int, victim: int, number: int, settled: float) -> None:
        self.struck: float | None = None
        self._over, self._pid = False, 0
        args = (status_dir, ranks, victim, number, settled)
        self._thread = Thread(target=self._wait, args=args, daemon=True)
        self._thread.start()

    def _wait(self, status_dir: Path, ranks: int, victim: int, number: int, settled: float) -> None:
        while not self._over:
            time.sleep(0.1)
            found = load_all(status_dir, ranks)
            if len(found) == ranks and all(status.stage == "denoise" for status in found):
                time.sleep(settled)
                self._pid, self.struck = found[victim].pid, time.monotonic()
                os.kill(self._pid, number)
                return

    def end(self) -> None:
        """No blow after this."""
        self._over = True
        self._thread.join()


def strike(matrix: Matrix, planned: Planned, how: str, settled: float) -> tuple[Outcome, float | None]:
    """Run a cell and strike its last rank; how it ended, and seconds from the blow until no process was left."""
    folder, ranks = run_folder(), planned.cell.ranks
    start = matrix.start([planned], folder, None)
    blow = Blow(folder / "status", ranks, ranks - 1, SIGNALS[how], settled)
    try:
        outcome = launch_ranks(
            start.command, folder / "status", ranks, start.parts, environ=start.environ,
            log=folder / "torchrun.log", limit=LIMIT,
        )  # fmt: skip
        gone = time.monotonic()
    finally:
        blow.end()
        shutil.rmtree(folder, ignore_errors=True)
    return outcome, gone - blow.struck if blow.struck else None


def main() -> int:
    """Strike once and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--how", choices=tuple(SIGNALS), required=True)
    parser.add_argument("--timeout", type=float, default=20, help="seconds of a collective")
    parser.add_argument("--settled", type=float, default=2, help="seconds of steps before the blow")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("words", nargs="*", help="of a matrix: shapes=[...] size=small runtime.device=cpu")
    args = parser.parse_args()
    axes = [f"worlds=[{args.ranks}]", "layouts=[ulysses]", "request.steps=200", f"runtime.timeout={args.timeout}"]
    config, words = compose_matrix(["matrix=smoke", *axes, *args.words])
    with tempfile.TemporaryDirectory() as folder:
        matrix = prepare(config, words, Path(folder, "m.json"))
        (planned,) = matrix.cells
        if planned.reason:
            print(f"{args.how}: skipped, {planned.reason}")
            return 0
        outcome, seconds = strike(matrix, planned, args.how, args.settled)
    return told(args, matrix, planned, outcome, seconds)


def told(args: argparse.Namespace, matrix: Matrix, planned: Planned, outcome: Outcome, seconds: float | None) -> int:
    """Keeps the point; says whether it went as it should."""
    message = outcome.cause.message if outcome.cause else "no cause"
    bound = (args.timeout if args.how == "hung" else 0) + GRACE_SECONDS + SLACK
    named = bool(re.search(rf"rank {args.ranks - 1}\b", message)) or (
        outcome.cause and outcome.cause.rank == args.ranks - 1
    )
    good = seconds is not None and seconds <= bound and outcome.exit_code != 0 and bool(named) and not outcome.overdue
    point = {
        "hardware": planned.cell.settings["device"],
        "ranks": args.ranks,
        "layout": f"a rank {args.how}",
        "shape": str(planned.cell.shape),
        "total_seconds": round(seconds or LIMIT, 2),
        "note": f"over {matrix.backend}: all gone {seconds or LIMIT:.1f} s later (bound {bound:g}), {message}",
    }
    title = "A rank killed or hung in the middle of its steps: seconds until all are gone"
    keep(args.json, title, point, time_limit_of_a_collective=f"{args.timeout:g} s")
    print(
        f"a rank {args.how}: {'good' if good else 'NOT AS IT SHOULD'}: exit code {outcome.exit_code}, {point['note']}"
    )
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
