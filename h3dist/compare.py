"""Say where two files of tensors part: latents, intermediates or traces of two runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from h3dist.errors import RequestError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Difference:
    """How one tensor differs between two files; `relative` is |a - b| / |a| in the 2-norm, None where shapes differ."""

    name: str
    note: str
    equal: bool
    relative: float | None = None


def compare_files(first: Path | str, second: Path | str) -> tuple[str, bool]:
    """Compare two safetensors files tensor by tensor, in the order of the run (trace steps by number).

    Gives a table and whether all tensors are equal to the last bit. A trace names the first step that differs.
    Raises `RequestError` where a file cannot be read as safetensors.
    """
    differences = list(_differences(_load(first), _load(second)))
    lines = [f"{d.name:24} {d.note}" for d in differences]
    parted = [d.name for d in differences if not d.equal]
    lines.append(f"first difference: {parted[0]}" if parted else "every tensor is equal to the last bit")
    return "\n".join(lines), not parted


def _load(path: Path | str) -> "dict[str, torch.Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise RequestError(
            f"cannot read {path} as a safetensors file: {error}; what is compared are files that output.latents, "
            "output.intermediates or output.trace named"
        ) from error


def _differences(first: "dict[str, torch.Tensor]", second: "dict[str, torch.Tensor]") -> Iterator[Difference]:
    for name in sorted(first.keys() | second.keys(), key=_run_order):
        if name not in first or name not in second:
            yield Difference(name, f"only in the {'second' if name in second else 'first'} file", equal=False)
        else:
            yield _difference(name, first[name], second[name])


def _run_order(name: str) -> tuple[int, str]:
    """Conditioning, then the trace step by step, then the final latents, then what was decoded from them."""
    stages = (
        "text_",
        "position_ids",
        "token_tags",
        "condition_",
        "step.",
        "video_latents",
        "audio_latents",
        "frames",
        "audio",
    )
    return next((i for i, prefix in enumerate(stages) if name.startswith(prefix)), len(stages)), name


def _difference(name: str, a: "torch.Tensor", b: "torch.Tensor") -> Difference:
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        note = f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
        return Difference(name, note, equal=False)
    if torch.equal(a, b):
        return Difference(name, "equal", equal=True, relative=0.0)
    a64, b64 = a.double(), b.double()
    relative = ((a64 - b64).norm() / a64.norm().clamp_min(1e-300)).item()
    largest = (a64 - b64).abs().max().item()
    return Difference(name, f"relative {relative:.2e}, largest {largest:.2e}", equal=False, relative=relative)
