"""The plan of a run: one frozen object, equal on every rank, that says who holds, sends and needs what.

It is pure: made from a request, the model's dims and a layout, before any weight is read and without a
process group.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from h3dist.conditions import Condition, kept_shapes
from h3dist.errors import ConfigError, nearest
from h3dist.geometry import Geometry
from h3dist.plan.decode import DecodePlan, ask_decode, with_decode
from h3dist.plan.encode import EncodePlan, with_encode
from h3dist.plan.exchange import PLAIN, ExchangePlan
from h3dist.plan.gemm import resident_bytes
from h3dist.plan.layout import Layout, Span, ffn_split, length, split_heads, split_rows
from h3dist.plan.memory import CUDA_RESERVE, Stored, estimate, weight_bytes
from h3dist.plan.traffic import ELEMENT_BYTES, Work, sent
from h3dist.plan.weights import bytes_per_weight, file_bytes, linear_weights, packed_inputs

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import DenoiserDims, DenoiserFile
    from h3dist.checkpoint.text_shard import TextStored
    from h3dist.request import Resolved


@dataclass(frozen=True)
class Share:
    """What one rank holds, reads and sends. Spans are (start, stop), of all rows, heads and FFN columns."""

    rank: int
    sp_index: int
    tp_index: int
    rows: Span  # my rows of the residual
    group_rows: Span  # the rows of my tp group together
    tp_heads: Span  # heads whose output weights I hold
    heads: Span  # of those, the heads I attend to
    ffn: Span  # FFN columns whose weights I hold
    projected_rows: Span  # the rows that I project to q, k and v: my group's, or all
    projected_heads: Span  # the heads that I project them to: those of my tp share, or mine
    file_bytes: int = 0  # asked of the denoiser's file
    weight_bytes: int = 0  # of the denoiser, kept in memory
    text_bytes: int = 0  # asked of the text encoder's file
    sent: dict[str, int] = field(default_factory=dict)  # bytes to other ranks in the whole run, by collective


@dataclass(frozen=True)
class Plan:
    """A whole run: see `Share` for one rank's part of it."""

    layout: Layout
    mode: str
    dims: "DenoiserDims"
    geometry: Geometry
    text_rows: int  # L
    shown_rows: int  # of them, tokens of pictures
    conditions: tuple[Condition, ...]  # keyframes, then references
    rows: int  # S: text, conditions, sound and video
    chunk: int  # rows of every rank but the last ones
    steps: int  # evaluations of the model
    dtype: str
    attention: str
    encode: EncodePlan
    decode: DecodePlan
    exchange: ExchangePlan  # as asked for, whatever the layout
    fp4: int  # linears computed in FP4, all blocks together
    amax: int  # those of them whose activation scale all ranks agree on
    packed: tuple[int, int]  # blocks whose QKV, and whose fc1, take rows that were gathered as codes
    stored: Stored
    shares: tuple[Share, ...]
    memory: tuple[dict[str, int], ...]  # bytes of each rank at each stage, estimated
    notes: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def kept_shapes(self) -> dict[str, tuple[int, int]]:
        """Rows of the conditions and their width, by kind; a kind without rows is left out."""
        return kept_shapes(self.conditions, self.dims.video_channels, self.dims.audio_channels)

    @property
    def gemm(self) -> str:
        """How the blocks' linears are multiplied: dense, nvfp4, fp8 or int8."""
        return self.stored.gemm

    @property
    def packs_rows(self) -> bool:
        """Whether any rows that move between ranks go as codes."""
        return any(self.packed) and (self.layout.tp > 1 or self.exchange.hidden_on(self.layout))

    @property
    def peaks(self) -> tuple[int, ...]:
        """The largest stage of each rank, in bytes."""
        return tuple(max(stages.values()) for stages in self.memory)

    @property
    def digest(self) -> str:
        """SHA-256 of all of this: equal on every rank, or the ranks disagree about the run."""
        return sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """This plan as JSON values."""
        return json.loads(json.dumps(asdict(self)))

    def text(self) -> str:
        """The plan as a table for people."""
        from h3dist.plan.table import table

        return table(self)


