"""Weights of linear layers in memory: each format is a type that knows its shape and cuts itself legally.

Shapes: N rows (outputs), K columns (inputs). What a format looks like in a file is in `storage`; NVFP4 has
`nvfp4`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from h3dist.checkpoint.slices import Slice

DENSE_ELEMENTS = 1 << 24  # made at once when a matrix is made dense: 64 MiB of float32 a temporary


class Weight(ABC):
    """A matrix of logical `shape` (N, K) as it is stored; its subclasses are frozen dataclasses.

    `full_precision` forbids quantised arithmetic on the activations. A layer with `pre_quant_scale` [K]
    multiplies its input by that before anything else; None is no such scale. `input_scale` [] is a fixed
    scale of the activations.
    """

    shape: tuple[int, int]
    full_precision: bool
    input_scale: Tensor | None
    pre_quant_scale: Tensor | None

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] in `dtype`: computed in float32 and cast once."""

    @abstractmethod
    def slice(self, cut: Slice) -> Self:
        """The same format holding only a cut of this matrix."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensors take."""
        return sum(part.nbytes for part in self._tensors().values())

    def to(self, device: torch.device | str) -> Self:
        """The same weight on another device; from pinned memory to a GPU it goes while the host does other things.

        Only pinned memory is kept by torch until it is read; a GPU that shares the host's may read any other late too.
        """
        parts = self._tensors().items()
        return replace(self, **{name: part.to(device, non_blocking=part.is_pinned()) for name, part in parts})

    def _tensors(self) -> dict[str, Tensor]:
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


@dataclass(frozen=True, eq=False)
class PlainWeight(Weight):
    """An unquantised matrix [N, K]: bfloat16, float16 or float32."""

    tensor: Tensor
    full_precision: bool = True
    input_scale: None = None
    pre_quant_scale: None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.to(dtype)

    def slice(self, cut: Slice) -> PlainWeight:
        return PlainWeight(take(self.tensor, cut))


@dataclass(frozen=True, eq=False)
class RowScaledWeight(Weight):
    """W = codes * scale: codes of one byte, [N, K], and one float32 scale a row, [N, 1]."""

    codes: Tensor
    scale: Tensor
    full_precision: bool = False
    input_scale: Tensor | None = None
    pre_quant_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        def rows(start: int, stop: int) -> Tensor:
            return self.codes[start:stop].float() * self.scale[start:stop]

        return dense_by_rows(self.shape, dtype, self.codes.device, rows)

    def slice(self, cut: Slice) -> Self:
        codes = take(self.codes.view(torch.uint8), cut).view(self.codes.dtype)  # few operations know float8
        scale, pre_quant_scale = take(self.scale, Slice(rows=cut.rows)), take_cols(self.pre_quant_scale, cut)
        return replace(self, codes=codes, scale=scale, pre_quant_scale=pre_quant_scale)


class Int8Weight(RowScaledWeight):
    """Comfy's `int8_tensorwise`: the codes are int8."""


def take(matrix: Tensor, cut: Slice) -> Tensor:
    """A cut of a matrix [N, K], in memory of its own."""
    start, stop = cut.col_range(matrix.shape[1])
    rows = [matrix[a:b, start:stop] for a, b in cut.row_ranges(matrix.shape[0])]
    return torch.cat(rows) if rows else matrix[:0, start:stop].clone()


def take_cols(vector: Tensor | None, cut: Slice) -> Tensor | None:
    """A vector [K] of one value a column, cut as the columns are."""
    if vector is None:
        return None
    start, stop = cut.col_range(vector.shape[0])
    return vector[start:stop].clone()


def dense_by_rows(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, rows: Callable[[int, int], Tensor]
) -> Tensor:
    """A matrix in `dtype` from `rows(start, stop)` in float32, few rows at a time to bound memory."""
    count, width = shape
    step = max(1, DENSE_ELEMENTS // max(1, width))
    if step >= count:
        return rows(0, count).to(dtype)
    out = torch.empty(shape, dtype=dtype, device=device)
    for start in range(0, count, step):
        stop = min(count, start + step)
        out[start:stop] = rows(start, stop)
    return out
