"""What the activation before an FP8 product takes on a GPU: two kernels, and one in several cuts.

    python benchmarks/activation_fp8.py [--rows 38110] [--width 14336] [--json FILE]

Medians of 20 by events, and the bytes that each has to move a second. The last column says whether codes and scales are
those of the two kernels to the bit. `h3dist/model/triton_narrow.py` has one of the cuts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from h3dist.bench.suite import environment
from h3dist.bench.timing import Clock
from h3dist.errors import MissingDependency

WARPS = (4, 8, 16, 32)
REGISTERS = (None, 64)  # of a thread, at most; None: as many as the compiler likes


@dataclass(frozen=True)
class Row:
    """One way: median seconds, bytes that it has to move, and whether it gave what two kernels give."""

    way: str
    seconds: float
    bytes: int
    same: bool | None = None


def main(words: list[str] | None = None) -> int:
    """All ways, as a table and as JSON."""
    args = arguments(words)
    device = torch.device(args.device)
    told = {"rows": args.rows, "width": args.width} | environment(device)
    rows: list[Row] = []
    print("| way | ms | GB/s | same |\n" + "|---" * 4 + "|")
    for row in measured(args.rows, args.width, Clock(device, args.repeats)):
        rows.append(row)
        print(f"| {row.way} | {row.seconds * 1e3:.3f} | {row.bytes / row.seconds / 1e9:.0f} | {row.same} |", flush=True)
        if args.json:
            args.json.write_text(json.dumps(told | {"measured": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


def arguments(words: list[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=38110)
    parser.add_argument("--width", type=int, default=14336)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def measured(g: int, f: int, clock: Clock) -> Iterator[Row]:
    """Two kernels, each alone and one after the other, and one kernel. Raises MissingDependency without triton."""
    try:
        from h3dist.model.triton_kernels import activate, rows_to_fp8
        from h3dist.model.triton_narrow import activate_to_fp8
    except ImportError as error:
        raise MissingDependency(f"these kernels need triton: {error}") from error
    gate_up_g2f = torch.randn((g, 2 * f), device=clock.device).to(torch.bfloat16)
    f_gf = activate(gate_up_g2f)
    due = rows_to_fp8(f_gf)
    count = g * f
    yield Row("activation", clock.time(lambda: activate(gate_up_g2f)).median, 6 * count)
    yield Row("rows to FP8", clock.time(lambda: rows_to_fp8(f_gf)).median, 3 * count)
    yield Row("both", clock.time(lambda: rows_to_fp8(activate(gate_up_g2f))).median, 9 * count)
    for name, work in (("one kernel", partial(activate_to_fp8, gate_up_g2f)), *cuts(gate_up_g2f)):
        found = work()
        yield Row(name, clock.time(work).median, 5 * count, same(found, due))


def cuts(gate_up_g2f: Tensor) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor]]]]:
    """The one kernel with other numbers of warps and registers."""
    import triton

    from h3dist.model.triton_narrow import _activate_to_fp8

    g, f = gate_up_g2f.shape[0], gate_up_g2f.shape[1] // 2
    codes = torch.empty((g, f), dtype=torch.float8_e4m3fn, device=gate_up_g2f.device)
    scales = torch.empty((g, 1), device=gate_up_g2f.device)

    def cut(options: dict[str, int]) -> tuple[Tensor, Tensor]:
        _activate_to_fp8[(g,)](gate_up_g2f, codes, scales, f, WIDTH=triton.next_power_of_2(f), **options)
        return codes, scales

    for registers in REGISTERS:
        for warps in WARPS:
            named = "" if registers is None else f", {registers} registers"
            options = {"num_warps": warps} | ({} if registers is None else {"maxnreg": registers})
            yield f"one kernel, {warps} warps{named}", partial(cut, options)


def same(found: tuple[Tensor, Tensor], due: tuple[Tensor, Tensor]) -> bool:
    """Whether codes and scales are equal to the bit."""
    return torch.equal(found[0].view(torch.uint8), due[0].view(torch.uint8)) and torch.equal(found[1], due[1])


if __name__ == "__main__":
    sys.exit(main())
