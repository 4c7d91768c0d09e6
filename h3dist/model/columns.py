"""Products whose partial results a tp group sums run by run of their columns, each run beside the next one's product.

Shape letters: g rows of the tp group, s own rows, K inputs held here, N outputs, c columns of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

from h3dist.checkpoint.formats import Weight
from h3dist.checkpoint.nvfp4 import Nvfp4Weight
from h3dist.checkpoint.slices import Range, Slice
from h3dist.model.dense import Linear, dense_linear, prescaled
from h3dist.model.exchange import Exchange
from h3dist.model.linear import Fp4Linear, fp4_codes, fp4_product
from h3dist.model.packed import PackedLinear
from h3dist.model.reused import made_dense


def reduced(x_gK: Tensor, weight: Weight, linear: Linear, exchange: Exchange) -> Tensor:
    """y_sN: the product summed over the tp group, of which each rank gets its own rows."""
    spans = exchange.column_spans(weight.shape[0])
    if len(spans) == 1:
        return exchange.reduce_rows(linear(x_gK, weight))
    return exchange.reduce_columns(columns(x_gK, weight, linear, spans))


def columns(x_gK: Tensor, weight: Weight, linear: Linear, spans: Sequence[Range]) -> Iterator[Tensor]:
    """y_gc of each run of columns, as `linear` computes them; at once where it has no parts to offer."""
    fp4 = linear.fp4 if isinstance(linear, PackedLinear) else linear
    if isinstance(fp4, Fp4Linear) and isinstance(weight, Nvfp4Weight) and not weight.full_precision:
        yield from _fp4_columns(x_gK, weight, fp4, spans)
        return
    dense_NK = made_dense(dense_linear if isinstance(fp4, Fp4Linear) else linear, weight, x_gK.dtype)
    if dense_NK is not None:
        x_gK = prescaled(x_gK, weight)
        for start, stop in spans:
            yield F.linear(x_gK, dense_NK[start:stop])
    else:
        y_gN = linear(x_gK, weight)
        for start, stop in spans:
            yield y_gN[:, start:stop]


def _fp4_columns(x_gK: Tensor, weight: Nvfp4Weight, fp4: Fp4Linear, spans: Sequence[Range]) -> Iterator[Tensor]:
    """The activation is quantised once; the weight's rows are cut in whole tiles of scales where it is big enough."""
    x_gK = prescaled(x_gK, weight)
    scale, rows = fp4.activation_scale(x_gK, weight), x_gK.shape[0]
    codes = fp4_codes(x_gK, scale, fp4.kernels) if rows else None
    for span in spans:
        if codes is None:
            yield x_gK.new_empty(0, span[1] - span[0])
            continue
        part = weight.slice(Slice(rows=(span,)))
        yield fp4_product(*codes, scale, part, fp4.kernels, x_gK.dtype)[:rows]
