"""The plan as text: who holds which rows, heads and columns, what travels, what memory it takes, and why."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from h3dist.conditions import kept_shapes
from h3dist.geometry import AUDIO_RATE
from h3dist.plan.decode import DECODE_LABELS
from h3dist.plan.encode import TEXT_LABELS
from h3dist.plan.exchange import PLAIN
from h3dist.plan.media import MEDIA_LABELS
from h3dist.plan.traffic import FLOAT, LABELS

if TYPE_CHECKING:
    from h3dist.plan.plan import Plan, Share

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Bytes for people: 1536 is "1.5 KiB"."""
    for unit in UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {UNITS[-1]}"


def table(plan: "Plan") -> str:
    """Three tables, one line a rank, between a heading and the reasons; it ends without a newline."""
    holds = [_holds(share) for share in plan.shares]
    used = [name for name in LABELS if any(share.sent[name] for share in plan.shares)]
    sends = [[str(share.rank), *(size(share.sent[name]) for name in used), size(sum(share.sent.values()))]
             for share in plan.shares]  # fmt: skip
    stages = list(plan.memory[0])
    needs = [[str(rank), *(size(memory[name]) for name in stages), size(max(memory.values()))]
             for rank, memory in enumerate(plan.memory)]  # fmt: skip
    parts = [
        _heading(plan),
        _conditions(plan),
        _columns(("rank", "rows", "heads", "of held", "ffn", "from file", "weights"), holds),
        "sent in the whole run, by collective",
        _columns(("rank", *used, "all"), sends),
        _encode(plan),
        _media(plan),
        _decode(plan),
        "memory by stage, estimated",
        _columns(("rank", *stages, "peak"), needs),
        "\n".join(f"- {line}" for line in (*plan.reasons, *plan.encode.told(), plan.decode.text(), *plan.notes)),
        f"plan {plan.digest[:12]}",
    ]
    return "\n".join(part for part in parts if part)


def _heading(plan: "Plan") -> str:
    g = plan.geometry
    asked = plan.mode if plan.mode == plan.layout.mode else f"{plan.mode} ({plan.layout.mode})"
    sound = g.audio_rows
    kept = sum(condition.video_rows + condition.audio_rows for condition in plan.conditions)
    conditions = f"{kept} conditions + " if kept else ""
    used = plan.exchange.on(plan.layout)
    moved = f", exchange {used}" if plan.layout.sp > 1 or used != PLAIN else ""
    return (
        f"{asked}: {plan.layout.world} rank{'s' * (plan.layout.world > 1)}, {plan.layout}; {plan.dtype}, "
        f"attention {plan.attention}, {plan.steps} evaluations{moved}\n"
        f"{g.width} x {g.height}, {g.frames} frames ({g.seconds:.2f} s): {plan.rows} rows = "
        f"{plan.text_rows} text + {conditions}{sound} sound + {g.video_rows} video; {plan.chunk} a rank"
    )


def _conditions(plan: "Plan") -> str:
    """A line for each keyframe and reference: what is encoded of it, the rows that gives, and their bytes."""
    titles = ("condition", "frame", "pixels", "frames", "sound", "rows", "of sound", "bytes")
    channels = plan.dims.video_channels, plan.dims.audio_channels
    lines = []
    for item in plan.conditions:
        count = sum(prod(shape) for shape in kept_shapes([item], *channels).values())
        frame = str(item.frame) if item.kind == "keyframe" else "-"
        pixels = f"{item.width} x {item.height}" if item.frames else "-"
        seconds = f"{item.samples / AUDIO_RATE:.2f} s" if item.samples else "-"
        rows = item.video_rows + item.audio_rows
        sizes = str(item.frames), seconds, str(rows), str(item.audio_rows), size(FLOAT * count)
        lines.append((item.kind, frame, pixels, *sizes))
    return _columns(titles, lines) if lines else ""


def _encode(plan: "Plan") -> str:
    """A line for each rank that the text encoder is spread over: what it holds and reads of it, and sends."""
    if not plan.encode.spread:
        return ""
    lines = [
        [
            str(rank),
            *(f"{a}..{b}" for a, b in (part.heads, part.ffn)),
            size(share.text_bytes),
            *(size(share.sent[n]) for n in TEXT_LABELS),
        ]
        for rank, (part, share) in enumerate(zip(plan.encode.shares, plan.shares, strict=True))
    ]
    return _columns(("rank", "text heads", "ffn", "from file", *TEXT_LABELS), lines)


def _media(plan: "Plan") -> str:
    """A line for each rank that conditions are given out to: its jobs, and the bytes that it sends."""
    encode = plan.encode
    if not encode.parallel:
        return ""
    jobs = zip(encode.tiles, encode.sounds, plan.shares, strict=True)
    lines = [
        [str(rank), str(tiles), str(sounds), *(size(share.sent[n]) for n in MEDIA_LABELS)]
        for rank, (tiles, sounds, share) in enumerate(jobs)
    ]
    return _columns(("rank", "tiles", "sounds", *MEDIA_LABELS), lines)


def _decode(plan: "Plan") -> str:
    """A line for each rank that decodes: its tiles, and the bytes that it hands to rank 0."""
    if not plan.decode.parallel:
        return ""
    lines = [
        [
            str(rank),
            str(tiles),
            "yes" if rank == plan.decode.sound else "-",
            *(size(share.sent[n]) for n in DECODE_LABELS),
        ]
        for rank, (tiles, share) in enumerate(zip(plan.decode.tiles, plan.shares, strict=True))
    ]
    return _columns(("rank", "tiles", "sound", *DECODE_LABELS), lines)


def _holds(share: "Share") -> list[str]:
    spans = (share.rows, share.heads, share.tp_heads, share.ffn)
    return [
        str(share.rank),
        *(f"{a}..{b}" for a, b in spans),
        size(share.file_bytes),
        size(share.weight_bytes),
    ]


def _columns(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (titles, *lines)) for i in range(len(titles))]
    rows = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (titles, *lines))
    return "\n".join(f"  {row}" for row in rows)
