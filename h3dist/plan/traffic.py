"""Bytes that each rank sends to its peers, collective by collective. What stays on the rank is not counted.

With S rows, n = sp * tp ranks, H heads of size D, e bytes an element, and for rank r: g rows in its tp
group, Ht heads in its tp share, h heads it attends to, w rows in an even piece of its tp group's wire (the
padding at the tail is sent too, hence counted):

    text          L * hidden * e * (n - 1)            once, the first rank alone
    conditions    (96 * video + 32 * audio rows) * 4 * (n - 1)   likewise: float32 rows of keyframes, references
    rows.gather   2 * w * hidden * e * (tp - 1)       a block, before attention and before the MLP
    rows.reduce   2 * w * hidden * e * (tp - 1)       a block, after both
    heads.to      3 * (Ht - h) * b(g)                 a block: q, k and v for the other ranks' heads
    heads.from    h * sum of b(g) of the others       a block: my heads of the other ranks' rows
    amax          4 * (n - 1)                         a quantised linear, one float
    outputs       ceil(S / n) * O * 4 * (n - 1)       an evaluation: O = 128 float32 for the two heads

where b(g) = g * D * e are the bytes of one head of g rows; as int8 codes g * D + 4 * ceil(g / 16), with a scale in
float32 for each 16 rows. In groups heads go and come by parts, of the same bytes in all. In the variant "hidden",
over sp > 1, there is no heads.to, rows.gather is halved (the MLP's alone), and instead there is

    hidden.gather ceil(S / n) * hidden * e * (n - 1)  a block, before attention

With packed rows a row that an FP4 product takes goes as c / 2 bytes of codes and c / 16 of scales in the place of
hidden * e, where c is hidden up to a multiple of 32.

So Ulysses (tp = 1, g = s_r, Ht = H) sends (3 s_r (H - h_r) + (S - s_r) h_r) D e a block; where all divides,
its mean over P ranks is 4 S H D e (P - 1) / P^2.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from h3dist.conditions import Condition, kept_shapes
from h3dist.plan.exchange import PLAIN, ExchangePlan
from h3dist.plan.layout import Layout, length, split_rows

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import DenoiserDims
    from h3dist.plan.plan import Share

LABELS = (
    "text",
    "conditions",
    "rows.gather",
    "rows.reduce",
    "hidden.gather",
    "heads.to",
    "heads.from",
    "amax",
    "outputs",
)
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT = 4
FP4_COLUMNS, FP4_BLOCK = 32, 16  # columns of an FP4 operand are a multiple of 32; 16 of them share a scale of a byte


@dataclass(frozen=True)
class Work:
    """The sizes of one run that decide its traffic, the same on every rank."""

    dims: "DenoiserDims"
    layout: Layout
    rows: int  # S
    text_rows: int  # L
    steps: int  # evaluations of the model
    element: int  # bytes of an element of the compute dtype
    amax: int  # linears whose activations are quantised with a scale that all ranks agree on, all blocks together
    conditions: tuple[Condition, ...] = ()
    exchange: ExchangePlan = PLAIN
    packed: tuple[int, int] = (0, 0)  # blocks whose QKV, and whose fc1, take packed rows
    shown_rows: int = 0  # of the L, tokens of pictures

    @property
    def hidden(self) -> bool:
        """Whether hidden rows are gathered over all ranks in the place of q, k and v."""
        return self.exchange.hidden_on(self.layout)

    @property
    def kept_shapes(self) -> dict[str, tuple[int, int]]:
        """Rows of the conditions and their width, by kind."""
        return kept_shapes(self.conditions, self.dims.video_channels, self.dims.audio_channels)

    @property
    def chunk(self) -> int:
        """Rows of a rank before the last: ceil(S / n)."""
        return -(-self.rows // self.layout.ranks)

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of every tp group of a request, in their order."""
        rows = [stop - start for start, stop in split_rows(self.rows, self.layout.ranks)]
        return tuple(sum(rows[i : i + self.layout.tp]) for i in range(0, len(rows), self.layout.tp))


def sent(work: Work, share: "Share") -> dict[str, int]:
    """Bytes that one rank sends in a whole run, by label, by the formulas above; the request's first rank encodes."""
    dims, layout, e = work.dims, work.layout, work.element
    blocks, first = dims.layers * work.steps, share.rank % layout.ranks == 0
    held, heads = length(share.tp_heads), length(share.heads)
    piece = min(work.chunk, length(share.group_rows)) * (layout.tp - 1)
    qkv, fc1 = row_bytes(dims, e, work.packed)
    outputs = 4 * dims.video_channels + dims.audio_channels
    one_head = [work.exchange.head_bytes(rows, dims.head_dim, e) for rows in work.group_rows]
    mine = one_head[share.sp_index]
    return {
        "text": work.text_rows * dims.hidden * e * (layout.ranks - 1) if first else 0,
        "conditions": FLOAT * sum(map(prod, work.kept_shapes.values())) * (layout.ranks - 1) if first else 0,
        "rows.gather": work.steps * piece * (fc1 if work.hidden else qkv + fc1),
        "rows.reduce": blocks * piece * 2 * dims.hidden * e,
        "hidden.gather": work.steps * work.chunk * qkv * (layout.ranks - 1) if work.hidden else 0,
        "heads.to": 0 if work.hidden else blocks * 3 * (held - heads) * mine,
        "heads.from": blocks * heads * (sum(one_head) - mine),
        "amax": work.steps * work.amax * FLOAT * (layout.ranks - 1),
        "outputs": work.steps * work.chunk * outputs * FLOAT * (layout.ranks - 1),
    }


def row_bytes(dims: "DenoiserDims", element: int, packed: tuple[int, int]) -> tuple[int, int]:
    """Bytes of one row that is gathered for QKV, and for fc1, in all blocks of an evaluation together."""
    plain, columns = dims.hidden * element, -(-dims.hidden // FP4_COLUMNS) * FP4_COLUMNS
    qkv, fc1 = (dims.layers * plain + count * (columns // 2 + columns // FP4_BLOCK - plain) for count in packed)
    return qkv, fc1
