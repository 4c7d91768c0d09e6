"""What an exchange in groups of heads leaves in the open, and what its cuts cost. Pure; imports no torch.

While attention works on one group the next one comes and the last one goes back. The link is one: what it carries
beside attention is hidden as long as attention lasts.

    exposed = first way there + last way back + whatever of the rest exceeds attention

With one group that is all of it. Groups are cut raggedly, the larger first. What comes beside attention slows it, as
`rates.LinkRates` says of each link; a cut into groups costs it the end of a wave a group, as below.
"""

from math import ceil

from h3dist.plan.layout import split_ragged

TILE_ROWS = 128  # rows of q that one unit of a device attends to at a time: flash kernels at head size 128
GROUP_LAUNCH = 0.1  # of a block's launches that one more group adds: some 6 of 60


def group_sizes(heads: int, groups: int) -> tuple[int, ...]:
    """Heads of each group, as many groups as there are heads for: 9 in 4 is 3, 2, 2, 2."""
    return tuple(stop - start for start, stop in split_ragged(heads, min(groups, heads)))


def exposed(there: float, back: float, attention: float, first: float, last: float) -> float:
    """Seconds of an exchange that attention does not hide.

    `there` and `back` are the whole ways, in seconds; `first` of the way there is before any attention and `last` of
    the way back after all of it, both as parts of 1.
    """
    open_ends = there * first + back * last
    return open_ends + max(0.0, there + back - open_ends - attention)


def wave_loss(rows: int, heads: int, groups: int, units: float) -> float:
    """How many times as long attention takes in groups: each waits for its own last wave of tiles over `units`.

    1 for one group, and where the number of units (0) is not known.
    """
    if not units:
        return 1.0
    tiles = ceil(rows / TILE_ROWS)
    waves = [ceil(size * tiles / units) for size in group_sizes(heads, groups)]
    return sum(waves) / ceil(heads * tiles / units)
