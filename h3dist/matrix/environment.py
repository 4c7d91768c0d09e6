"""What a matrix was measured on: versions, GPUs, host, the variables that steer NCCL, the commit."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import h3dist
from h3dist.errors import H3Error
from h3dist.topology import Topology, cores, read_topology

PACKAGES = ("torch", "comfy-kitchen", "diffusers", "safetensors", "numpy")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_", "CUDA_", "OMP_", "PYTORCH_")
SAME_MACHINE = ("h3dist", "gpus", "torch", "cuda", "nccl", "driver", "arch", "cores")  # of one file's cells


def environment(topology: Topology | None, gpus: list[str]) -> dict[str, Any]:
    """Versions and settings that decide the figures; `gpus` are the names of the visible devices."""
    return {
        "h3dist": h3dist.__version__,
        "python": platform.python_version(),
        "packages": _versions(),
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


def commit(folder: Path | None = None) -> str | None:
    """The git commit of the code, with "+" where files differ from it; None outside a checkout."""
    folder = folder or Path(h3dist.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _torch(gpus: bool) -> dict[str, Any]:
    """torch's version, and where there are GPUs those of CUDA and NCCL that it was built with."""
    if not gpus:  # importing torch takes seconds
        return {"torch": version("torch"), "cuda": None, "nccl": None}
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}
