"""A linear layer whose stored weight is made dense for one product and dropped, so at most one is dense at a time.

Shape letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from h3dist.checkpoint.formats import Weight

# (x_MK, weight [N, K]) -> y_MN in x's dtype. A function of this kind is passed into the model.
Linear = Callable[[Tensor, Weight], Tensor]


def dense_linear(x_MK: Tensor, weight: Weight) -> Tensor:
    """y_MN = x W^T with the weight made dense in x's dtype for this call alone."""
    return F.linear(prescaled(x_MK, weight), weight.dense(x_MK.dtype))


def prescaled(x_MK: Tensor, weight: Weight) -> Tensor:
    """The activation times the layer's `pre_quant_scale`, where it has one."""
    if weight.pre_quant_scale is None:
        return x_MK
    return x_MK * weight.pre_quant_scale.to(x_MK.dtype)
