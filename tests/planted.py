"""Cells of a matrix whose ranks do not measure: they crash, hang, or make their figures up.

    python -m planted PART TOLD     # a rank under torchrun; TOLD is the file that a cell's ranks are told by

`planting` puts them into a matrix through the `start` that `run_matrix` takes; no option of the product does.
"""

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

from h3dist import workers
from h3dist.status import DONE, Status
from h3dist.topology import read_ranks

TESTS = Path(__file__).parent


def planting(config, words, parts):
    """How the cells of a matrix start, with `parts` of a play by "LAYOUT RANKS": (part, seconds that it may take).

    "figures", "interrupted" and "lost" are not played by ranks: figures are made up, the matrix gets a SIGINT, the
    command ends without a word. Cells without a part are real; "*" is the part of all that have none.
    """
    from h3dist.matrix.prepare import starter
    from h3dist.torchrun import torchrun

    real = starter(config, words)

    def start(batch, folder, until):
        begun, planned = real(batch, folder, until), batch[0]
        cell = planned.cell
        part, limit = parts.get(f"{cell.asked} {cell.ranks}", parts.get("*", (None, None)))
        if part is None:
            return begun
        if part == "figures":
            for each in batch:
                make_up(each.plan, folder, folder / each.cell.key)
        played = torchrun(folder, cell.ranks, "planted", [part, str(folder / "cell.json")], terminal=False)
        commands = {
            "figures": ["cp", *map(str, folder.glob("rank*.json")), str(folder / "status")],
            "interrupted": ["sh", "-c", "kill -INT $PPID; exec sleep 60"],
            "lost": ["false"],
        }
        environ = {**begun.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
        return replace(begun, command=commands.get(part, played), limit=limit, environ=environ)

    return start


def run_planted(overrides, parts):
    """Run a matrix with planted cells. Gives its exit code."""
    from h3dist.matrix.config import compose_matrix
    from h3dist.matrix.run import run_matrix

    config, words = compose_matrix(overrides)
    return run_matrix(config, words, planting(config, words, parts))


def make_up(plan, folder, home):
    """What the ranks of a plan might have left in `home`, and their last words in `folder`."""
    import numpy
    from safetensors.numpy import save_file

    ranks = plan.layout.world
    reports = [
        {
            "device": "cpu",
            "step_seconds": [1.0] + [0.5 / ranks + 0.001 * rank] * (plan.steps - 1),
            "stages": {"start": 2.0, "load": 3.0 + rank, "denoise": 4.0},
            "sent": share.sent | {"text": 0},
            "peak_memory": 1000 + rank,
            "resident": None,
        }
        for rank, share in enumerate(plan.shares)
    ]
    (home / "result.json").write_text(json.dumps({"plan_digest": plan.digest, "ranks": reports}))
    save_file({"latents": numpy.full(8, 1 + 1e-3 * (plan.layout.tp - 1), "float32")}, home / "latents.safetensors")
    for rank in range(ranks):
        (folder / f"rank{rank}.json").write_text(json.dumps(asdict(Status(rank, pid=1, born=-1, state=DONE))))


def play(part):
    """A rank's part."""
    if part == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif part == "hang":
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock: no thread of this process answers a signal


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[2]).read_text())
    workers.run(lambda: play(sys.argv[1]), read_ranks(), told["status_dir"], [])
