"""How rows of heads lie on the wire: as they are, or as int8 codes with a scale for each few rows of a head.

A piece is what one rank sends to another: [r, k, n, D], its kinds being q, k and v, or the output alone.

Shape letters: r rows of a piece, k kinds, n heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from h3dist.comm.forms import Forms, Kinds, Turn, coded_count
from h3dist.comm.pieces import Places
from h3dist.comm.rounding import Rounding


class Codec(Protocol):
    """Lays a packet's pieces on the wire and takes them off it."""

    def room(self, like: Tensor, count: int) -> Tensor:
        """Flat, `count` elements of the wire's dtype, on the device of `like`; nothing is in it yet."""

    def count(self, shape: Sequence[int]) -> int:
        """Elements of a piece of this shape on the wire."""

    def write(self, packet: Tensor, places: Places, kinds: Kinds, turn: Turn) -> None:
        """Lays pieces of the kinds in a packet, turned: on their way, or before, where they lie."""

    def read(self, packet: Tensor, places: Places, kinds: Kinds) -> None:
        """Takes pieces off the wire, into the kinds."""


class Plain:
    """Every element as it is. Consecutive pieces of the same heads are one tensor as they lie."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms

    def room(self, like: Tensor, count: int) -> Tensor:
        return like.new_empty(count)

    def count(self, shape: Sequence[int]) -> int:
        return prod(shape)

    def write(self, packet: Tensor, places: Places, kinds: Kinds, turn: Turn) -> None:
        turn.lay(kinds, places, packet)

    def read(self, packet: Tensor, places: Places, kinds: Kinds) -> None:
        self._forms.take(packet, places, kinds)


class Int8:
    """Codes and scales as `forms` has them.

    It is approximate, and `rounding` hears by how much. A value that is not finite makes its block so: none is hidden.
    """

    def __init__(self, rounding: Rounding, forms: Forms) -> None:
        self._rounding, self._forms = rounding, forms

    def room(self, like: Tensor, count: int) -> Tensor:
        return like.new_empty(count, dtype=torch.int8)

    def count(self, shape: Sequence[int]) -> int:
        return coded_count(shape)

    def write(self, packet: Tensor, places: Places, kinds: Kinds, turn: Turn) -> None:
        encode = turn.encode
        if encode is None:
            turn.lay(kinds, places, None)
            encode = self._forms.encode
        sums = encode(packet, places, kinds, self._rounding.asks)
        if sums is not None:
            self._rounding.add(sums)

    def read(self, packet: Tensor, places: Places, kinds: Kinds) -> None:
        self._forms.decode(packet, places, kinds)
