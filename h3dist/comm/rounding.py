"""How far codes are from what they stand for, measured on a run: relative, in the 2-norm, of q, k, v and the output.

It is measured once, on the first attention that an exchange serves; later ones would cost as much again.
"""

from __future__ import annotations

from torch import Tensor

KINDS = {3: ("q", "k", "v"), 1: ("output",)}  # by their number in a packet


class Rounding:
    """Sums of squares of one rank's part, by kind: of the errors, and of the values."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._done = False

    @property
    def asks(self) -> bool:
        """Whether the first attention is not over yet."""
        return not self._done

    def add(self, sums_k2: Tensor) -> None:
        """Hears of a packet's kinds, float64: squared errors and squared values. The host does not wait for them."""
        for kind, pair in zip(KINDS[len(sums_k2)], sums_k2, strict=True):
            self._sums[kind] = self._sums.get(kind, 0) + pair

    def finish(self) -> None:
        """Says that the first attention is over."""
        self._done = True

    def sums(self) -> dict[str, tuple[float, float]]:
        """By kind: the sum of squared errors, and of squared values, so that ranks' sums can be added."""
        return {kind: tuple(pair.tolist()) for kind, pair in self._sums.items()}
