"""The machine around the GPUs: cores, memory and the container's limits, shared memory, the processor's make."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMORY_FILES = {  # cgroup v2 and v1: the limit, what is used, and in memory.stat what of it is cache
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
UNLIMITED = 1 << 60  # bytes; v1 writes a number near 2^63 for no limit
NVIDIA = "0x10de"  # the PCI vendor


@dataclass(frozen=True)
class Host:
    """Bytes of the host's memory, of what programs may still take of it, of the container's limit, of /dev/shm."""

    memory: int
    memory_free: int
    container_memory_limit: int | None  # None: no limit, or no container
    shm_bytes: int  # 0: there is no /dev/shm
    shm_free: int
    arch: str  # as in "x86_64"
    cpu: str  # the vendor, as in "AuthenticAMD"; "" where unknown
    numa: dict[str, int]  # NUMA node of NVIDIA's devices by PCI address, where known


def read_host() -> Host:
    """This machine now."""
    total = _meminfo(Path("/proc/meminfo"))["MemTotal"]
    shm_bytes, shm_free = shared_memory(total)
    return Host(
        memory=total,
        memory_free=free_host_memory(),
        container_memory_limit=container_memory_limit(),
        shm_bytes=shm_bytes,
        shm_free=shm_free,
        arch=platform.machine(),
        cpu=cpu_vendor(),
        numa=numa_nodes(),
    )


def cores(cgroup: Path = CGROUPS / "cpu.max") -> int:
    """Cores this process may use: its affinity, cut by the container's quota (cgroup v2); at least 1."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return allowed


def free_host_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> int:
    """Bytes of the host's memory that programs may still take, cut by the container's limits.

    Files that are merely cached count as free.
    """
    rooms = (limit - used for limit, used in _limits(cgroup, membership))
    return max(0, min([_meminfo(meminfo)["MemAvailable"], *rooms]))


def container_memory_limit(cgroup: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that the container may take (cgroup v2 or v1); None without a limit."""
    return min((limit for limit, _ in _limits(cgroup, membership)), default=None)


def _meminfo(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def _limits(root: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without cache) of this process's group and of all above it, those that have a limit."""
    for base, own, version in _groups(root, membership):
        folder = base / own.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(base):
                yield from _limit(place, version)


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, str, int]]:
    """Where this process stands in each version's tree that rules memory: its root, the path in it, the version.

    Inside a container the path may be the host's; then only the root exists here, and it is the container's own.
    """
    lines = membership.read_text().splitlines() if membership.exists() else ["0::/"]
    for _, controllers, own in (line.split(":", 2) for line in lines):
        if controllers == "":
            yield root, own, 2
        elif "memory" in controllers.split(","):
            yield root / "memory", own, 1


def _limit(folder: Path, version: int) -> Iterator[tuple[int, int]]:
    limit_file, used_file, cache = MEMORY_FILES[version]
    try:
        limit, used = int((folder / limit_file).read_text()), int((folder / used_file).read_text())
        kinds = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such files, or "max": no limit
        return
    if limit < UNLIMITED:
        yield limit, used - int(kinds[cache])


def shared_memory(memory: int, folder: Path = Path("/dev/shm")) -> tuple[int, int]:
    """Bytes of /dev/shm and those free in it, (0, 0) where there is none; all `memory` where it has no size."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0, 0
    if disk.f_blocks == 0:  # mounted with size=0
        return memory, memory
    return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize


def cpu_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's maker as the kernel writes it; "" where it does not (as on ARM)."""
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("vendor_id"):
            return line.split(":", 1)[1].strip()
    return ""


def numa_nodes(pci: Path = Path("/sys/bus/pci/devices")) -> dict[str, int]:
    """The NUMA node of each of NVIDIA's PCI devices, where the kernel knows it: {"0000:17:00.0": 0}."""
    found = {}
    for folder in pci.iterdir() if pci.is_dir() else ():
        try:
            ours, node = (folder / "vendor").read_text().strip() == NVIDIA, int((folder / "numa_node").read_text())
        except (OSError, ValueError):
            continue
        if ours and node >= 0:
            found[folder.name] = node
    return dict(sorted(found.items()))
