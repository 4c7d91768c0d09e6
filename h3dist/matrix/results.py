"""The JSON of a matrix: held by one matrix at a time, written whole after every cell, distrusted when read."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from h3dist.errors import OutputError

SCHEMA, SCHEMA_VERSION = "h3dist.matrix", 1
CELL_KEYS = {
    "key", "name", "state", "shape", "ranks", "asked", "layout", "attention", "repeat", "settings", "predicted",
}  # fmt: skip
DONE_KEYS = {"seconds", "bytes", "memory", "latents", "parity"}


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keep every other matrix away from the file `path` for as long as this lasts. Raises `OutputError`.

    The lock is the kernel's, so that it ends with the process however that ends.
    """
    lock = path.with_name(f".{path.name}.lock")
    descriptor = _locked(lock, path)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(lock: Path, path: Path) -> int:
    """A descriptor of the lock file that holds it."""
    try:
        while True:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            if _taken(descriptor, lock):
                return descriptor
            os.close(descriptor)
    except BlockingIOError:
        raise OutputError(f"another matrix is at work on {path}; name another file with results=") from None
    except OSError as error:
        raise OutputError(f"cannot write and lock {path}: {error.strerror}") from error


def _taken(descriptor: int, lock: Path) -> bool:
    """Lock an open file. Whether it is still the one of this name: its last holder removes it at the end."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    try:
        return os.fstat(descriptor).st_ino == os.stat(lock).st_ino
    except FileNotFoundError:
        return False


def load(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The document in `path`, or None and why what is there is not one; None and None where nothing is."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        return None, str(error)
    try:
        document = json.loads(text)
    except ValueError as error:
        return None, f"it is no whole JSON file ({error})"
    fault = _fault(document)
    return (None, fault) if fault else (document, None)


def _fault(document: Any) -> str | None:
    """What keeps a JSON value from being a matrix of this version, if anything does."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return f"it is not of the schema {SCHEMA}"
    if document.get("schema_version") != SCHEMA_VERSION:
        return f"it has schema version {document.get('schema_version')}, this is {SCHEMA_VERSION}"
    cells = document.get("cells")
    if not isinstance(cells, list) or not all(map(_whole, cells)) or not isinstance(document.get("environment"), dict):
        return "its cells or its environment are missing or not whole"
    return None


def _whole(cell: Any) -> bool:
    if not isinstance(cell, dict) or CELL_KEYS - cell.keys():
        return False
    return cell["state"] != "done" or cell.keys() >= DONE_KEYS


def set_aside(path: Path, mark: str) -> Path:
    """Rename `path` out of the way, never over another file. Gives its new name."""
    names = (path.with_name(f"{path.name}.{mark}{f'-{n}' if n > 1 else ''}") for n in count(1))
    free = next(name for name in names if not name.exists())
    os.replace(path, free)
    return free


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document whole, then rename it into place. Raises `OutputError`; what stood there then still does."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(document, file, ensure_ascii=False, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
