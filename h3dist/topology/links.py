"""How GPUs are joined, pair by pair, in the words of `nvidia-smi topo -m`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from h3dist.errors import ConfigError
from h3dist.topology.gpus import Device, pci_address
from h3dist.topology.nvml import Nvml, NvmlError, ask_maybe

READ, WRITE, NVLINK = 0, 1, 2  # NVML's P2P indices, as plain numbers: the binding's own READ is a tuple
P2P_OK = 0
MAX_NVLINKS = 36
ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t
KINDS = {  # from near to far, with what nvidia-smi says of each
    "NV#": "through # NVLinks (NVL: their number is not known)",
    "PIX": "through one PCIe bridge at most",
    "PXB": "through several PCIe bridges, not through a host bridge",
    "PHB": "through a PCIe host bridge, which is the processor's",
    "NODE": "through the host bridges of one NUMA node",
    "SYS": "through the link between NUMA nodes",
}


@dataclass(frozen=True)
class Link:
    """Devices `a` < `b`, by index. Without NVLink, `kind` says how far up PCIe they meet.

    `nvlinks` are those that are up between the two, even where the driver lets no program use them (then `kind` is
    that of PCIe). PCIe generation and width are those of the slower side; what is not known is None.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    a: int
    b: int
    kind: str  # "NV18", "NVL" or a key of KINDS
    p2p_read: bool
    p2p_write: bool
    nvlinks: int = 0
    pcie_gen: int | None = None
    pcie_width: int | None = None
    numa_a: int | None = None
    numa_b: int | None = None

    @property
    def nvlink(self) -> bool:
        """Whether programs move data over NVLink."""
        return self.kind.startswith("NV")

    @property
    def distance(self) -> int:
        """0 for NVLink, 1 to 5 for PIX to SYS."""
        return 0 if self.nvlink else list(KINDS).index(self.kind)


def read_links(nvml: Nvml, found: Sequence[Device]) -> tuple[Link, ...]:
    """The link of every pair, in order. Raises ConfigError where NVML fails to answer."""
    gpus = {device.bus_id for device in found if device.bus_id}
    try:
        remotes = {device.index: _remotes(nvml, device.index) for device in found}
        return tuple(_link(nvml, a, b, remotes, gpus) for a, b in combinations(found, 2))
    except NvmlError as error:
        raise ConfigError(f"NVML does not tell the GPUs' links: {error.text}") from None


def _link(nvml: Nvml, a: Device, b: Device, remotes: dict[int, list[str]], gpus: set[str]) -> Link:
    nvlinks = min(_count(remotes[a.index], b.bus_id, gpus), _count(remotes[b.index], a.bus_id, gpus))
    read, write, nvlink = (_p2p(nvml, a.index, b.index, index) for index in (READ, WRITE, NVLINK))
    pcie = _ancestor(nvml, a.index, b.index)
    return Link(
        a=a.index,
        b=b.index,
        kind=(f"NV{nvlinks}" if nvlinks else "NVL") if nvlink else pcie,
        p2p_read=read,
        p2p_write=write,
        nvlinks=nvlinks,
        pcie_gen=_least(a.pcie_gen, b.pcie_gen),
        pcie_width=_least(a.pcie_width, b.pcie_width),
        numa_a=a.numa,
        numa_b=b.numa,
    )


def _remotes(nvml: Nvml, gpu: int) -> list[str]:
    """What each NVLink of a GPU that is up leads to, by PCI address; "" where that is not told."""
    remotes = []
    for number in range(MAX_NVLINKS):
        state = ask_maybe(nvml, "nvmlDeviceGetNvLinkState", f"gpu{gpu}", number)
        if state is None:  # it has no more
            break
        if state:
            far = ask_maybe(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", f"gpu{gpu}", number)
            remotes.append(pci_address(far or ""))
    return remotes


def _count(remotes: Sequence[str], peer: str, gpus: set[str]) -> int:
    """NVLinks to a peer: those that lead to it, else all that lead to a switch, which joins everyone."""
    return remotes.count(peer) or sum(remote not in gpus for remote in remotes)


def _p2p(nvml: Nvml, a: int, b: int, index: int) -> bool:
    """Whether both ways are open."""
    ways = ((f"gpu{a}", f"gpu{b}"), (f"gpu{b}", f"gpu{a}"))
    return [ask_maybe(nvml, "nvmlDeviceGetP2PStatus", *way, index) for way in ways] == [P2P_OK, P2P_OK]


def _ancestor(nvml: Nvml, a: int, b: int) -> str:
    """The kind of PCIe link; the farthest where NVML does not know, as for MIG and some virtual machines."""
    level: Any = ask_maybe(nvml, "nvmlDeviceGetTopologyCommonAncestor", f"gpu{a}", f"gpu{b}")
    return ANCESTORS.get(level, "SYS")


def _least(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else min(a, b)
