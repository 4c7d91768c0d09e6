"""Run a set of tiny checkpoints through every layout from the command line and compare with expected results.

    python benchmarks/parity.py SET [--layouts single,ulysses:3,hybrid:2x3] [--rel 1e-4] [exchange.variant=hidden ...]

SET holds request.json, overrides.txt (a Hydra override a line, `@` for SET) and expected.safetensors, made by other
software; more overrides come after. Prints a Markdown table: the largest relative error of each tensor, and whether the
bytes that ranks sent and asked of the file are those of the plan. Exit code 1 where anything falls short.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

LAYOUTS = (
    "single,ulysses:2,ulysses:3,ulysses:4,ulysses:6,ulysses:7,ulysses:8,"
    "tensor:2,tensor:4,tensor:6,tensor:8,hybrid:2x2,hybrid:2x3,hybrid:3x2"
)
LEVELS, NEAR = 4, 0.999  # of 255: frames may differ by 4 levels at most, and by more than 1 in few places


def main() -> int:
    """One row a layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--rel", type=float, default=1e-4)
    args = parser.parse_intermixed_args()
    expected = load_file(args.set / "expected.safetensors")
    names = sorted(expected)
    print("| layout | " + " | ".join(names) + " | bytes as planned |", flush=True)
    print("|---" * (len(names) + 2) + "|")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for layout in args.layouts.split(","):
            actual, sidecar = run(args.set.resolve(), layout, Path(folder), args.overrides)
            notes = [judge(expected[name], actual.get(name), args.rel) for name in names]
            planned = all(row["sent"]["planned"] == row["sent"]["counted"] for row in sidecar["ranks"])
            planned &= all(row["file_bytes"]["planned"] == row["file_bytes"]["counted"] for row in sidecar["ranks"])
            good &= planned and not any(note.startswith("BAD") for note in notes)
            print(f"| {layout} | " + " | ".join(notes) + f" | {'yes' if planned else 'NO'} |", flush=True)
    return 0 if good else 1


def run(folder: Path, layout: str, out: Path, more: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """One command line of `h3dist generate`; its intermediates and its sidecar."""
    mode, _, size = layout.partition(":")
    sp, _, tp = size.partition("x")
    ranks = int(sp or 1) * int(tp or 1)
    overrides = (folder / "overrides.txt").read_text().replace("@", str(folder)).split("\n")
    degrees = [f"parallel.sp={sp}", f"parallel.tp={tp}"] if tp else []
    command = [sys.executable, "-m", "h3dist", "generate", "--request", str(folder / "request.json")]
    command += ["-o", str(out / "o.mp4"), f"output.intermediates={out}/o.safetensors"]
    command += ["--gpus", str(ranks), "--mode", mode, *degrees, *filter(None, overrides), *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return load_file(out / "o.safetensors"), json.loads((out / "o.json").read_text())


def judge(want: torch.Tensor, got: torch.Tensor | None, limit: float) -> str:
    """How far a tensor is from the expected one, in words; BAD where it is too far."""
    if got is None or got.shape != want.shape:
        return "BAD: missing" if got is None else f"BAD: {list(got.shape)}"
    if want.dtype == torch.uint8:
        distance = (got.int() - want.int()).abs()
        near = (distance <= 1).float().mean().item()
        return f"{'' if near >= NEAR and distance.max() <= LEVELS else 'BAD '}max {distance.max().item()} of 255"
    if not want.is_floating_point():
        return "equal" if torch.equal(got, want) else "BAD: differs"
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return f"{'' if error <= limit else 'BAD '}{error:.1e}"


if __name__ == "__main__":
    sys.exit(main())
