"""GPU types that this project is meant for, so that planning needs neither a key nor the network."""

from dataclasses import dataclass

from h3dist.errors import ConfigError, nearest


@dataclass(frozen=True)
class GpuType:
    """`id` is the cloud's own name; memory in GB; `about` dollars an hour for one, a rough upper figure from
    price lists that third parties published in spring 2026, shown as such and never counted with."""

    id: str
    memory_gb: int
    about: float
    note: str = ""


GPU_TYPES = (
    GpuType("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 1.6, "sm120, FP4, PCIe"),
    GpuType("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, 1.6, "sm120, FP4, PCIe"),
    GpuType("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 96, 1.6, "sm120, FP4, PCIe"),
    GpuType("NVIDIA GeForce RTX 5090", 32, 1.3, "sm120, FP4, PCIe"),
    GpuType("NVIDIA B200", 180, 10.6, "sm100, FP4, NVLink"),
    GpuType("NVIDIA H200", 141, 6.4, "sm90, NVLink"),
    GpuType("NVIDIA H200 NVL", 141, 6.4, "sm90"),
    GpuType("NVIDIA H100 80GB HBM3", 80, 4.8, "sm90, NVLink"),
    GpuType("NVIDIA H100 PCIe", 80, 3.6, "sm90, PCIe"),
    GpuType("NVIDIA H100 NVL", 94, 4.8, "sm90"),
)
BY_ID = {gpu.id: gpu for gpu in GPU_TYPES}


def gpu_type(name: str) -> GpuType:
    """The type of this id, or the only one that contains `name` ("5090", "B200").

    Raises ConfigError when none or several do; a type that is new to us is taken by its whole id, which
    begins with a maker's name.
    """
    if name in BY_ID:
        return BY_ID[name]
    found = [gpu for gpu in GPU_TYPES if name.lower() in gpu.id.lower()]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"--gpu {name!r} could be any of: {'; '.join(gpu.id for gpu in found)}")
    if name.startswith(("NVIDIA ", "AMD ", "Tesla ")):
        return GpuType(name, 0, 0.0, "not known here")
    raise ConfigError(f"--gpu {name!r}: no such GPU type{nearest(name, BY_ID)}; see `runpod/pod.py offers`")
