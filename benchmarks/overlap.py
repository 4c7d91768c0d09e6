"""How much of an exchange attention hides, on a link as slow as one likes: real ranks over gloo, no GPU.

    python benchmarks/overlap.py [--ranks 2] [--timer] [--groups 1,2,4,7,8,14] [--ratios 1:2,1:1,2:1] [--realtime]
                                 [--shape 512x320x56] [--json FILE] [--trace FILE]

56 heads of small size, one thread a rank. The link is made slow in the wire alone: the bytes of a move are through
when earlier ones are and bytes / bandwidth have passed, and whoever waits for a move waits until then. What a rank
computes is never held up otherwise. A ratio a:b makes the exchange b / a times as long as attention. `--timer` puts
a timer of attention's length in its place, for more ranks than there are cores. `--realtime` takes the cores from
what else a busy machine does, and lets gloo's threads go before attention, as a network card would; it needs root.
`--trace` writes the last run of each case for chrome://tracing or Perfetto. Exit code 1 where 7 or more groups at 1:1
hide less than GOAL.

    hidden = (attention + exchange - both) / exchange

Prints a Markdown table. Each time is that of the slowest rank, the least of REPEATS.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent.parent))

from h3dist.bench.spec import Clip, parse_shape
from h3dist.comm import Comm, RankExchange
from h3dist.comm.pieces import Pieces
from h3dist.comm.wire import GlooWire, Group
from h3dist.geometry import Geometry
from h3dist.plan import ExchangePlan, Layout, Plan, make_plan, released_dims, split_ragged
from h3dist.topology import Ranks

HEADS, HEAD_DIM = 56, 16
SHAPE, TEXT_ROWS = "512x320x56", 40
REPEATS = 7
GOAL, MANY = 0.8, 7  # the part to be hidden at 1:1 with so many groups, or more

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Link:
    """A port that sends `bandwidth` bytes a second, one move after the other. Notes when each was on its way."""

    bandwidth: float
    events: list[tuple[str, str, float, float]] = field(default_factory=list)  # lane, name, from, until
    free: float = 0.0  # from then on

    def carry(self, label: str, count: int) -> float:
        """Sends `count` bytes; gives the time at which they are through."""
        begun = max(time.perf_counter(), self.free)
        self.free = begun + count / self.bandwidth
        self.events.append(("link", label, begun, self.free))
        return self.free


class SlowWire(GlooWire):
    """A gloo wire whose moves are through when its link has carried them."""

    def __init__(self, group: Group, counted: dict[str, int], link: Link) -> None:
        super().__init__(group, counted)
        self._link = link

    def _start(self, label: str, x: Tensor, pieces: Pieces, *more: Any) -> Callable[[], Tensor]:
        through = self._link.carry(label, (x.numel() - pieces.out[self.group.index]) * x.element_size())
        finish = super()._start(label, x, pieces, *more)

        def wait() -> Tensor:
            theirs = finish()
            time.sleep(max(0.0, through - time.perf_counter()))
            return theirs

        return wait


def plan_of(ranks: int, groups: int = 1, variant: str = "heads", *, shape: Geometry) -> Plan:
    """One block of 56 small heads, Ulysses on so many ranks."""
    dims = replace(released_dims(), heads=HEADS, head_dim=HEAD_DIM, hidden=HEADS * HEAD_DIM, ffn=128, layers=1)
    options = {"dtype": "float32", "attention": "sdpa", "steps": 1, "exchange": ExchangePlan(variant, groups)}
    return make_plan(Clip(shape), dims, TEXT_ROWS, Layout(sp=ranks), **options)


def attend(q_SnD: Tensor, k_SnD: Tensor, v_SnD: Tensor) -> Tensor:
    """Attention over all rows, head by head."""
    q_nSD, k_nSD, v_nSD = (x_SnD.transpose(0, 1) for x_SnD in (q_SnD, k_SnD, v_SnD))
    return scaled_dot_product_attention(q_nSD[None], k_nSD[None], v_nSD[None])[0].transpose(0, 1)


def timer(seconds_a_head: float) -> Attention:
    """What takes as long as attention does, and no core."""

    def wait(q_SnD: Tensor, k_SnD: Tensor, v_SnD: Tensor) -> Tensor:
        time.sleep(seconds_a_head * q_SnD.shape[1])
        return q_SnD

    return wait


def nothing(q_SnD: Tensor, k_SnD: Tensor, v_SnD: Tensor) -> Tensor:
    """No attention: the exchange alone is left."""
    return q_SnD


class Rank:
    """One rank's part: attention alone, the exchange alone, and both."""

    def __init__(self, comm: Comm, plan: Plan, repeats: int) -> None:
        share, D = plan.shares[comm.rank], plan.dims.head_dim
        generator = torch.Generator().manual_seed(comm.rank)
        rows, heads = share.group_rows[1] - share.group_rows[0], share.heads[1] - share.heads[0]
        self.comm, self.plan, self.repeats, self.heads = comm, plan, repeats, heads
        self.qkv = [torch.randn((rows, HEADS, D), generator=generator) for _ in range(3)]
        self.whole = torch.randn((plan.rows, 3, heads, D), generator=generator)  # as it would have come

    def attention(self, work: Attention, groups: int) -> Callable[[], object]:
        """Attention to this rank's heads in groups, with nothing to wait for."""
        spans = split_ragged(self.heads, min(groups, self.heads))
        parts = [self.whole[:, :, start:stop].contiguous().unbind(1) for start, stop in spans]
        return lambda: [work(*part) for part in parts]

    def exchange(self, work: Attention, groups: int, link: Link) -> Callable[[], object]:
        """The exchange in groups over a link with some work, or none, in attention's place."""
        plan = replace(self.plan, exchange=replace(self.plan.exchange, groups=groups))
        group = self.comm._tensors["sp"].group
        exchange = RankExchange(plan, self.comm.rank, None, SlowWire(group, self.comm.counted, link), None)

        def noted(*qkv: Tensor) -> Tensor:
            begun = time.perf_counter()
            out = work(*qkv)
            link.events.append(("attention", f"{qkv[0].shape[1]} heads", begun, time.perf_counter()))
            return out

        def run() -> None:
            link.events.clear()
            exchange.attend(*self.qkv, noted)

        return run

    def seconds(self, *runs: Callable[[], object]) -> list[float]:
        """Of each run the least of the repeats, each of the slowest rank; the runs take turns. Equal on every rank."""
        every = [[self._once(run) for run in runs] for _ in range(self.repeats + 1)]
        told = [json.loads(text) for text in self.comm.collect("seconds", json.dumps(every[1:]))]
        return [min(max(rank[turn][run] for rank in told) for turn in range(self.repeats)) for run in range(len(runs))]

    def _once(self, run: Callable[[], object]) -> float:
        self.comm.agree("a repeat")
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun


