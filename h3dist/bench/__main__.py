"""One rank of a benchmark: alone in this process, or the module that torchrun starts: `-m h3dist.bench TOLD`.

TOLD is a JSON file: {"spec": ..., "out": FILE, "status_dir": DIR, "threads": a setting}.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from h3dist import workers
from h3dist.bench.spec import Spec
from h3dist.config import Config, RuntimeConfig
from h3dist.topology import Ranks, read_ranks, threads_per_rank


def main() -> None:
    """Do this rank's part."""
    told, ranks = json.loads(Path(sys.argv[1]).read_text(encoding="ascii")), read_ranks()
    workers.run(lambda: work(told, ranks), ranks, told["status_dir"], [])


def work(told: Mapping[str, Any], ranks: Ranks) -> None:
    """Measure; rank 0 writes the record whenever there is more of it."""
    import torch

    from h3dist.bench.suite import Suite
    from h3dist.comm import Comm
    from h3dist.site import pick_device

    spec = Spec.from_dict(told["spec"])
    torch.set_num_threads(threads_per_rank(told["threads"], ranks.local_world))
    layout = spec.layout(ranks.world)
    device = pick_device(Config(runtime=RuntimeConfig(device=spec.device, backend=spec.backend)), ranks)
    with Comm.connect(ranks, layout, device, backend=spec.backend) as comm:

        def keep(record: Mapping[str, Any]) -> None:
            if ranks.rank == 0:
                save(record, Path(told["out"]))

        Suite(spec, layout, comm, device, keep).run()
        comm.agree("the end")


def save(record: Mapping[str, Any], path: Path) -> None:
    """Write a record under a temporary name and rename it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


if __name__ == "__main__":
    main()
