"""Frames and sound into an MP4: H.264 and AAC, written as they come, interleaved, exact in length.

The picture is yuv420p in BT.709, limited range, converted and tagged so. Every frame and every sample has an
explicit time. Edit lists take the encoders' delays away, so frame 0 and sample 0 play at time 0. One build of
FFmpeg gives the same bytes twice, since the number of encoder threads, which changes the result, is fixed.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from h3dist.errors import MissingDependency, OutputError
from h3dist.geometry import AUDIO_RATE, FPS, audio_samples
from h3dist.media.boxes import read_layout
from h3dist.media.files import deleted_on_error, plain_errors
from h3dist.media.sound import cut_sound

if TYPE_CHECKING:
    import av

MOVIE_TIMESCALE = 96_000  # least common multiple of 24 and 32000: durations of both tracks come out whole
MUXER_OPTIONS = {"movflags": "+faststart", "movie_timescale": str(MOVIE_TIMESCALE)}
VIDEO_OPTIONS = {"preset": "medium", "crf": "18", "threads": "4"}
AUDIO_BITS_PER_SECOND = 192_000
BT709 = 1  # the code of primaries, transfer and matrix alike (ITU-T H.273)
LIMITED_RANGE = 1  # AVCOL_RANGE_MPEG


def write_mp4(
    path: str | Path,
    chunks: Iterable[Any],
    audio: Any | None,
    *,
    width: int,
    height: int,
    frames: int,
    metadata: Mapping[str, str],
) -> None:
    """Write `frames` pictures and their sound to `path` itself, which is removed where anything fails.

    `chunks` are uint8 [f, height, width, 3] RGB (tensors on the CPU or arrays), taken one at a time and not
    kept; `audio` is [2, M] at 32 kHz, cut as `sound.cut_sound` does, or None for a silent film. `metadata`
    maps names that MP4 players know ("title", "comment") to text.

    Raises NumericsError for NaN or infinity in the sound; OutputError where the chunks do not give exactly
    `frames` frames of that size, or the file cannot be written; whatever `chunks` raises.
    """
    sound = None if audio is None else cut_sound(audio, frames)
    with deleted_on_error(path):
        with _open(path, metadata) as container:
            film = _Film(container, sound, (height, width, 3), frames)
            for chunk in chunks:
                with plain_errors(path):
                    film.add(np.asarray(chunk))
            with plain_errors(path):
                film.finish()
        with plain_errors(path):
            _settle(path)


class _Film:
    """One film being written: the two encoders, and how many frames they have been given."""

    def __init__(
        self,
        container: "av.container.OutputContainer",
        sound: np.ndarray | None,
        shape: tuple[int, int, int],
        frames: int,
    ) -> None:
        self.container, self.sound, self.shape, self.frames = container, sound, shape, frames
        self.written = 0
        self.video = _video_stream(container, shape)
        self.audio = None if sound is None else _audio_stream(container)

    def add(self, chunk: np.ndarray) -> None:
        """Encode the frames of one chunk, uint8 [f, H, W, 3], each with the sound that plays during it."""
        if chunk.dtype != np.uint8 or chunk.shape[1:] != self.shape:
            raise OutputError(f"frames must be uint8 {self.shape}, these are {chunk.dtype} {chunk.shape[1:]}")
        if self.written + len(chunk) > self.frames:
            raise OutputError(f"{self.frames} frames were planned, {self.written + len(chunk)} or more came")
        for picture in chunk:
            self.container.mux(self.video.encode(_video_frame(picture, self.written)))
            self.written += 1
            if self.audio is not None:
                self._add_sound(audio_samples(self.written - 1), audio_samples(self.written))

    def _add_sound(self, start: int, stop: int) -> None:
        self.container.mux(self.audio.encode(_audio_frame(self.sound[:, start:stop], start)))

    def finish(self) -> None:
        """Empty the encoders and write the index. OutputError where frames are missing."""
        if self.written != self.frames:
            raise OutputError(f"{self.frames} frames were planned, {self.written} came")
        for stream in (self.video, self.audio):
            if stream is not None:
                self.container.mux(stream.encode(None))
        self.container.close()


@contextmanager
def _open(path: str | Path, metadata: Mapping[str, str]) -> Iterator["av.container.OutputContainer"]:
    """An MP4 container at `path`, closed on the way out, whatever state it is in."""
    import av

    with plain_errors(path):
        # An absolute path: FFmpeg reads "a:b.mp4" as a protocol named a.
        container = av.open(os.path.abspath(path), "w", format="mp4", options=MUXER_OPTIONS)
    container.metadata.update({name: _text(text) for name, text in metadata.items()})
    try:
        yield container
    finally:
        with suppress(OSError, av.FFmpegError):  # closing what already failed; a good film is closed by now
            container.close()


def _text(text: str) -> str:
    """Text as an MP4 can hold it: UTF-8, which a NUL would end."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\N{REPLACEMENT CHARACTER}")


def _add_stream(container: "av.container.OutputContainer", codec: str, **settings: Any) -> Any:
    import av

    try:
        return container.add_stream(codec, **settings)
    except av.codec.codec.UnknownCodecError as error:
        raise MissingDependency(f"this build of PyAV has no {codec} encoder: pip install av") from error


def _video_stream(container: "av.container.OutputContainer", shape: tuple[int, int, int]) -> Any:
    stream = _add_stream(container, "libx264", rate=FPS, options=VIDEO_OPTIONS)
    stream.height, stream.width = shape[:2]
    stream.pix_fmt = "yuv420p"
    codec = stream.codec_context
    codec.color_range = LIMITED_RANGE
    codec.color_primaries = codec.color_trc = codec.colorspace = BT709
    return stream


def _audio_stream(container: "av.container.OutputContainer") -> Any:
    return _add_stream(container, "aac", rate=AUDIO_RATE, layout="stereo", bit_rate=AUDIO_BITS_PER_SECOND)


def _video_frame(picture: np.ndarray, index: int) -> "av.VideoFrame":
    """Frame `index` as yuv420p from uint8 [H, W, 3]: really converted to BT.709, not just tagged."""
    import av

    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
    frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
    frame.pts, frame.time_base = index, Fraction(1, FPS)
    return frame


def _audio_frame(samples: np.ndarray, start: int) -> "av.AudioFrame":
    """Samples [2, n] that begin at sample `start`."""
    import av

    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = AUDIO_RATE, start, Fraction(1, AUDIO_RATE)
    return frame


def _settle(path: str | Path) -> None:
    """Force the file to disk, where late errors appear, and see that it is whole."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    try:
        read_layout(path)
    except ValueError as error:
        raise OutputError(f"cannot write {path}: {error}") from error