def measure(
    comm: Comm, plan: Plan, groups: Sequence[int], ratios: Sequence[str], *, timed: bool, repeats: int = REPEATS,
    seconds: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for every ratio and number of groups, the same on every rank, but for its events.

    `timed`: a timer takes attention's place, of its length or of `seconds` for all of a rank's heads.
    """
    rank = Rank(comm, plan, repeats)
    whole = seconds or rank.seconds(rank.attention(attend, 1))[0]
    work = timer(whole / rank.heads) if timed else attend
    sent = max(share.sent["heads.to"] + share.sent["heads.from"] for share in plan.shares)
    rows = []
    for ratio, count in product(ratios, groups):
        first, second = map(float, ratio.split(":"))
        attention = rank.attention(work, count)
        bandwidth = sent / ((whole if timed else rank.seconds(attention)[0]) * second / first)
        link = Link(bandwidth)
        runs = attention, rank.exchange(nothing, count, Link(bandwidth)), rank.exchange(work, count, link)
        alone, moved, both = rank.seconds(*runs)
        row = {"ratio": ratio, "groups": count, "bandwidth": bandwidth, "attention": alone, "exchange": moved}
        row |= {"both": both, "hidden": (alone + moved - both) / moved, "over_longer": both / max(alone, moved)}
        rows.append(row | {"events": list(link.events)})
    return rows


def rank_main(rank: int, args: argparse.Namespace, port: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    plan = plan_of(args.ranks, variant=args.variant, shape=parse_shape(args.shape))
    ranks = Ranks(rank, rank, args.ranks, args.ranks)
    _prefer(args, 2)  # threads made from here on
    with Comm.connect(ranks, plan.layout, torch.device("cpu"), backend="gloo", store=store) as comm:
        _prefer(args, 1)
        rows = measure(comm, plan, args.groups, args.ratios, timed=args.timer, repeats=args.repeats)
        events = comm.collect("events", json.dumps([row.pop("events") for row in rows]))
        if rank == 0:
            args.out.write_text(json.dumps({"rows": rows, "events": list(map(json.loads, events)), "S": plan.rows}))


def _prefer(args: argparse.Namespace, priority: int) -> None:
    """Puts this thread before all that is not real-time."""
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))


def trace_of(found: dict[str, Any]) -> dict[str, Any]:
    """The last run of every case as Chrome's trace events: a process a rank, a thread for the link, one for attention.

    Cases lie one after the other.
    """
    told, start = [], 0.0
    for case, row in enumerate(found["rows"]):
        every = [(rank, *event) for rank, cases in enumerate(found["events"]) for event in cases[case]]
        first, last = min(event[3] for event in every), max(event[4] for event in every)
        name = f"{row['ratio']}, {row['groups']} groups"
        for rank, lane, label, begun, ended in every:
            place = {"pid": rank, "tid": lane, "ts": 1e6 * (start + begun - first), "dur": 1e6 * (ended - begun)}
            told.append({"name": label, "cat": name, "ph": "X", "args": {"case": name}} | place)
        start += 1.2 * (last - first)
    return {"traceEvents": told, "displayTimeUnit": "ms"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: times in milliseconds."""
    lines = [
        "| attention : exchange | groups | attention | exchange | both | both / longer | hidden |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        times = " | ".join(f"{1e3 * row[name]:.1f}" for name in ("attention", "exchange", "both"))
        lines.append(f"| {row['ratio']} | {row['groups']} | {times} | {row['over_longer']:.2f} | {row['hidden']:.0%} |")
    return "\n".join(lines)


def main() -> int:
    """Start the ranks, then tell what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timer", action="store_true")
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--variant", choices=("heads", "hidden"), default="heads")
    parser.add_argument("--groups", type=lambda text: list(map(int, text.split(","))), default="1,2,4,7,8,14")
    parser.add_argument("--ratios", type=lambda text: text.split(","), default="1:2,1:1,2:1")
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.out = Path(folder, "found.json")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.start_processes(rank_main, (args, store.port), nprocs=args.ranks, start_method="spawn")
        found = json.loads(args.out.read_text())
    print(table(found["rows"]))
    if args.trace:
        args.trace.write_text(json.dumps(trace_of(found)))
    if args.json:
        args.json.write_text(json.dumps(document(args, found), indent=1) + "\n")
    short = [row for row in found["rows"] if row["ratio"] == "1:1" and row["groups"] >= MANY and row["hidden"] < GOAL]
    return int(bool(short))


def document(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """What was measured, on what."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True)
    cpu = ""
    with suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(": ")[2] if names else ""
    return {
        "what": "attention and a throttled exchange, alone and together (benchmarks/overlap.py)",
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip() or None,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {cpu}".strip(", "),
        "ranks": args.ranks,
        "attention": "a timer of its length" if args.timer else "scaled_dot_product_attention, one thread a rank",
        "sizes": {"rows": found["S"], "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"},
        "realtime": args.realtime,
        "repeats": args.repeats,
        "seconds": "of the slowest rank, the least of the repeats",
        "rows": found["rows"],
    }


if __name__ == "__main__":
    sys.exit(main())
