"""The encoder's layers over stored weights: dense only while in use, so that memory holds the file's form.

Shapes: L rows of text, N outputs, K inputs, V vocabulary, C hidden.
"""

from torch import Tensor, nn
from torch.nn import functional

from h3dist.checkpoint.formats import Int8Weight, PlainWeight, Weight
from h3dist.errors import CheckpointError


class StoredLinear(nn.Module):
    """y = W (x * s) + b in x's dtype: W [N, K] made dense on every call, s [K] the pre-scale (AWQ) if any."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.stored = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        scale = self.stored.pre_quant_scale
        scaled = x if scale is None else x * scale.to(x.dtype)  # [..., L, K]
        return functional.linear(scaled, self.stored.dense(x.dtype), self.bias)


class StoredEmbedding(nn.Module):
    """Rows of a stored table [V, C] in float32; only the rows that are looked up are ever made dense."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        if not isinstance(weight, Int8Weight | PlainWeight):
            raise CheckpointError(
                f"an embedding stored as {type(weight).__name__} cannot be read by rows: "
                "it must be int8_tensorwise or unquantised"
            )
        self.stored = weight

    def forward(self, ids: Tensor) -> Tensor:
        if isinstance(self.stored, PlainWeight):
            return self.stored.tensor[ids].float()
        return self.stored.codes[ids].float() * self.stored.scale[ids]  # [..., L, C] * [..., L, 1]
