"""The GPUs of the machine and those of them that CUDA_VISIBLE_DEVICES shows."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from h3dist.errors import ConfigError
from h3dist.topology.host import Host, read_host
from h3dist.topology.nvml import NOT_SUPPORTED, Nvml, NvmlError, ask_maybe, driver

MIG_ENABLED = 1
NUMA_WORDS, NUMA_SCOPE_NODE = 4, 0  # 64 nodes a word


@dataclass(frozen=True)
class Device:
    """One GPU, or one MIG slice of it, as NVML sees it. Memory in bytes; free: what no process holds now."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    index: int  # among the machine's GPUs, in PCI order, whatever CUDA_VISIBLE_DEVICES says
    name: str
    memory_total: int
    memory_free: int
    capability: tuple[int, int]
    uuid: str  # "GPU-..." or "MIG-..."
    slices: tuple["Device", ...] = field(default=(), repr=False)  # of a GPU in MIG mode
    unified: bool = False  # it has no memory of its own: the host's is counted
    bus_id: str = ""  # as in "0000:17:00.0"
    pcie_gen: int | None = None  # what slot and card can do together; while idle they may run slower
    pcie_width: int | None = None
    numa: int | None = None


def auto_world(device: str) -> int:
    """Ranks that `--gpus auto` starts for `runtime.device`: one a visible GPU, 1 where there is none."""
    return 1 if device == "cpu" else max(1, len(visible_devices()))


def visible_devices() -> tuple[Device, ...]:
    """The GPUs that CUDA would show this process, in its order."""
    return select_visible(devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def select_visible(found: tuple[Device, ...], setting: str | None) -> tuple[Device, ...]:
    """The devices of `found` that a value of CUDA_VISIBLE_DEVICES shows (None: unset), by CUDA's own rules.

    Entries are numbers or beginnings of a uuid that fit one device only. The first that names nothing ("-1",
    "") hides all after it, one device named twice hides everything, and a process sees one MIG slice at most.
    Numbers count in PCI order, which is CUDA's own on a machine of equal GPUs.
    """
    entries = [device.uuid for device in found] if setting is None else setting.split(",")
    chosen: list[Device] = []
    for entry in entries:
        device = _find(found, entry.strip())
        if device is None:
            break
        if device in chosen:
            return ()
        chosen.append(device)
        if device.uuid.startswith("MIG-"):
            break
    return tuple(chosen)


def _find(found: tuple[Device, ...], entry: str) -> Device | None:
    """The one device that an entry names; a GPU in MIG mode stands for its first slice."""
    if entry.startswith("MIG-"):
        fits = [part for device in found for part in device.slices if part.uuid.startswith(entry)]
    elif entry.startswith("GPU-"):
        fits = [device for device in found if device.uuid.startswith(entry)]
    else:
        fits = [device for device in found if entry.isdecimal() and int(entry) == device.index]
    if len(fits) != 1:
        return None
    return fits[0].slices[0] if fits[0].slices else fits[0]


def devices() -> tuple[Device, ...]:
    """All GPUs of the machine in PCI order, with the memory that is free now; none without a driver.

    Raises ConfigError where the driver runs and a GPU does not answer.
    """
    with driver() as nvml:
        return read_devices(nvml, read_host()) if absence(nvml) is None else ()


def absence(nvml: Nvml) -> str | None:
    """Start NVML. Gives why there is none (no driver, no library, no permission), None where it answers."""
    try:
        nvml.ask("nvmlInit")
    except NvmlError as error:
        return error.text
    return None


def read_devices(nvml: Nvml, host: Host) -> tuple[Device, ...]:
    """All GPUs that a started NVML knows. Raises ConfigError where one does not answer."""
    index = 0
    try:
        found = []
        for index in range(nvml.ask("nvmlDeviceGetCount")):
            found.append(_describe(nvml, host, index))
        return tuple(found)
    except NvmlError as error:
        raise ConfigError(f"GPU {index} does not answer: {error.text}; nvidia-smi and dmesg say more") from None


def _describe(nvml: Nvml, host: Host, index: int) -> Device:
    gpu = f"gpu{index}"
    capability = tuple(nvml.ask("nvmlDeviceGetCudaComputeCapability", gpu))
    place = _place(nvml, host, gpu)
    slices = tuple(_device(nvml, host, part, index, capability, place) for part in _mig_slices(nvml, gpu))
    return _device(nvml, host, gpu, index, capability, place, slices)


def _device(
    nvml: Nvml,
    host: Host,
    name: str,
    index: int,
    capability: tuple[int, ...],
    place: dict[str, Any],
    slices: tuple[Device, ...] = (),
) -> Device:
    memory = _memory(nvml, name)
    total, free = (memory["total"], memory["free"]) if memory else (host.memory, host.memory_free)
    title, uuid = nvml.ask("nvmlDeviceGetName", name), nvml.ask("nvmlDeviceGetUUID", name)
    return Device(index, title, total, free, capability, uuid, slices, memory is None, **place)


def _memory(nvml: Nvml, name: str) -> dict[str, int] | None:
    """The GPU's own memory; None for one that has none, such as GB10, which shares the host's."""
    try:
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", name)
    except NvmlError as error:
        if error.code == NOT_SUPPORTED and "." not in name:
            return None
        raise
    return memory if memory["total"] else None


def _place(nvml: Nvml, host: Host, gpu: str) -> dict[str, Any]:
    """Where a GPU sits: its PCI address and link, its NUMA node. What NVML does not know is left out."""
    bus_id = pci_address(ask_maybe(nvml, "nvmlDeviceGetPciInfo", gpu) or "")
    return {
        "bus_id": bus_id,
        "pcie_gen": ask_maybe(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", gpu),
        "pcie_width": ask_maybe(nvml, "nvmlDeviceGetMaxPcieLinkWidth", gpu),
        "numa": host.numa.get(bus_id, _nearest_node(nvml, gpu)),
    }


def pci_address(bus_id: str) -> str:
    """NVML's PCI address as the kernel writes it: "0000:17:00.0"."""
    return re.sub(r"^0000(?=[0-9a-f]{4}:)", "", bus_id.lower())


def _nearest_node(nvml: Nvml, gpu: str) -> int | None:
    """The NUMA node whose memory is nearest to a GPU, where NVML names exactly one."""
    words = ask_maybe(nvml, "nvmlDeviceGetMemoryAffinity", gpu, NUMA_WORDS, NUMA_SCOPE_NODE) or []
    nodes = [64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def _mig_slices(nvml: Nvml, gpu: str) -> Iterator[str]:
    """Names of a GPU's MIG slices; none where MIG is off or not known to the GPU."""
    mode = ask_maybe(nvml, "nvmlDeviceGetMigMode", gpu)
    if mode is None or mode[0] != MIG_ENABLED:
        return
    for place in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", gpu)):
        if ask_maybe(nvml, "nvmlDeviceGetUUID", f"{gpu}.{place}"):  # places need not be filled in order
            yield f"{gpu}.{place}"
