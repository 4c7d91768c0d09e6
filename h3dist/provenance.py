"""What made a figure or a file: the versions of installed packages, and the commit of this code."""

import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of `packages` that are installed."""
    found = {package: version_of(package) for package in packages}
    return {package: version for package, version in found.items() if version is not None}


def commit(folder: Path | None = None) -> str | None:
    """The git commit of the code, with "+" where files differ from it; None outside a checkout."""
    folder = folder or Path(__file__).parent.parent
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
