"""Where the text encoder runs: on rank 0 alone, or spread over all ranks; who holds what, what that sends and takes.

Keyframes and references are likewise rank 0's or everybody's: see `media`.

Under "tp" every rank holds some rows of each linear of the decoder layers: those of its query heads (with the key and
value heads that these attend to), of its columns of the MLP, and of its columns of the hidden state. Rank 0 alone
reads the embedding and the vision tower, first, and sends what they give. With L rows, V of them tokens of pictures,
d deepstack layers, C hidden, N decoder layers, n ranks, and h, f and c the most heads, MLP columns and hidden columns
of any rank (pieces of a gather are even, and what fills them up is sent too), a rank sends, in float32:

    encode.inputs   4 (L + d V) C (n - 1)      once, rank 0 alone
    encode.heads    4 N L h D (n - 1)          attention's output, before its projection
    encode.ffn      4 N L f (n - 1)            the MLP's inside, before its second product
    encode.hidden   4 N 2 L c (n - 1)          what attention and the MLP give
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from h3dist.checkpoint.text_names import LAYERS, TextDims
from h3dist.checkpoint.text_shard import TextShare, text_slices
from h3dist.plan.layout import Span, column_spans, length, split_ragged
from h3dist.plan.media import MEDIA_LABELS, media_bytes, media_sent, schedule_media, speedup
from h3dist.plan.memory import Stored, alone_text, encoding_bytes
from h3dist.plan.text_memory import FLOAT, spread_bytes, vision_bytes

if TYPE_CHECKING:
    from h3dist.plan.plan import Plan, Share

TEXT_LABELS = ("encode.inputs", "encode.heads", "encode.ffn", "encode.hidden")
ENCODE_LABELS = (*TEXT_LABELS, *MEDIA_LABELS)


@dataclass(frozen=True)
class EncodePlan:
    """Where the text encoder runs: `text`, rank0 or tp, and `shares` by rank of the request, none with rank 0 alone.

    Where the VAEs encode conditions: `conditions`, rank0 or parallel, and the tiles and sounds of each rank likewise.
    """

    text: str = "rank0"
    conditions: str = "rank0"
    shares: tuple[TextShare, ...] = ()
    tiles: tuple[int, ...] = ()
    sounds: tuple[int, ...] = ()
    speedup: float = 1.0  # of the conditions' encoding, by the schedule

    @property
    def spread(self) -> bool:
        """Whether it is spread over ranks."""
        return bool(self.shares)

    @property
    def parallel(self) -> bool:
        """Whether all ranks encode the conditions."""
        return bool(self.tiles)

    def told(self) -> list[str]:
        """Lines for people."""
        text = "rank 0 encodes the text"
        if self.spread:
            text = f"all ranks encode the text, {_range(widths(self.shares, 'heads'))} heads of the text encoder each"
        if not self.parallel:
            return [text]
        jobs = f"{_range(self.tiles)} tiles and {_range(self.sounds)} sounds each"
        return [text, f"all ranks encode the conditions, {jobs}, {self.speedup:.2f} x rank 0 by the schedule"]


def share_text(dims: TextDims, ranks: int) -> tuple[TextShare, ...]:
    """Every rank's part of the decoder layers, for any number of ranks; beyond what can be cut the last have none."""
    columns = _columns(dims.ffn, ranks), _columns(dims.hidden, ranks)
    return tuple(TextShare(*spans) for spans in zip(split_ragged(dims.heads, ranks), *columns, strict=True))


def with_encode(plan: "Plan") -> "Plan":
    """The same plan with text and conditions encoded by all ranks, as far as `plan.encode` asks for that and there are
    ranks, and conditions, to do so."""
    plan = replace(plan, encode=_decide(plan))
    shares = tuple(
        replace(share, sent=share.sent | _sent(plan, share), text_bytes=_asked(plan, share)) for share in plan.shares
    )
    memory = plan.memory
    if plan.encode.spread or plan.encode.parallel:
        needs = [plan.stored.reserve + _memory(plan, share.rank % plan.layout.ranks) for share in plan.shares]
        memory = tuple(stages | {"encode": need} for stages, need in zip(memory, needs, strict=True))
    return replace(plan, shares=shares, memory=memory)


def _decide(plan: "Plan") -> EncodePlan:
    ask, ranks = plan.encode, plan.layout.ranks
    made = EncodePlan(ask.text, ask.conditions)
    if ranks > 1 and ask.text == "tp":
        made = replace(made, shares=share_text(plan.stored.text_dims, ranks))
    if ranks > 1 and ask.conditions == "parallel" and plan.conditions:
        sounds, *clips = schedule_media(plan.conditions, ranks, plan.decode.device)[1].chunks
        tiles = tuple(sum(owners.count(rank) for owners in clips) for rank in range(ranks))
        faster = speedup(plan.conditions, ranks, plan.decode.device)
        made = replace(made, tiles=tiles, sounds=tuple(map(sounds.count, range(ranks))), speedup=faster)
    return made


