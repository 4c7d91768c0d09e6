"""Where the text encoder runs: on rank 0 alone, or spread over all ranks; who holds what, what that sends and takes.

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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from h3dist.checkpoint.text_names import LAYERS, TextDims
from h3dist.checkpoint.text_shard import TextShare, text_slices
from h3dist.plan.layout import Span, column_spans, length, split_ragged
from h3dist.plan.memory import Stored, encoding_bytes
from h3dist.plan.text_memory import FLOAT, spread_bytes, vision_bytes

if TYPE_CHECKING:
    from h3dist.plan.plan import Plan, Share

ENCODE_LABELS = ("encode.inputs", "encode.heads", "encode.ffn", "encode.hidden")


@dataclass(frozen=True)
class EncodePlan:
    """Where the text encoder runs: `text`, rank0 or tp, and `shares` by rank of the request, none with rank 0 alone."""

    text: str = "rank0"
    shares: tuple[TextShare, ...] = ()

    @property
    def spread(self) -> bool:
        """Whether it is spread over ranks."""
        return bool(self.shares)

    def told(self) -> str:
        """One line for people."""
        if not self.spread:
            return "rank 0 encodes the text"
        counts = "-".join(map(str, sorted({length(share.heads) for share in self.shares})))
        return f"all ranks encode the text, {counts} heads of the text encoder each"


def share_text(dims: TextDims, ranks: int) -> tuple[TextShare, ...]:
    """Every rank's part of the decoder layers, for any number of ranks; beyond what can be cut the last have none."""
    columns = _columns(dims.ffn, ranks), _columns(dims.hidden, ranks)
    return tuple(TextShare(*spans) for spans in zip(split_ragged(dims.heads, ranks), *columns, strict=True))


def with_encode(plan: "Plan") -> "Plan":
    """The same plan with the text encoder spread, where `plan.encode` asks for that and there are ranks to do so."""
    stored, ranks = plan.stored, plan.layout.ranks
    spread = plan.encode.text == "tp" and ranks > 1
    encode = replace(plan.encode, shares=share_text(stored.text_dims, ranks) if spread else ())
    plan = replace(plan, encode=encode)
    shares = tuple(
        replace(share, sent=share.sent | _sent(plan, share), text_bytes=_asked(plan, share)) for share in plan.shares
    )
    memory = plan.memory
    if spread:
        needs = [_memory(plan, share) for share in plan.shares]
        memory = tuple(stages | {"encode": need} for stages, need in zip(memory, needs, strict=True))
    return replace(plan, shares=shares, memory=memory)


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
    """Bytes by label of one rank, by the formulas above."""
    if not plan.encode.spread:
        return dict.fromkeys(ENCODE_LABELS, 0)
    dims, first = plan.stored.text_dims, share.rank % plan.layout.ranks == 0
    others = FLOAT * (plan.layout.ranks - 1)
    most = {kind: max(widths(plan.encode.shares, kind)) for kind in ("heads", "ffn", "hidden")}
    rows = LAYERS * plan.text_rows * others
    given = (plan.text_rows + dims.vision.deepstack * plan.shown_rows) * dims.hidden
    joined = most["heads"] * dims.head_dim, most["ffn"], 2 * most["hidden"]
    return dict(zip(ENCODE_LABELS, (first * given * others, *(rows * width for width in joined)), strict=True))


def _memory(plan: "Plan", share: "Share") -> int:
    """A rank's encode stage where the text encoder is spread: on rank 0 first the embedding and the vision tower.

    The conditions are encoded by rank 0 alone after it, as without.
    """
    stored, dims, rank = plan.stored, plan.stored.text_dims, share.rank % plan.layout.ranks
    states = FLOAT * plan.text_rows * dims.hidden
    layers = layer_bytes(plan.encode, stored, rank) + states
    layers += spread_bytes(dims, plan.text_rows, plan.shown_rows, plan.encode.shares[rank])
    if rank:
        return stored.reserve + layers
    front = (stored.text.front if stored.text else 0) + vision_bytes(dims, plan.shown_rows) + states
    return stored.reserve + max(front, layers, encoding_bytes(plan.conditions, stored) + states)
