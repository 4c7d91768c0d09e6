"""Do two cells end in the same latents? By hash, and by how far they are apart."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h3dist.errors import OutputError
from h3dist.matrix.scaling import done, family

if TYPE_CHECKING:
    import numpy


def read_latents(path: Path) -> "numpy.ndarray[Any, Any]":
    """All latents of a run in one flat f32 array: of random weights as they stand, of a clip video, then audio.

    Raises `OutputError`.
    """
    import numpy
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot read the latents {path}: {error}") from error
    names = ["latents"] if "latents" in tensors else ["video_latents", "audio_latents"]
    return numpy.concatenate([tensors[name].ravel() for name in names])


def fingerprint(path: Path) -> str:
    """SHA-256 of the latents as float32."""
    return hashlib.sha256(read_latents(path).tobytes()).hexdigest()


def relative_error(found: Path, wanted: Path) -> float:
    """|found - wanted| / |wanted| in the 2-norm."""
    import numpy

    a, b = (read_latents(path).astype("float64") for path in (found, wanted))
    if a.shape != b.shape:
        raise OutputError(f"the latents {found} and {wanted} differ in size: {a.size} and {b.size}")
    return float(numpy.linalg.norm(a - b) / max(numpy.linalg.norm(b), 1e-300))


def compare(record: dict[str, Any], cells: list[dict[str, Any]], folder: Path, kept: Path, *, save: bool) -> None:
    """Fill in a done cell's latents' hash, and how far they are from the first of the same shape and settings.

    The latents lie in `folder`. They move to the folder `kept` if they are to be saved; if not, only those of the
    first cell do, for the others to be held against. Raises `OutputError`.
    """
    own, target = folder / "latents.safetensors", kept / f"{record['key']}.safetensors"
    first = _first(record, cells)
    record["latents"] = {"sha256": fingerprint(own), "file": f"{kept.name}/{target.name}" if save else None}
    equal = record["latents"]["sha256"] == first["latents"]["sha256"]
    record["parity"] = {
        "reference": first["key"],
        "equal": equal,
        "relative_error": 0.0 if equal else _distance(own, kept / f"{first['key']}.safetensors"),
    }
    if save or first is record:
        _move(own, target)


def _first(record: dict[str, Any], cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The cell that all of one shape and settings are held against: the first that got done, maybe this one."""
    same = (cell for cell in done(cells) if cell is not record and family(cell) == family(record))
    return next((cell for cell in same if cell["parity"]["reference"] == cell["key"]), record)


def _distance(found: Path, wanted: Path) -> float | None:
    """The relative error, or None where the first cell's latents were not kept."""
    return relative_error(found, wanted) if wanted.is_file() else None


def _move(own: Path, target: Path) -> None:
    try:
        target.parent.mkdir(exist_ok=True)
        part = target.with_suffix(".part")
        shutil.move(own, part)
        os.replace(part, target)
    except OSError as error:
        raise OutputError(f"cannot keep the latents as {target}: {error.strerror}") from error
