"""Runs on the pod, with nothing but Python: is each file there, of the right size, with a whole header?

Reads a JSON list of [path, size or null] from standard input, prints a JSON object of path -> what is wrong.
"""

import json
import struct
import sys
from pathlib import Path


def fault(path: Path, size: int | None) -> str:
    """What is wrong with a safetensors file; empty when nothing is."""
    if not path.is_file():
        return "missing"
    have = path.stat().st_size
    if size is not None and have != size:
        return f"{have} bytes instead of {size}"
    if path.suffix != ".safetensors":
        return ""
    with path.open("rb") as file:
        lead = file.read(8)
        length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else 0
        if not 2 <= length <= min(have - 8, 100 << 20):
            return "not a safetensors file (its header's length is wrong)"
        try:
            header = json.loads(file.read(length))
            ends = [value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return "not a safetensors file (its header is no JSON of tensors)"
    if 8 + length + max(ends, default=0) != have:
        return f"cut short or padded: the header speaks of {8 + length + max(ends, default=0)} bytes, not {have}"
    return ""


def main() -> None:
    faults = {path: fault(Path(path), size) for path, size in json.load(sys.stdin)}
    json.dump({path: why for path, why in faults.items() if why}, sys.stdout)


if __name__ == "__main__":
    main()
