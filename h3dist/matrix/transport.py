"""By what way ranks moved tensors, from NCCL's own account."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\] (?:\[\w+\] )?via (\S+)")
VERSION = re.compile(r"NCCL version (\d[\w.+]*)")


def transport(folder: Path, backend: str, ranks: int) -> dict[str, Any]:
    """The backend, and from NCCL's files in `folder` how many channels go by each way, as in {"P2P/CUMEM": 32}.

    A backend of None: there was one rank. No channels: NCCL wrote elsewhere, as NCCL_DEBUG asked it to.
    """
    if ranks == 1:
        return {"backend": None, "nccl": None, "channels": {}}
    told = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*")))
    found = VERSION.search(told)
    return {
        "backend": backend,
        "nccl": found[1] if found else None,
        "channels": dict(sorted(Counter(CHANNEL.findall(told)).items())),
    }
