"""The command that starts the ranks of a run on this machine, and the folder that the run keeps."""

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# torchrun's own log goes to a file, while the ranks that it starts keep the terminal's descriptors.
TORCHRUN = (
    "import sys; sys.stdout = sys.stderr = open(sys.argv.pop(1), 'w', buffering=1); "
    "from torch.distributed.run import main; main()"
)


def torchrun(folder: Path, world: int, module: str, arguments: Sequence[str], *, terminal: bool = True) -> list[str]:
    """The command that starts `module` on `world` ranks of this machine, meeting at a free port.

    Rank 0 keeps the terminal, where there is one for it; the other ranks' output and torchrun's own go to files
    in `folder`. torchrun expands `$` in arguments, so each is doubled to arrive as written.
    """
    redirects = ",".join(f"{rank}:{3 if rank or not terminal else 0}" for rank in range(world))
    options = ["--standalone", f"--nproc-per-node={world}", "--max-restarts=0", f"--redirects={redirects}"]
    start = [sys.executable, "-c", TORCHRUN, str(folder / "torchrun.log"), *options]
    escaped = [argument.replace("$", "$$") for argument in arguments]
    return [*start, f"--log-dir={folder}/logs", "-m", module, *escaped]


def run_folder() -> Path:
    """A fresh private folder for one run's job, status and logs, whose path is legal in an override."""
    parent = tempfile.gettempdir()
    plain = re.fullmatch(r"[A-Za-z0-9_./-]+", parent)
    return Path(tempfile.mkdtemp(prefix="h3dist-", dir=parent if plain else "/tmp"))
