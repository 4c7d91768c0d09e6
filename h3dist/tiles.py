"""Where a latent video is cut for decoding: tiles in space, chunks in time, and the jobs of both.

Arithmetic alone (no torch), so that a plan can count jobs and any rank can be given any of them. The numbers
are those of the released model (Comfy checkpoint format, video VAE; diffusers `AutoencoderKLMiniMaxH3`):
tiles of 256 pixels that overlap by at least 64, chunks of 7 latents of which the next takes the last 2 again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from h3dist.errors import RequestError
from h3dist.geometry import CHUNK_FRAMES, CHUNK_LATENTS, LATENT_PIXELS, TAIL_FRAMES, TAIL_LATENTS

TILE_PIXELS = 256
MIN_OVERLAP = 64  # pixels

RAW_FRAMES = 4  # frames that the decoder gives for a latent, 28 for the 7 of a chunk
HEAD = slice(3, CHUNK_LATENTS * RAW_FRAMES)  # of those: the chunk's own 17
TAIL = slice(HEAD.stop + 3, (CHUNK_LATENTS + TAIL_LATENTS) * RAW_FRAMES)  # and the 5 of its tail


@dataclass(frozen=True)
class Axis:
    """Tiles along one axis, in pixels: all `size` long; `overlaps[i]` is shared by tiles i and i + 1."""

    starts: tuple[int, ...]
    size: int
    overlaps: tuple[int, ...]

    def latents(self, index: int) -> tuple[int, int]:
        """The half-open range of latents under tile `index`."""
        start = self.starts[index] // LATENT_PIXELS
        return start, start + self.size // LATENT_PIXELS

    def in_latents(self) -> "Axis":
        """The same tiles with all lengths counted in latents."""
        starts, overlaps = (
            tuple(pixels // LATENT_PIXELS for pixels in lengths) for lengths in (self.starts, self.overlaps)
        )
        return Axis(starts, self.size // LATENT_PIXELS, overlaps)


@dataclass(frozen=True)
class Chunk:
    """Seven latent frames decoded together, and how many finished frames they give."""

    latents: tuple[int, ...]  # the last one is repeated where the video has no more
    frames: int


@dataclass(frozen=True)
class Job:
    """One call of the decoder: which latent frames, and which half-open ranges of latent rows and columns."""

    latents: tuple[int, ...]
    rows: tuple[int, int]
    cols: tuple[int, int]


@dataclass(frozen=True)
class Cuts:
    """How one latent video is cut; `jobs()` come in the order in which their results are blended."""

    chunks: tuple[Chunk, ...]
    rows: Axis
    cols: Axis

    def jobs(self) -> Iterator[Job]:
        """Every job: chunk by chunk, tile row by tile row, left to right."""
        for chunk in self.chunks:
            for row in range(len(self.rows.starts)):
                for col in range(len(self.cols.starts)):
                    yield Job(chunk.latents, self.rows.latents(row), self.cols.latents(col))

    @property
    def tiles(self) -> int:
        """Tiles of a chunk."""
        return len(self.rows.starts) * len(self.cols.starts)

    def calls(self, batch: int) -> Iterator[list[Job]]:
        """The jobs in the same order, `batch` at a time; a chunk's last ones may be fewer."""
        jobs = self.jobs()
        for _ in self.chunks:
            for begin in range(0, self.tiles, batch):
                yield list(islice(jobs, min(batch, self.tiles - begin)))


def cut_axis(length: int) -> Axis:
    """The fewest 256-pixel tiles that cover `length` pixels with overlaps of 64 or more.

    What they cover too much is spread over the overlaps a latent (16 pixels) at a time, round robin from the
    first, so that every tile starts on a latent (Comfy checkpoint format, video VAE).
    """
    if length <= TILE_PIXELS:
        return Axis((0,), length, ())
    stride = TILE_PIXELS - MIN_OVERLAP
    seams = -(-(length - TILE_PIXELS) // stride)
    surplus = (TILE_PIXELS + seams * stride - length) // LATENT_PIXELS
    share, extra = divmod(surplus, seams)
    overlaps = tuple(MIN_OVERLAP + LATENT_PIXELS * (share + (seam < extra)) for seam in range(seams))
    starts = [0]
    for overlap in overlaps:
        starts.append(starts[-1] + TILE_PIXELS - overlap)
    return Axis(tuple(starts), TILE_PIXELS, overlaps)


def even_batch(tiles: int, most: int) -> int:
    """How many of a chunk's tiles to decode in a call: the fewest that need no more calls than `most` would."""
    calls = -(-tiles // most)
    return -(-tiles // calls)


def cut_time(latent_t: int) -> tuple[Chunk, ...]:
    """The chunks of a video of 5k + 2 latent frames: each gives 17 frames, the last its tail of 5 as well.

    Two latents (k = 0) fill one chunk by repeating the last; only the first 5 frames of it are kept.

    Raises RequestError for any other number of latent frames.
    """
    count, rest = divmod(latent_t - TAIL_LATENTS, CHUNK_LATENTS)
    if rest or count < 0:
        low = max(count, 0) * CHUNK_LATENTS + TAIL_LATENTS
        raise RequestError(
            f"{latent_t} latent frames cannot be decoded: a video has 5k + 2 of them, for example {low} or "
            f"{low + CHUNK_LATENTS}"
        )
    if count == 0:
        return (Chunk(_window(0, latent_t), TAIL_FRAMES),)
    frames = [CHUNK_FRAMES] * (count - 1) + [CHUNK_FRAMES + TAIL_FRAMES]
    return tuple(Chunk(_window(index, latent_t), given) for index, given in enumerate(frames))


def cut_video(latent_t: int, latent_h: int, latent_w: int) -> Cuts:
    """How a latent video [24, T, h, w] is cut. Raises RequestError where T is not 5k + 2."""
    return Cuts(cut_time(latent_t), cut_axis(latent_h * LATENT_PIXELS), cut_axis(latent_w * LATENT_PIXELS))


def _window(index: int, latent_t: int) -> tuple[int, ...]:
    start = index * CHUNK_LATENTS
    return tuple(min(latent, latent_t - 1) for latent in range(start, start + CHUNK_LATENTS + TAIL_LATENTS))
