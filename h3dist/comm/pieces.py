"""How an all-to-all is cut: what each rank sends to each, where that lies in what each of them gets, and what it is of.

A packet is what a rank sends, or gets, in one move: its pieces end to end, each [rows, kinds, heads, D] of consecutive
rows and heads of as many tensors as there are kinds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from h3dist.plan import Span


@dataclass(frozen=True)
class Place:
    """Where a piece begins in its packet, in elements of the wire, and its rows and heads of each kind's tensor."""

    at: int
    rows: Span
    heads: Span


Places = tuple[Place, ...]


def everything(rows: int, heads: int) -> Places:
    """All rows and heads as one piece."""
    return (Place(0, (0, rows), (0, heads)),)


def places(counts: Sequence[int], rows: Sequence[Span], heads: Sequence[Span]) -> Places:
    """Those of pieces of so many elements, end to end."""
    begins = accumulate(counts[:-1], initial=0)
    return tuple(Place(*each) for each in zip(begins, rows, heads, strict=True))


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
