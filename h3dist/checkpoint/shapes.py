"""Sizes out of a header: rows of tensors, and how many blocks there are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from h3dist.checkpoint.file import TensorInfo
from h3dist.errors import CheckpointError


def block_count(names: Mapping[str, TensorInfo], stem: str) -> int:
    """One more than the highest N of the names `stem`.N.…"""
    pattern = re.compile(re.escape(stem) + r"\.(\d+)\.")
    return max((int(match[1]) + 1 for name in names if (match := pattern.match(name))), default=0)


@dataclass(frozen=True)
class Shapes:
    """Sizes out of a header. Rows are safe in every format; columns of packed weights are refused."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def rows(self, name: str) -> int:
        shape = self._shape(name)
        if not shape:
            raise CheckpointError(f"{self.path}: {name} is a scalar")
        return shape[0]

    def cols(self, name: str) -> int:
        shape = self._shape(name)
        if len(shape) != 2 or self.tensors[name].dtype == "U8":
            raise CheckpointError(
                f"{self.path}: {name} is {self.tensors[name].dtype} {list(shape)}; its columns cannot be told"
            )
        return shape[1]

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: {name} is missing, and perhaps more")
        return self.tensors[name].shape
