"""Which way NCCL will move data between GPUs, as far as topology and environment say: a prediction, no reading.

The rules are NCCL's own, of `ncclTopoCheckP2p` (src/graph/paths.cc) and its documented environment variables: P2P up
to a distance where NVML allows it, else shared memory of the host, else the network.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from h3dist.topology.links import Link
from h3dist.topology.machine import Topology

PATHS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")  # as NCCL orders and names them; to it NODE is PHB
OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")  # NCCL_P2P_LEVEL as a number
CUMEM_DRIVER = 12000  # the first CUDA whose drivers have what P2P/CUMEM needs


@dataclass(frozen=True)
class Transport:
    """What is predicted for each pair: "P2P/CUMEM", "P2P/IPC", "SHM" or "NET". `level`: how far P2P is taken."""

    pairs: dict[tuple[int, int], str]
    level: str
    reason: str  # why that far

    def text(self) -> str:
        """As in "P2P/CUMEM for 2 pairs, SHM for 4"."""
        if not self.pairs:
            return "none: there is no second GPU"
        counts = Counter(self.pairs.values()).most_common()
        first, *others = (f"{name} for {count}" for name, count in counts)
        return ", ".join([f"{first} pair{'s' if counts[0][1] > 1 else ''}", *others])


def predict_transport(topology: Topology, environ: Mapping[str, str]) -> Transport:
    """The transport of a run on all devices of `topology` under `environ`."""
    level, reason = _level(topology, environ)
    shared = "NET" if environ.get("NCCL_SHM_DISABLE") == "1" else "SHM"
    direct = "P2P/CUMEM" if _cumem(topology, environ) else "P2P/IPC"

    def choose(link: Link) -> str:
        near = PATHS.index(path_of(link)) <= PATHS.index(level)
        return direct if near and link.p2p_read and link.p2p_write else shared

    return Transport({(link.a, link.b): choose(link) for link in topology.links}, level, reason)


def path_of(link: Link) -> str:
    """The link in NCCL's words."""
    return "NVL" if link.nvlink else "PHB" if link.kind == "NODE" else link.kind


def read_level(value: str) -> str | None:
    """A value of NCCL_P2P_LEVEL as one of PATHS; None for one that NCCL does not know and ignores."""
    if value in PATHS:
        return value
    return OLD_LEVELS[min(int(value), len(OLD_LEVELS) - 1)] if value.isdecimal() else None


def _level(topology: Topology, environ: Mapping[str, str]) -> tuple[str, str]:
    """How far apart NCCL lets GPUs use P2P, and why."""
    asked = read_level(environ.get("NCCL_P2P_LEVEL", ""))
    if environ.get("NCCL_P2P_DISABLE") == "1":
        return "LOC", "NCCL_P2P_DISABLE=1"
    if asked:
        return asked, f"NCCL_P2P_LEVEL={environ['NCCL_P2P_LEVEL']}"
    if topology.cpu == "AuthenticAMD" and len(topology.devices) <= 2:
        return "SYS", "NCCL's rule for two GPUs on an AMD processor"
    return "PXB", "NCCL's rule: not across a processor's host bridge"


def _cumem(topology: Topology, environ: Mapping[str, str]) -> bool:
    return environ.get("NCCL_CUMEM_ENABLE") != "0" and (topology.cuda_driver or CUMEM_DRIVER) >= CUMEM_DRIVER
