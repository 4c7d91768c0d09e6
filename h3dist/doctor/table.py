"""The links of every pair as a matrix, as `nvidia-smi topo -m` prints them."""

from h3dist.topology import Device, Topology
from h3dist.topology.links import KINDS

GIB = 1 << 30


def matrix(topology: Topology) -> str:
    """One row for each device: its links, its NUMA node, PCIe, memory, name. A line where there is no device."""
    if not topology.devices:
        return f"no GPU ({topology.absence or 'the driver knows none'})"
    indices = [device.index for device in topology.devices]
    rows = [["", *(f"GPU{index}" for index in indices), "NUMA", "PCIe", "free/total GiB", "sm", "name"]]
    for device in topology.devices:
        links = ("X" if index == device.index else topology.link(device.index, index).kind for index in indices)
        rows.append([f"GPU{device.index}", *links, *_place(device)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([*lines, *_legend(topology)])


def _place(device: Device) -> list[str]:
    pcie = f"{device.pcie_gen} x{device.pcie_width}" if device.pcie_gen and device.pcie_width else "-"
    node = "-" if device.numa is None else str(device.numa)
    memory = f"{device.memory_free / GIB:.1f}/{device.memory_total / GIB:.1f}"
    slices = f", {len(device.slices)} MIG slices" if device.slices else ""
    return [node, pcie, memory, "".join(map(str, device.capability)), device.name + slices]


def _legend(topology: Topology) -> list[str]:
    used = {"NV#" if link.nvlink else link.kind for link in topology.links}
    return [f"  {kind} = {meaning}" for kind, meaning in KINDS.items() if kind in used]
