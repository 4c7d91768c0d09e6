"""A rank's part of a matrix: which rows and which columns, as plain arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class Slice:
    """Rows in the order they are wanted, and one run of columns; None is all of them."""

    rows: tuple[Range, ...] | None = None
    cols: Range | None = None

    def row_ranges(self, count: int) -> tuple[Range, ...]:
        """The ranges of rows, of a matrix of `count` rows; neighbours are joined."""
        ranges = merge(self.rows) if self.rows is not None else ((0, count),)
        assert all(0 <= start <= stop <= count for start, stop in ranges), (ranges, count)
        return ranges

    def col_range(self, count: int) -> Range:
        """The range of columns, of a matrix of `count` columns."""
        start, stop = self.cols if self.cols is not None else (0, count)
        assert 0 <= start <= stop <= count, (self.cols, count)
        return start, stop

    def shape(self, full: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that are left of a matrix of shape `full`."""
        start, stop = self.col_range(full[1])
        return length(self.row_ranges(full[0])), stop - start


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same rows in the same order: no empty ranges, and each range joined to one that it follows on."""
    joined: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def length(ranges: Iterable[Range]) -> int:
    """How many rows the ranges hold together."""
    return sum(stop - start for start, stop in ranges)
