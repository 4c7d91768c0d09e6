"""How keyframes and references are cut for the video VAE's encoder: clips of 17 frames, or a still, and each in tiles.

Standard library only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from h3dist.conditions import Condition
from h3dist.geometry import CHUNK_FRAMES, CHUNK_LATENTS, LATENT_PIXELS
from h3dist.tiles import TILE_PIXELS, Axis, cut_axis

WHOLE = CHUNK_FRAMES * TILE_PIXELS**2  # pixels of a whole tile of a clip


@dataclass(frozen=True)
class Clip:
    """`frames` frames of a condition from `start` on, 17 or one; the last one stands for those past the end."""

    condition: int  # its place among all conditions
    start: int
    frames: int
    rows: Axis
    cols: Axis

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The upper left corner of every tile, in serial order."""
        return tuple((top, left) for top in self.rows.starts for left in self.cols.starts)

    @property
    def tile(self) -> tuple[int, int, int, int]:
        """The shape of one tile's pixels, [f, y, x, 3]."""
        return self.frames, self.rows.size, self.cols.size, 3

    def latents(self, channels: int) -> tuple[int, int, int, int]:
        """The shape of one tile's moments, [2 channels, t, h, w]."""
        time = CHUNK_LATENTS if self.frames > 1 else 1
        return 2 * channels, time, self.rows.size // LATENT_PIXELS, self.cols.size // LATENT_PIXELS

    @property
    def cost(self) -> float:
        """Of one tile, in whole tiles of 17 frames."""
        return prod(self.tile[:3]) / WHOLE


def cut_clips(conditions: Sequence[Condition]) -> tuple[Clip, ...]:
    """The clips of every condition that has a picture, in serial order."""
    return tuple(
        Clip(place, start, 1 if one.frames == 1 else CHUNK_FRAMES, cut_axis(one.height), cut_axis(one.width))
        for place, one in enumerate(conditions)
        for start in range(0, one.frames, CHUNK_FRAMES)
    )
