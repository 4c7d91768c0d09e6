"""The residual stream of one rank's rows, to which a half block's result is added with the norm that comes next.

Norm and addition read the same rows: together they take one pass over memory.

Shape letters: s this rank's rows; C hidden; R table rows.
"""

from __future__ import annotations

from torch import Tensor

from h3dist.model.elementwise import Elementwise, Runs


class Residual:
    """x_sC, which is changed in place, and a result y_sC that is still to be added, by its gates [R, C]."""

    def __init__(self, x_sC: Tensor, runs: Runs, between: Elementwise) -> None:
        self._x_sC, self._runs, self._between = x_sC, runs, between
        self._owed: tuple[Tensor, Tensor] | None = None

    def add(self, y_sC: Tensor, gates_RC: Tensor) -> None:
        """x += gate * y, with each run's own gate, when the stream is read next."""
        assert self._owed is None, "the result before was never read"
        self._owed = y_sC, gates_RC

    def modulated(self, norm_C: Tensor, table_RnC: Tensor) -> Tensor:
        """h_sC: the stream normed and modulated, with each run's own shift and factor."""
        if self._owed is None:
            return self._between.modulate(self._x_sC, norm_C, table_RnC, self._runs)
        (y_sC, gates_RC), self._owed = self._owed, None
        return self._between.add_modulate(self._x_sC, y_sC, gates_RC, norm_C, table_RnC, self._runs)

    def whole(self) -> Tensor:
        """x_sC with all that was added."""
        if self._owed is not None:
            self._between.add(self._x_sC, *self._owed, self._runs)
            self._owed = None
        return self._x_sC
