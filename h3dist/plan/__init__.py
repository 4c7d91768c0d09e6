"""Plans: how ranks share a run, and what that costs in bytes, before any work. Imports no torch."""

from h3dist.plan.decode import DECODE_LABELS, DecodePlan, ask_decode, choose_products, schedule_decode
from h3dist.plan.encode import ENCODE_LABELS, EncodePlan
from h3dist.plan.exchange import ExchangePlan, choose_exchange
from h3dist.plan.fit import Cut, check_memory, fits
from h3dist.plan.layout import (
    MODES,
    Layout,
    Span,
    column_spans,
    ffn_split,
    length,
    make_layout,
    split_heads,
    split_ragged,
    split_rows,
)
from h3dist.plan.plan import Plan, Share, make_plan
from h3dist.plan.traffic import LABELS
from h3dist.plan.weights import fp4_linears, released_dims

__all__ = [
    "DECODE_LABELS",
    "ENCODE_LABELS",
    "LABELS",
    "MODES",
    "Cut",
    "DecodePlan",
    "EncodePlan",
    "ExchangePlan",
    "Layout",
    "Plan",
    "Share",
    "Span",
    "ask_decode",
    "check_memory",
    "choose_exchange",
    "choose_products",
    "column_spans",
    "ffn_split",
    "fits",
    "fp4_linears",
    "length",
    "make_layout",
    "make_plan",
    "released_dims",
    "schedule_decode",
    "split_heads",
    "split_ragged",
    "split_rows",
]
