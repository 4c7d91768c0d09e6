"""Files to and from a pod: a tar stream, and SHA-256 on both sides for every file."""

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO

from h3dist.cloud.failures import CloudError
from h3dist.cloud.ssh import Ssh, end, quote
from h3dist.errors import OutputError

BLOCK = 1 << 20


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def push(ssh: Ssh, files: Iterable[tuple[Path, str]], target: str) -> int:
    """Copy local files to paths under `target` on the pod, and check every one there. Returns the count.

    Raises OutputError when the pod's disk is full, CloudError when a checksum differs.
    """
    pairs = [(path, _safe(name)) for path, name in files]
    with tempfile.TemporaryFile() as packed:
        _pack(packed, pairs)
        process = ssh.start(f"mkdir -p {quote(target)} && tar -xof - -C {quote(target)}", packed)
        try:
            _, errors = ssh.talk(process, None, f"push to {target}", None)
        finally:
            end(process)
    ssh.judge(f"push to {target}", process.returncode, errors)
    wanted = {name: sha256(path) for path, name in pairs if path.is_file()}
    _compare(wanted, remote_sums(ssh, target), "push")
    return len(pairs)


def _pack(packed: IO[bytes], pairs: list[tuple[Path, str]]) -> None:
    try:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for path, name in pairs:
                tar.add(path, arcname=name, recursive=False)
        packed.seek(0)
    except OSError as error:
        raise OutputError(f"cannot pack the files to send: {error}") from None


def remote_sums(ssh: Ssh, folder: str, only: str = "") -> dict[str, str]:
    """SHA-256 of every regular file under a folder of the pod, by relative path; `only` is a find test."""
    find = f"find . -type f {only} -print0 | xargs -0 -r sha256sum -z --"
    text = ssh.run(f"checksums of {folder}", f"cd {quote(folder)} && {find}")
    lines = [line for line in text.split("\0") if line]
    return {_safe(line[66:]): line[:64] for line in lines}


def fetch(ssh: Ssh, folder: str, target: Path, only: str = "", settled: bool = True) -> dict[str, str]:
    """Copy every file under a folder of the pod to `target`; each replaces its namesake only when it is right.

    `settled=False` is for a run that goes on: a file that changes meanwhile is left out, not an error.
    Returns the checksums of what was written. Raises OutputError when this disk is full.
    """
    for _ in range(2):
        wanted = remote_sums(ssh, folder, only)
        try:
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target) as scratch:
                _unpack(ssh, folder, list(wanted), Path(scratch))
                right = {name: digest for name, digest in wanted.items() if _is(Path(scratch) / name, digest)}
                for name in right:
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(Path(scratch) / name, target / name)
        except OSError as error:
            raise OutputError(f"cannot write the results to {target}: {error.strerror or error}") from None
        if right == wanted or not settled:
            return right
    _compare(wanted, right, "fetch")
    raise AssertionError("unequal sums compare as unequal")


def _unpack(ssh: Ssh, folder: str, names: list[str], scratch: Path) -> None:
    """Stream the named files into `scratch`. Nothing outside it is written, whatever the stream says."""
    if not names:
        return
    with (scratch / ".tar").open("wb") as packed, tempfile.TemporaryFile(dir=scratch) as listed:
        _write(listed, b"".join(name.encode() + b"\0" for name in names))
        listed.seek(0)
        command = f"cd {quote(folder)} && tar --null --no-recursion -cf - -T -"
        ssh.pump(f"fetch from {folder}", command, lambda block: _write(packed, block), stdin=listed)
    with tarfile.open(scratch / ".tar") as tar:
        tar.extractall(scratch, members=(m for m in tar if m.isfile()), filter="data")
    (scratch / ".tar").unlink()


def _write(file: IO[bytes], block: bytes) -> None:
    file.write(block)
    file.flush()  # a full disk is an error here, not when the file is closed


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path) == digest


def _safe(name: str) -> str:
    """A relative path without `..`. Raises CloudError for any other, for it could leave the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise CloudError(f"refusing the path {name!r}: it leaves its folder")
    return str(path)


def _compare(wanted: dict[str, str], found: dict[str, str], what: str) -> None:
    wrong = [name for name, digest in wanted.items() if found.get(name) != digest]
    if wrong:
        raise CloudError(f"{what}: the checksum differs for {len(wrong)} files: {', '.join(wrong[:5])}")


def writable_folder(path: Path) -> None:
    """See that results can be written, before any money is spent. Raises OutputError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
        if shutil.disk_usage(path).free < 1 << 20:
            raise OutputError(f"less than 1 MiB is free in {path}")
    except OSError as error:
        raise OutputError(f"cannot write to {path}: {error.strerror}") from None