def make_plan(
    resolved: "Resolved",
    dims: "DenoiserDims",
    text_rows: int,
    layout: Layout,
    *,
    dtype: str,
    attention: str,
    steps: int,
    dfile: "DenoiserFile | None" = None,
    mode: str | None = None,
    fp4: int = 0,
    amax: int = 0,
    files: dict[str, int] | None = None,
    reserve: int = CUDA_RESERVE,
    conditions: tuple[Condition, ...] = (),
    exchange: ExchangePlan = PLAIN,
    gemm: str | None = None,
    resident_blocks: int | None = None,
    text: "TextStored | None" = None,
    shown_rows: int = 0,
    encode: str = "rank0",
    encode_conditions: str = "rank0",
    decode: str = "rank0",
    fast_decode: bool = False,
    decode_gemm: str = "exact",
    decode_batch: int | None = None,
    device: str = "cuda",
) -> Plan:
    """The plan of `resolved` for a presentation of `text_rows` tokens, with `conditions`, on `layout`.

    `steps` counts evaluations; `dfile` is the opened denoiser (without it, released NVFP4 storage is
    assumed); `mode` is what the user asked for; `fp4` counts the linears whose activations are quantised too,
    `amax` those of them that need all ranks to agree on a scale (see `weights.fp4_linears`); `files` gives the
    bytes of "text_encoder", "video_vae" and "audio_vae" where known; `reserve` is what a process takes before
    anything of ours, in bytes; `exchange` says how heads move over sp; `gemm` how linears are multiplied, by default as
    `fp4` says; `resident_blocks` how many are on the device at a time (None: all); `decode` where the clip is decoded,
    "auto" if that is the plan's to decide, and `device` on what kind of devices; `fast_decode`, `decode_gemm` and
    `decode_batch` are for `decode.ask_decode`; `encode` where the text is encoded, rank0 or tp; `encode_conditions`
    where keyframes and references are, rank0 or parallel; `text` the text encoder's file by its parts; `shown_rows` of
    the text are tokens of pictures. Raises PlanError and ConfigError.
    """
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"runtime.dtype={dtype!r}{nearest(dtype, ELEMENT_BYTES)}; use {' or '.join(ELEMENT_BYTES)}")
    geometry = resolved.geometry
    kept_rows = sum(condition.video_rows + condition.audio_rows for condition in conditions)
    rows = text_rows + kept_rows + geometry.audio_rows + geometry.video_rows
    packed = packed_inputs(dims, dfile) if fp4 and exchange.rows == "packed" else (0, 0)
    work = Work(
        dims, layout, rows, text_rows, steps, ELEMENT_BYTES[dtype], amax, conditions, exchange, packed, shown_rows
    )
    gemm = gemm or ("nvfp4" if fp4 else "dense")
    held = resident_bytes(gemm, dims, bytes_per_weight(dims, dfile))
    stored = Stored(held, reserve, **(files or {}), gemm=gemm, resident_blocks=resident_blocks, text=text)
    shares = tuple(_ask(_fill(share, work, stored), work, dfile) for share in split(work))
    plan = Plan(
        layout=layout,
        mode=mode or layout.mode,
        dims=dims,
        geometry=geometry,
        text_rows=text_rows,
        shown_rows=shown_rows,
        conditions=conditions,
        rows=rows,
        chunk=work.chunk,
        steps=steps,
        dtype=dtype,
        attention=attention,
        encode=EncodePlan(encode, encode_conditions),
        decode=ask_decode(decode, device, fast_decode, decode_batch, geometry, decode_gemm),
        exchange=exchange,
        fp4=fp4,
        amax=amax,
        packed=packed,
        stored=stored,
        shares=shares,
        memory=tuple(estimate(work, stored, share, geometry) for share in shares),
        notes=(
            *_notes(resolved, dfile, files or {}),
            *exchange.idle_on(layout),
            *_unpacked(exchange.on(layout), packed),
            *_waiting(dims, stored, shares),
        ),
        reasons=_reasons(mode, layout, shares),
    )
    return with_decode(with_encode(plan))


