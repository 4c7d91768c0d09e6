"""How an all-to-all is cut: what each rank sends to each, and where that lies in what each of them gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pieces:
    """The pieces of one rank, in elements, by rank of the group, its own among them.

    `at`: where its piece begins in what each of them gets. Empty where nobody has to know: such pieces are not copied.
    """

    out: Sequence[int]  # to each
    into: Sequence[int]  # from each
    at: Sequence[int] = ()

    @classmethod
    def among(cls, count: Callable[[int, int], int], size: int, index: int) -> "Pieces":
        """Those of rank `index` among `size`, where `count(sender, receiver)` are the elements between two."""
        ranks = range(size)
        return cls(
            out=tuple(count(index, peer) for peer in ranks),
            into=tuple(count(peer, index) for peer in ranks),
            at=tuple(sum(count(before, peer) for before in range(index)) for peer in ranks),
        )

    @property
    def unplaced(self) -> "Pieces":
        """The same, for whoever need not know where they begin."""
        return Pieces(self.out, self.into)
