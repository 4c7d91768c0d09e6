"""What ranks that encode together ask of each other.

Shape letters: L text rows, n own columns, N those of all ranks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from h3dist.comm.pieces import Pieces
from h3dist.comm.wire import Wire

LAST = "encode.hidden"


class RankEncoding:
    """One rank's ties to the other ranks of its request, while they encode together."""

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire, self._device = wire, device

    def spread(self, rows: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """The first rank's float32 `rows`, of `shape`, on every rank and its device; the others give None."""
        given = torch.empty(shape, device=self._device) if rows is None else rows
        assert given.shape == shape and given.dtype == torch.float32, (given.shape, given.dtype, shape)
        return self._wire.broadcast("encode.inputs", given)

    def join(self, label: str, mine_Ln: Tensor, widths: Sequence[int]) -> Tensor:
        """x_LN: every rank's columns side by side, in the order of the ranks; `widths` are their numbers.

        Pieces travel as wide as the widest.
        """
        rows, most = mine_Ln.shape[0], max(widths)
        assert mine_Ln.shape[1] == widths[self._wire.group.index], (mine_Ln.shape, widths)
        pieces = self._wire.all_gather(label, pad(mine_Ln, (0, most - mine_Ln.shape[1])))
        return torch.cat([piece[:, :width] for piece, width in zip(pieces.split(rows), widths, strict=True)], dim=1)

    def hand_out(
        self, label: str, pieces: Tensor | None, counts: Sequence[int], dtype: torch.dtype
    ) -> Callable[[], Tensor]:
        """Begins to send flat `pieces`, which the first rank alone has, end to end for the ranks behind it.

        All ranks call it with one `counts`, the elements for each, none for the first. It returns at once; what it
        gives, once called, waits, and gives a rank's own elements on its device.
        """
        group, nothing = self._wire.group, [0] * len(counts)
        assert counts[0] == 0 and (pieces is None) == bool(group.index), (counts, group.index)
        if pieces is not None:
            return self._wire.all_to_all_later(label, pieces.to(self._device, dtype), Pieces(counts, nothing))
        empty = torch.empty(0, dtype=dtype, device=self._device)
        return self._wire.all_to_all_later(label, empty, Pieces(nothing, [counts[group.index], *nothing[1:]]))

    def settle(self) -> None:
        """Returns once all that was begun is done, or raises what stopped it."""
        self._wire.settle(LAST)