def split(work: Work) -> tuple[Share, ...]:
    """Rows, heads and FFN columns of every rank; bytes are not filled in yet. Raises PlanError."""
    layout, dims = work.layout, work.dims
    rows = split_rows(work.rows, layout.ranks)
    heads = split_heads(dims.heads, layout.sp, layout.tp)
    ffn = ffn_split(dims.ffn, layout.tp)
    shares = []
    for rank in range(layout.world):
        s, t = divmod(rank % layout.ranks, layout.tp)
        group = rows[s * layout.tp : (s + 1) * layout.tp]
        span = (group[0][0], group[-1][1])
        tp_heads, own = heads[t]
        projected = ((0, work.rows), own[s]) if work.hidden else (span, tp_heads)
        shares.append(Share(rank, s, t, group[t], span, tp_heads, own[s], ffn[t], *projected))
    return tuple(shares)


def relayout(plan: Plan, layout: Layout) -> Plan:
    """The same run on another layout, to compare: the bytes that it would read of the file are left out.

    Raises PlanError where the model cannot be cut so.
    """
    work = Work(
        plan.dims,
        layout,
        plan.rows,
        plan.text_rows,
        plan.steps,
        ELEMENT_BYTES[plan.dtype],
        plan.amax,
        plan.conditions,
        plan.exchange,
        plan.packed,
        plan.shown_rows,
    )
    shares = tuple(_fill(share, work, plan.stored) for share in split(work))
    memory = tuple(estimate(work, plan.stored, share, plan.geometry) for share in shares)
    parts = {"shares": shares, "memory": memory, "reasons": ()}
    return with_decode(with_encode(replace(plan, layout=layout, mode=layout.mode, chunk=work.chunk, **parts)))


def _fill(share: Share, work: Work, stored: Stored) -> Share:
    """The same share with what it keeps in memory and sends, in bytes."""
    return replace(share, weight_bytes=weight_bytes(work, stored, share), sent=sent(work, share))


def _ask(share: Share, work: Work, dfile: "DenoiserFile | None") -> Share:
    """The same share with the bytes that it asks of the file."""
    first = share.rank % work.layout.ranks == 0
    asked = file_bytes(work.dims, dfile, share.tp_heads, share.ffn, refiner=first, projected=share.projected_heads)
    return replace(share, file_bytes=asked)


def _notes(resolved: "Resolved", dfile: "DenoiserFile | None", files: dict[str, int]) -> tuple[str, ...]:
    notes = list(resolved.notes)
    if dfile is None:
        notes.append("no denoiser file: its bytes are those of the released NVFP4 form")
    missing = [name for name in ("text_encoder", "video_vae", "audio_vae") if not files.get(name)]
    if missing:
        notes.append(f"memory of rank 0 leaves out {', '.join(missing)}: no file there")
    return tuple(notes)


def _unpacked(exchange: ExchangePlan, packed: tuple[int, int]) -> tuple[str, ...]:
    idle = exchange.rows == "packed" and not any(packed)
    return ("exchange.rows=packed changes nothing here: no product takes NVFP4 rows",) if idle else ()


def _waiting(dims: "DenoiserDims", stored: Stored, shares: tuple[Share, ...]) -> tuple[str, ...]:
    """A note on blocks that are not on the device."""
    if stored.resident_blocks is None:
        return ()
    cuts = ((length(share.tp_heads), length(share.ffn), length(share.projected_heads)) for share in shares)
    most = max(stored.bytes_per_weight * linear_weights(dims, *cut) for cut in cuts)
    told = f"{most / 1e9:.1f} GB of blocks a rank wait in the host's memory, pinned"
    return (f"{told}; the predicted time leaves out their way to the GPU",)


def _reasons(mode: str | None, layout: Layout, shares: tuple[Share, ...]) -> tuple[str, ...]:
    """Why the layout is what it is, in words."""
    reasons = []
    if mode == "auto":
        why = {
            "single": "there is one rank",
            "ulysses": "the weights fit every rank, and it sends least",
            "tensor": "no smaller tp fits the memory that is free",
            "hybrid": "it is the smallest tp that fits the memory that is free",
        }
        reasons.append(f"auto is {layout.mode} here: {why[layout.mode]}")
    idle = [str(share.rank) for share in shares if share.rows[0] == share.rows[1]]
    if idle:
        reasons.append(f"there are fewer rows than whole chunks: no row for rank {', '.join(idle)}")
    sizes = {share.heads[1] - share.heads[0] for share in shares}
    if len(sizes) > 1:
        reasons.append(f"the heads do not divide evenly: {max(sizes)} or {min(sizes)} a rank")
    return tuple(reasons)
