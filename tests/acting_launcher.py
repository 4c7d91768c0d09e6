"""A launcher of acting ranks, a process of its own: `python acting_launcher.py SCRATCH PARTS [WORD]...`."""

import shutil
import signal
import sys
import time
from pathlib import Path

from h3dist.launcher import report
from h3dist.processes import launch_ranks
from h3dist.torchrun import run_folder, torchrun

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test run was started from
scratch, parts = Path(sys.argv[1]), sys.argv[2]
world = parts.count(",") + 1
folder = run_folder()
(scratch / "folder").write_text(str(folder))
status_dir = folder / "status"
outcome = launch_ranks(
    torchrun(folder, world, "acting", [str(scratch), str(status_dir), parts, *sys.argv[3:]]),
    status_dir,
    world,
    [str(scratch / "video.part")],
    environ={"OMP_NUM_THREADS": "1"},
    log=folder / "torchrun.log",
)
(scratch / "ended").write_text(str(time.time()))
shutil.copytree(folder / "status", scratch / "status", ignore=shutil.ignore_patterns("lifeline"))
sys.exit(report(outcome, folder, world, verbose=False))
