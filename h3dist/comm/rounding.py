"""How far codes are from what they stand for, measured on a run: relative, in the 2-norm, of q, k, v and the output.

It is measured once, on the first attention that an exchange serves; later ones would cost as much again.
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = {3: ("q", "k", "v"), 1: ("output",)}  # by their number in a piece


class Rounding:
    """Sums of squares of one rank's part, by kind: of the errors, and of the values."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._done = False

    def add(self, x_rknD: Tensor, codes_rknD: Tensor, scale_rkn1: Tensor) -> None:
        """Hears of a piece [r, kinds, n, D] and of its codes. The host does not wait for the device."""
        if self._done:
            return
        errors = (codes_rknD * scale_rkn1 - x_rknD).double().square().sum((0, 2, 3))
        values = x_rknD.double().square().sum((0, 2, 3))
        for kind, pair in zip(KINDS[x_rknD.shape[1]], torch.stack((errors, values), dim=1), strict=True):
            self._sums[kind] = self._sums.get(kind, 0) + pair

    def finish(self) -> None:
        """Says that the first attention is over."""
        self._done = True

    def sums(self) -> dict[str, tuple[float, float]]:
        """By kind: the sum of squared errors, and of squared values, so that ranks' sums can be added."""
        return {kind: tuple(pair.tolist()) for kind, pair in self._sums.items()}
