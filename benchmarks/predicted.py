"""DISTRIBUTED.md's predicted tables: seconds of an evaluation under Ulysses by the cost model, and what auto takes.

    python benchmarks/predicted.py

Random prompt of 400 tokens, bfloat16; flash4 on H200, FP4 products on RTX PRO 6000. No GPU is needed.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from h3dist.bench.spec import Clip, parse_shape
from h3dist.plan import Layout, fp4_linears, make_plan, released_dims
from h3dist.plan.choose import Option, Weigher
from h3dist.plan.exchange import open_exchanges
from h3dist.plan.explain import duration
from h3dist.plan.machine import Machine
from h3dist.plan.rates import load_rates

SHAPES = ("864x480x141", "1344x768x124", "1344x768x243")
DEVICES = {"RTX PRO 6000": "sdpa", "H200": "flash4"}
PLAIN = ("heads", "1", "none", "plain", 1, "collective")
OPEN = ("auto", "auto", "none", "plain", 1, "collective")
COPIED = (*OPEN[:5], "auto")
MACHINES = (  # name, device, link (None: as such machines have), numbers of ranks, what is left open
    ("RTX PRO 6000, NODE", "RTX PRO 6000", "NODE", (2, 4, 6, 8), OPEN),
    ("RTX PRO 6000, SYS", "RTX PRO 6000", "SYS", (2, 4, 6, 8), OPEN),
    ("H200, NV18, NCCL", "H200", None, (2, 4, 6, 8), OPEN),
    ("H200, NV18, `transport=auto`", "H200", None, (2, 4, 6, 8), COPIED),
)


def main() -> None:
    """Print both tables."""
    print("| GPUs | " + " | ".join(f"{device}: {shape}" for device in DEVICES for shape in SHAPES) + " |")
    for ranks in (1, 2, 4, 6, 8):
        told = (gain(device, shape, option(device, ranks, shape, PLAIN)) for device in DEVICES for shape in SHAPES)
        print(f"| {ranks} | " + " | ".join(told) + " |")
    print("\n| GPUs, links | " + " | ".join(f"{shape}: before | after | by" for shape in SHAPES) + " |")
    for name, device, link, counts, words in MACHINES:
        for ranks in counts:
            told = [cells(device, ranks, shape, words, link) for shape in SHAPES]
            print(f"| {ranks} x {name} | " + " | ".join(told) + " |")


def cells(device: str, ranks: int, shape: str, words: tuple, link: str | None) -> str:
    """Before, after, and the exchange taken."""
    before, after = (option(device, ranks, shape, each, link) for each in (PLAIN, words))
    return " | ".join([gain(device, shape, before), gain(device, shape, after), after.plan.exchange.brief])


def gain(device: str, shape: str, found: Option) -> str:
    """Seconds, and the speed-up over one rank."""
    one = option(device, 1, shape, PLAIN).seconds
    speedup = f" ({one / found.seconds:.2f}x)" if found.layout.world > 1 else ""
    return f"{duration(found.seconds).removesuffix(' s')}{speedup or ' s'}"


def option(device: str, ranks: int, shape: str, words: tuple, link: str | None = None) -> Option:
    """Ulysses on so many GPUs of a class, the best of the exchanges that `words` leave open."""
    table = load_rates()
    rates = table.named(device)
    fp4, amax = fp4_linears(released_dims(), None, rates.capability, "bfloat16")
    options = {"dtype": "bfloat16", "attention": DEVICES[device], "steps": 12, "fp4": fp4, "amax": amax}
    plan = make_plan(Clip(parse_shape(shape)), released_dims(), 400, Layout(sp=ranks), **options)
    machine = Machine.imagined(ranks, rates, rates.memory or 0)
    if link:
        node = {"numa_a": 0, "numa_b": 0} if link == "NODE" else {}
        machine = replace(machine, links=tuple(replace(each, kind=link, **node) for each in machine.links))
    return Weigher(plan, machine, table, open_exchanges(*words)).option(plan.layout)


if __name__ == "__main__":
    main()
