"""Bytes that each rank sends to its peers, collective by collective. What stays on the rank is not counted.

With S rows, n = sp * tp ranks, H heads of size D, e bytes an element, and for rank r: g rows in its tp
group, Ht heads in its tp share, h heads it attends to, w rows in an even piece of its tp group's wire (the
padding at the tail is sent too, hence counted):

    text          L * hidden * e * (n - 1)            once, the first rank alone
    conditions    (96 * video + 32 * audio rows) * 4 * (n - 1)   likewise: float32 rows of keyframes, references
    rows.gather   2 * w * hidden * e * (tp - 1)       a block, before attention and before the MLP
    rows.reduce   2 * w * hidden * e * (tp - 1)       a block, after both
    heads.to      3 * g * (Ht - h) * D * e            a block: q, k and v for the other ranks' heads
    heads.from    (S - g) * h * D * e                 a block: my heads of the other ranks' rows
    amax          4 * (n - 1)                         a quantised linear, one float
    outputs       ceil(S / n) * O * 4 * (n - 1)       an evaluation: O = 128 float32 for the two heads

so Ulysses (tp = 1, g = s_r, Ht = H) sends (3 s_r (H - h_r) + (S - s_r) h_r) D e a block; where all divides,
its mean over P ranks is 4 S H D e (P - 1) / P^2.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from h3dist.conditions import Condition, kept_shapes
from h3dist.plan.layout import Layout

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import DenoiserDims

LABELS = ("text", "conditions", "rows.gather", "rows.reduce", "heads.to", "heads.from", "amax", "outputs")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT = 4


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

    @property
    def kept_shapes(self) -> dict[str, tuple[int, int]]:
        """Rows of the conditions and their width, by kind."""
        return kept_shapes(self.conditions, self.dims.video_channels, self.dims.audio_channels)

    @property
    def chunk(self) -> int:
        """Rows of a rank before the last: ceil(S / n)."""
        return -(-self.rows // self.layout.ranks)


def sent(work: Work, *, first: bool, group_rows: int, tp_heads: int, heads: int) -> dict[str, int]:
    """Bytes that one rank sends in a whole run, by label, by the formulas above.

    `first` is the rank that encodes, `group_rows` g, `tp_heads` Ht and `heads` h of the formulas.
    """
    dims, layout = work.dims, work.layout
    blocks = dims.layers * work.steps
    wire = 2 * min(work.chunk, group_rows) * dims.hidden * work.element * (layout.tp - 1)
    outputs = 4 * dims.video_channels + dims.audio_channels
    one_head = dims.head_dim * work.element
    return {
        "text": work.text_rows * dims.hidden * work.element * (layout.ranks - 1) if first else 0,
        "conditions": FLOAT * sum(map(prod, work.kept_shapes.values())) * (layout.ranks - 1) if first else 0,
        "rows.gather": blocks * wire,
        "rows.reduce": blocks * wire,
        "heads.to": blocks * 3 * group_rows * (tp_heads - heads) * one_head,
        "heads.from": blocks * (work.rows - group_rows) * heads * one_head,
        "amax": work.steps * work.amax * FLOAT * (layout.ranks - 1),
        "outputs": work.steps * work.chunk * outputs * FLOAT * (layout.ranks - 1),
    }
