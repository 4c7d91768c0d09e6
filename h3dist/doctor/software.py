"""Installed packages against what this one requires, and what torch was built for against the GPUs."""

import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from h3dist import __version__
from h3dist.doctor.finding import Finding
from h3dist.provenance import version_of
from h3dist.topology import Topology

TOLD = ("torch", "diffusers", "transformers", "comfy-kitchen", "av", "nvidia-ml-py")


def check_packages(requirements: list[str] | None = None) -> Iterator[Finding]:
    """Every requirement of h3dist (`requirements`, where given), and which extras are complete."""
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires("h3dist") or [] if requirements is None else requirements
    except metadata.PackageNotFoundError:
        yield Finding("packages", "note", "h3dist is not installed as a package, so nothing says what it requires")
        return
    wanted = [Requirement(text) for text in texts]
    plain = [item for item in wanted if "extra" not in str(item.marker or "")]
    faults = [_fault(item) for item in plain]
    for item, fault in zip(plain, faults, strict=True):
        if fault:
            level = "error" if "not installed" in fault else "warning"
            yield Finding("packages", level, fault, f"pip install '{item}'")
    told = ", ".join(f"{name} {version_of(name)}" for name in TOLD if version_of(name))
    fine = f"{faults.count('')} of {len(plain)} packages as required"
    yield Finding("packages", "ok", f"h3dist {__version__}, Python {platform.python_version()}; {fine}: {told}")
    yield _extras(wanted)
    if version_of("pynvml"):
        what = "the package pynvml is deprecated and warns; nvidia-ml-py has its module"
        yield Finding("packages", "note", what, "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py")


def _fault(item: Any) -> str:
    """What is wrong with an installed requirement; empty when nothing is."""
    if item.marker and not item.marker.evaluate():
        return ""
    version = version_of(item.name)
    if version is None:
        return f"{item.name} is not installed; {item} is required"
    return "" if item.specifier.contains(version, prereleases=True) else f"{item.name} {version}; {item} is required"


def _extras(wanted: list[Any]) -> Finding:
    """Extras by whether all that they ask for is here."""
    extras: dict[str, bool] = {}
    for item in wanted:
        found = re.search(r"extra == ['\"]([\w-]+)['\"]", str(item.marker or ""))
        if found:
            extras[found[1]] = extras.get(found[1], True) and version_of(item.name) is not None
    have, lack = ([name for name, whole in sorted(extras.items()) if whole is there] for there in (True, False))
    told = f"extras complete: {', '.join(have) or 'none'}; not installed: {', '.join(lack) or 'none'}"
    return Finding("packages", "note" if lack else "ok", told, "pip install 'h3dist[NAME]'" if lack else "")


def check_torch(facts: Mapping[str, Any], shown: Topology, device: str) -> Iterator[Finding]:
    """What the torch child told in `facts`, against the GPUs that should be visible."""
    gpus = () if device == "cpu" else shown.devices
    told = f"torch {facts['torch']}, " + (
        f"CUDA {facts['cuda']}, NCCL {facts['nccl']}, cuDNN {facts['cudnn']}" if facts["cuda"] else "built without CUDA"
    )
    if gpus and not facts["cuda"]:
        yield Finding("torch", "error", f"{told}, and there are GPUs", "install a CUDA build: pip install torch")
    elif gpus and not facts["available"]:
        yield Finding("torch", "error", f"{told}: it cannot use the GPUs", _unavailable(facts, shown))
    elif gpus and facts["devices"] != len(gpus):
        what = f"{told}: it finds {facts['devices']} GPUs where {len(gpus)} should be visible"
        yield Finding("torch", "warning", what, "compare nvidia-smi -L with CUDA_VISIBLE_DEVICES")
    else:
        yield Finding("torch", "ok", told)
    for capability in sorted({gpu.capability for gpu in gpus if facts["cuda"]}):
        if not runs_on(facts["archs"], capability):
            what = f"this torch has no kernels for compute capability {'.'.join(map(str, capability))}"
            have = ", ".join(facts["archs"])
            yield Finding("torch", "error", f"{what}, only {have}", "install a newer CUDA build of torch")


def _unavailable(facts: Mapping[str, Any], shown: Topology) -> str:
    major, minor = map(int, facts["cuda"].split(".")[:2])
    if shown.cuda_driver and shown.cuda_driver // 1000 < major:
        return (
            f"driver {shown.driver} is too old for CUDA {major}.{minor}: update it, or install torch for an older one"
        )
    return "with NVSwitch, start nvidia-fabricmanager; in a container, check that /dev/nvidia* are there"


def runs_on(archs: list[str], capability: tuple[int, int]) -> bool:
    """Whether kernels for `archs` ("sm_90", "compute_90", ...) run on a GPU: its generation's, or PTX."""
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = re.match(r"\d+", number)
        built = divmod(int(digits[0]), 10) if digits else (0, 0)
        specific = not number.isdecimal()  # "sm_90a" runs on 9.0 alone
        if kind == "sm" and (built == capability if specific else built[0] == capability[0] and built <= capability):
            return True
        if kind == "compute" and not specific and built <= capability:
            return True
    return False