def widths(shares: tuple[TextShare, ...], kind: str) -> tuple[int, ...]:
    """How much of `kind`, a field of `TextShare`, each rank has."""
    return tuple(length(getattr(share, kind)) for share in shares)


def layer_bytes(encode: EncodePlan, stored: Stored, rank: int) -> int:
    """What a rank of the request reads of the decoder layers; an even part where the file is not known well."""
    if stored.text is None:
        return -(-stored.text_encoder // len(encode.shares))
    return stored.text.layer_bytes(text_slices(stored.text.dims, encode.shares[rank]))


def text_bytes(encode: EncodePlan, stored: Stored, rank: int) -> int:
    """The most of the text encoder's weights that a rank holds at a time."""
    if not encode.spread:
        return stored.text_encoder if rank == 0 else 0
    front = stored.text.front if stored.text and rank == 0 else 0
    return max(front, layer_bytes(encode, stored, rank))


def _columns(count: int, ranks: int) -> tuple[Span, ...]:
    spans = column_spans(count, ranks)
    return (*spans, *[(count, count)] * (ranks - len(spans)))


def _asked(plan: "Plan", share: "Share") -> int:
    """Bytes that a rank asks of the text encoder's file; 0 where that is not known."""
    text, rank = plan.stored.text, share.rank % plan.layout.ranks
    if text is None:
        return 0
    front = text.front if rank == 0 else 0
    if plan.encode.spread:
        return front + layer_bytes(plan.encode, plan.stored, rank)
    return text.nbytes if rank == 0 else 0


def _sent(plan: "Plan", share: "Share") -> dict[str, int]:
    """Bytes by label of one rank, by the formulas above and those of `media`."""
    found = dict.fromkeys(ENCODE_LABELS, 0)
    if plan.encode.spread:
        found |= _text_sent(plan, share)
    if plan.encode.parallel:
        ranks = plan.layout.ranks
        media = media_sent(plan.conditions, plan.dims, ranks, plan.decode.device, share.rank % ranks)
        found |= dict(zip(MEDIA_LABELS, media, strict=True))
    return found


def _text_sent(plan: "Plan", share: "Share") -> dict[str, int]:
    dims, first = plan.stored.text_dims, share.rank % plan.layout.ranks == 0
    others = FLOAT * (plan.layout.ranks - 1)
    most = {kind: max(widths(plan.encode.shares, kind)) for kind in ("heads", "ffn", "hidden")}
    rows = LAYERS * plan.text_rows * others
    given = (plan.text_rows + dims.vision.deepstack * plan.shown_rows) * dims.hidden
    joined = most["heads"] * dims.head_dim, most["ffn"], 2 * most["hidden"]
    return dict(zip(TEXT_LABELS, (first * given * others, *(rows * width for width in joined)), strict=True))


def _memory(plan: "Plan", rank: int) -> int:
    """What a rank's encode stage takes beside the reserve: the more of the text's part and the conditions'."""
    states = FLOAT * plan.text_rows * plan.stored.text_dims.hidden
    return max(_text_memory(plan, rank, states), _media_memory(plan, rank) + states * (rank == 0))


def _text_memory(plan: "Plan", rank: int, states: int) -> int:
    """Where it is spread on rank 0 first the embedding and the vision tower, which leave, then the layers."""
    stored, dims = plan.stored, plan.stored.text_dims
    if not plan.encode.spread:
        return alone_text(stored, plan.text_rows, plan.shown_rows) + states if rank == 0 else 0
    layers = layer_bytes(plan.encode, stored, rank) + states
    layers += spread_bytes(dims, plan.text_rows, plan.shown_rows, plan.encode.shares[rank])
    front = (stored.text.front if stored.text else 0) + vision_bytes(dims, plan.shown_rows) + states
    return max(layers, front) if rank == 0 else layers


def _media_memory(plan: "Plan", rank: int) -> int:
    if not plan.encode.parallel:
        return encoding_bytes(plan.conditions, plan.stored) if rank == 0 else 0
    schedule = schedule_media(plan.conditions, plan.layout.ranks, plan.decode.device)[1]
    return media_bytes(plan.conditions, plan.dims, plan.stored, schedule, rank)


def _range(counts: Sequence[int]) -> str:
    return "-".join(map(str, sorted({min(counts), max(counts)})))
