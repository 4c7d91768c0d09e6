"""Films and sound files opened by FFmpeg, and the clock of a track, without decoding it.

Only formats that hold media are opened: no playlists, which would name other files, and no text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from h3dist.errors import RequestError
from h3dist.media.source import Source, name_of, opened, plain_reading

if TYPE_CHECKING:
    import av

FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,ogg,wav,w64,flac,mp3,aac,aiff,asf,flv,gif,caf,amr,ac3,eac3"
)
ALLOWED = "MP4, MOV, WebM, MKV, AVI, GIF, WAV, MP3, M4A, FLAC, OGG and their like"
MISSING_END = Fraction(1, 2)  # seconds that a file may end before its header says


@dataclass(frozen=True)
class Clock:
    """When a track plays, in seconds: `start` of its first packet, `stop` after its last."""

    start: Fraction
    stop: Fraction

    @property
    def seconds(self) -> Fraction:
        """How long it plays."""
        return self.stop - self.start


@contextmanager
def open_container(source: Source, what: str) -> Iterator["av.container.InputContainer"]:
    """The container of a source. Raises RequestError; so does what fails to decode while it is open."""
    import av

    options = {"format_whitelist": FORMATS}
    with (
        opened(source) as file,
        plain_reading(source, what, ALLOWED),
        av.open(file, options=options) as container,
    ):
        yield container


def picture_track(container: "av.container.InputContainer") -> Any | None:
    """The first track of moving pictures, None where there is none; a cover picture is none."""
    import av

    cover = av.stream.Disposition.attached_pic
    return next((stream for stream in container.streams.video if not stream.disposition & cover), None)


def sound_track(container: "av.container.InputContainer") -> Any | None:
    """The first track of sound, None where there is none."""
    return next(iter(container.streams.audio), None)


def check_codec(track: Any, source: Source) -> None:
    """Raise RequestError for a track that nothing here decodes."""
    if track.codec_context is None:
        raise RequestError(f"{name_of(source)}: its {track.type} is in a codec that this build of PyAV does not know")


def read_clock(container: "av.container.InputContainer", track: Any, source: Source, longest: float) -> Clock:
    """When a track plays, from the header and then from its packets, which are read and not decoded.

    Raises RequestError for a track in an unknown codec, that is longer than `longest` seconds, that has no
    packets, or that ends before its header says.
    """
    check_codec(track, source)
    said = told_seconds(container, track)
    if said is not None:
        _check_longest(source, said, longest)
    start = stop = None
    step = _usual_step(track)
    for packet in container.demux(track):
        if packet.size == 0 or packet.is_discard:
            continue
        time = packet.pts if packet.pts is not None else packet.dts
        time = time * packet.time_base if time is not None else (stop or Fraction(0))
        start = time if start is None else min(start, time)
        ends = time + (packet.duration * packet.time_base if packet.duration else step)
        stop = ends if stop is None else max(stop, ends)
        _check_longest(source, stop - start, longest)
    if start is None:
        raise RequestError(f"{name_of(source)}: its {track.type} track is empty")
    return _settled(track, Clock(start, stop), source)


def told_seconds(container: "av.container.InputContainer", track: Any) -> Fraction | None:
    """How long a track plays by the header, else how long its file does; None where neither is told."""
    if track.duration:
        return track.duration * track.time_base
    return Fraction(container.duration, 10**6) if container.duration else None


def _settled(track: Any, clock: Clock, source: Source) -> Clock:
    """The packets' clock, ended where the header ends the track; a codec's whole blocks reach beyond."""
    if track.duration is None or track.start_time is None:
        return clock
    start = max(clock.start, track.start_time * track.time_base)
    stop = start + track.duration * track.time_base
    if clock.stop < stop - MISSING_END:
        raise RequestError(
            f"{name_of(source)}: its {track.type} ends at {float(clock.seconds):.2f} s of the "
            f"{float(stop - start):.2f} s that its header says; the file is not whole"
        )
    return Clock(start, min(clock.stop, stop))


def _check_longest(source: Source, seconds: Fraction, longest: float) -> None:
    if seconds > longest:
        raise RequestError(f"{name_of(source)}: lasts {float(seconds):.2f} s or more; at most {longest:g} s are read")


def _usual_step(track: Any) -> Fraction:
    """Seconds of one packet where it does not say."""
    if track.type == "video":
        rate = track.average_rate or track.guessed_rate
        return 1 / Fraction(rate) if rate else Fraction(1, 24)
    frame = track.codec_context.frame_size
    return Fraction(frame, track.rate) if frame and track.rate else Fraction(0)
