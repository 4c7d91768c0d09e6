"""What this process stands on: its rank, the machine's cores, its GPUs and their memory.

The only reader of the variables that torchrun and CUDA use (`RANK`, `CUDA_VISIBLE_DEVICES`, their kin), and
the only user of NVML. Imports no torch: a planner and a launcher must not pay for it.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h3dist.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process among all of a run: counts are at least 1, ranks start at 0."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    local_world: int = 1
    rendezvous: bool = False  # MASTER_ADDR and MASTER_PORT say where the ranks meet
    elastic: bool = False  # a torchrun agent started this process and waits for it


@dataclass(frozen=True)
class Device:
    """One GPU, or one MIG slice of it, as NVML sees it. Memory in bytes; free: what no process holds now."""

    index: int  # among the machine's GPUs, in PCI order, whatever CUDA_VISIBLE_DEVICES says
    name: str
    memory_total: int
    memory_free: int
    capability: tuple[int, int]
    uuid: str  # "GPU-..." or "MIG-..."
    slices: tuple["Device", ...] = field(default=(), repr=False)  # of a GPU in MIG mode


def read_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The rank variables as torchrun sets them; a process without them is rank 0 of 1.

    Raises `ConfigError` where they are no numbers, contradict each other, or name no place to meet.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, local_rank, world, local_world = (
        _count(name, environ.get(name, default)) for name, default in zip(names, "0011", strict=True)
    )
    if rank >= world or local_rank >= local_world or local_world > world:
        shown = ", ".join(f"{name}={environ.get(name, 'unset')}" for name in names)
        raise ConfigError(f"the rank variables contradict each other: {shown}")
    rendezvous = "MASTER_ADDR" in environ and "MASTER_PORT" in environ
    if world > 1 and not rendezvous:
        raise ConfigError(f"WORLD_SIZE={world} without MASTER_ADDR and MASTER_PORT; torchrun sets all")
    return Ranks(rank, local_rank, world, local_world, rendezvous, "TORCHELASTIC_RUN_ID" in environ)


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment is no number; torchrun sets it")
    return int(text)


def cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity, cut by the container's quota (cgroup v2); at least 1."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return allowed


def free_host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of the host's memory that programs may still take, cut by the container's limit (cgroup v2).

    Files that are merely cached count as free.
    """
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such files, or "max": no limit
        return available
    return max(0, min(available, limit - used + int(kinds["inactive_file"])))


def threads_per_rank(setting: str, local_world: int) -> int:
    """CPU threads for each of `local_world` ranks: `runtime.threads`, where "auto" shares out the cores.

    Raises `ConfigError` for a setting that is neither "auto" nor a whole number of at least 1.
    """
    if setting == "auto":
        return max(1, cores() // local_world)
    if not setting.isdecimal() or int(setting) < 1:
        raise ConfigError(f"runtime.threads={setting}: must be auto or a whole number, 1 or more")
    return int(setting)


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
    """All GPUs of the machine in PCI order, with the memory that is free now; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, no library, or no permission: a machine without GPUs for us
        return ()
    try:
        return tuple(_describe(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _describe(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    slices = tuple(_device(nvml, part, index, capability) for part in _mig_handles(nvml, handle))
    return _device(nvml, handle, index, capability, slices)


def _device(
    nvml: Any, handle: Any, index: int, capability: tuple[int, int], slices: tuple[Device, ...] = ()
) -> Device:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return Device(index, name, memory.total, memory.free, capability, uuid, slices)


def _mig_handles(nvml: Any, handle: Any) -> Iterator[Any]:
    """NVML handles of a GPU's MIG slices; none where MIG is off or not known to the GPU."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
    except nvml.NVMLError:
        return
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except nvml.NVMLError:  # places need not be filled in order
            continue
