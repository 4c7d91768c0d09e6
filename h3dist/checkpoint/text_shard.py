"""A rank's part of the text encoder's decoder layers: which rows of each linear, and what of the file that is.

All its cuts are of rows, outputs, so that no sum is ever split. Shapes: H query heads, G key and value heads, D head
size, F the MLP's width, C hidden. Arithmetic only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from h3dist.checkpoint.slices import Range, Slice
from h3dist.checkpoint.storage import ALL, Storage
from h3dist.checkpoint.text_names import TextDims

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import StateFile

LAYERS = "model.layers."


@dataclass(frozen=True)
class TextShare:
    """One rank's part of every decoder layer, as spans; any may be empty.

    heads: query heads, of H. ffn: columns of the MLP's inside, of F. hidden: columns of what attention and the MLP
    give, of C.
    """

    heads: Range
    ffn: Range
    hidden: Range


def kv_span(dims: TextDims, heads: Range) -> Range:
    """The key and value heads that these query heads attend to; H / G neighbours share one."""
    group = dims.heads // dims.kv_heads
    return (heads[0] // group, -(-heads[1] // group)) if heads[0] < heads[1] else (0, 0)


def text_slices(dims: TextDims, share: TextShare) -> dict[str, Slice]:
    """The rows of each linear of a decoder layer that a rank holds, by the end of its name."""
    size = dims.head_dim
    queries, keys = (_rows(span, size) for span in (share.heads, kv_span(dims, share.heads)))
    ffn, hidden = _rows(share.ffn), _rows(share.hidden)
    return {
        "self_attn.q_proj": queries,
        "self_attn.k_proj": keys,
        "self_attn.v_proj": keys,
        "self_attn.o_proj": hidden,
        "mlp.gate_proj": ffn,
        "mlp.up_proj": ffn,
        "mlp.down_proj": hidden,
    }


def _rows(span: Range, size: int = 1) -> Slice:
    return Slice(rows=((span[0] * size, span[1] * size),))


@dataclass(frozen=True)
class TextStored:
    """What a plan must know of a text encoder's file. Bytes are those that reading asks of it.

    linears: the end of each decoder linear's name, how it lies, and in how many layers it lies so. norms: bytes of the
    layers' other tensors. front: of the embedding and the vision tower, which come before the layers.
    """

    dims: TextDims
    linears: tuple[tuple[str, Storage, int], ...]
    norms: int
    front: int

    @classmethod
    def of(cls, state: StateFile) -> TextStored:
        """As an opened file says."""
        layers = [name for name in state.linears if name.startswith(LAYERS)]
        found = Counter((_end(name), state.linears[name].storage) for name in layers)
        weights = {f"{name}.weight" for name in layers}
        others = {name: state.tensor_bytes(name) for name in state.table if name not in weights}
        norms = sum(count for name, count in others.items() if name.startswith(LAYERS))
        linears = tuple((end, storage, count) for (end, storage), count in found.items())
        return cls(state.dims, linears, norms, sum(others.values()) - norms)

    def layer_bytes(self, slices: Mapping[str, Slice]) -> int:
        """Bytes of all decoder layers, of each linear the rows in `slices`."""
        return self.norms + sum(count * storage.nbytes(slices.get(end, ALL)) for end, storage, count in self.linears)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.front + self.layer_bytes({})


def _end(layer: str) -> str:
    return layer.removeprefix(LAYERS).split(".", 1)[1]
