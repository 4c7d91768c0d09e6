"""What a matrix was measured on: versions, GPUs, host, the variables that steer NCCL, the commit."""

import os
import platform
from collections.abc import Mapping
from typing import Any

import h3dist
from h3dist.errors import H3Error
from h3dist.provenance import version_of, versions_of
from h3dist.topology import Topology, cores, read_topology

PACKAGES = ("torch", "comfy-kitchen", "diffusers", "safetensors", "numpy")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_", "CUDA_", "OMP_", "PYTORCH_")
SAME_MACHINE = ("h3dist", "gpus", "torch", "cuda", "nccl", "driver", "arch", "cores")  # of one file's cells


def environment(topology: Topology | None, gpus: list[str]) -> dict[str, Any]:
    """Versions and settings that decide the figures; `gpus` are the names of the visible devices."""
    return {
        "h3dist": h3dist.__version__,
        "python": platform.python_version(),
        "packages": versions_of(PACKAGES),
        **_torch(bool(gpus)),
        "driver": topology.driver if topology else None,
        "gpus": gpus,
        "os": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "cores": cores(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def topology_or_none() -> tuple[Topology | None, str | None]:
    """This machine's topology, or why it cannot be read; the measurement goes on without."""
    try:
        return read_topology(), None
    except H3Error as error:
        return None, str(error)


def difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    """The first thing that makes two environments' figures incomparable, in words; None if there is none."""
    for name in SAME_MACHINE:
        if now.get(name) != before.get(name):
            return f"{name} was {before.get(name)} and is {now.get(name)}"
    return None


def _torch(gpus: bool) -> dict[str, Any]:
    """torch's version, and where there are GPUs those of CUDA and NCCL that it was built with."""
    if not gpus:  # importing torch takes seconds
        return {"torch": version_of("torch"), "cuda": None, "nccl": None}
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}
