"""Films as people have them, into upright RGB frames at 24 a second, and their sound."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from h3dist.errors import RequestError
from h3dist.geometry import FPS, audio_samples
from h3dist.media.container import ALLOWED, Clock, check_codec, open_container, picture_track, read_clock, sound_track
from h3dist.media.sounds import MAX_SECONDS, count_samples, decode_sound, lead_of
from h3dist.media.source import Source, name_of
from h3dist.request import MediaFacts

if TYPE_CHECKING:
    import av

MAX_FRAME_PIXELS = 4096 * 2304
HALF = Fraction(1, 2)
HDR = {16: "PQ", 18: "HLG"}  # transfer characteristics of ITU-T H.273


@dataclass(frozen=True)
class Film:
    """frames uint8 [F, H, W, 3] at 24 a second; sound float32 [2, N] at 32 kHz, no longer than the film, or None."""

    frames: np.ndarray
    sound: np.ndarray | None


@dataclass(frozen=True)
class _Head:
    """What is known of a film before it is decoded. turn: how to put a frame upright."""

    facts: MediaFacts
    picture: Clock
    lead: int  # samples by which the sound begins after the picture
    turn: Callable[[np.ndarray], np.ndarray]
    scale: tuple[int, int]  # width and height of a frame with square pixels, before it is turned


def measure_film(source: Source, longest: float = MAX_SECONDS) -> MediaFacts:
    """Size, frames at 24 a second and samples of a film: header and packets are read, one frame is decoded.

    Raises RequestError for what is no film, for frames over 9.4 million pixels, for more than `longest` seconds.
    """
    return _head(source, longest).facts


def read_film(
    source: Source,
    longest: float = MAX_SECONDS,
    *,
    frames: int | None = None,
    fit: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Film:
    """A film of at most `longest` seconds: all that `measure_film` counts, or its first `frames`.

    `fit` takes each frame, uint8 [H, W, 3], as soon as it is decoded, so that no more than the fitted frames
    are held. The sound is the whole film's, whatever frames are kept. Raises RequestError, for a damaged file too.
    """
    head = _head(source, longest)
    count = head.facts.frames if frames is None else min(frames, head.facts.frames)
    film: np.ndarray | None = None
    for place, picture in enumerate(_frames(source, head, count)):
        picture = picture if fit is None else fit(picture)
        film = np.empty((count, *picture.shape), np.uint8) if film is None else film
        film[place] = picture
    assert film is not None
    return Film(film, _sound(source, head))


def film_frames(source: Source, longest: float = MAX_SECONDS) -> Iterator[np.ndarray]:
    """The frames that `read_film` gives, one by one: uint8 [H, W, 3]."""
    head = _head(source, longest)
    return _frames(source, head, head.facts.frames)


def film_sound(source: Source, longest: float = MAX_SECONDS) -> np.ndarray | None:
    """The sound that `read_film` gives."""
    return _sound(source, _head(source, longest))


def _frames(source: Source, head: _Head, count: int) -> Iterator[np.ndarray]:
    """`count` frames on the grid of 24 a second: of those nearest to a place the last, held until the next."""
    made, start, held = 0, None, None
    with open_container(source, "a film") as container:
        track = picture_track(container)
        for index, frame in enumerate(container.decode(track)):
            time = frame.pts * frame.time_base if frame.pts is not None else index / Fraction(track.guessed_rate)
            start = time if start is None else start
            place = min(count, int((time - start) * FPS + HALF))
            if held is not None and made < place:
                picture = _picture(held, head)
                yield from (picture for _ in range(place - made))
                made = place
            held = frame
            if made == count:
                return
        if held is None:
            raise RequestError(f"{name_of(source)}: not a film that can be read: no frame comes out of it")
        picture = _picture(held, head)
        yield from (picture for _ in range(count - made))


def _picture(frame: "av.VideoFrame", head: _Head) -> np.ndarray:
    """uint8 [H, W, 3], upright, with square pixels."""
    width, height = head.scale
    return np.ascontiguousarray(head.turn(frame.to_ndarray(format="rgb24", width=width, height=height)))


def _sound(source: Source, head: _Head) -> np.ndarray | None:
    if not head.facts.samples:
        return None
    with open_container(source, "a film") as container:
        return decode_sound(container, sound_track(container), source, head.facts.samples, head.lead)


def _head(source: Source, longest: float) -> _Head:
    """Everything about a film that its header, its packets and its first frame tell."""
    with open_container(source, "a film") as container:
        track = picture_track(container)
        if track is None:
            raise RequestError(f"{name_of(source)}: holds no moving pictures; allowed are {ALLOWED}")
        check_codec(track, source)
        if track.width * track.height > MAX_FRAME_PIXELS:
            raise RequestError(
                f"{name_of(source)}: frames of {track.width} x {track.height} pixels; at most "
                f"{MAX_FRAME_PIXELS} pixels are read, as of 4096 x 2304"
            )
        clock = read_clock(container, track, source, longest)
    frames = max(1, int(clock.seconds * FPS + HALF))
    with open_container(source, "a film") as container:
        first = next(iter(container.decode(picture_track(container))), None)
        if first is None:
            raise RequestError(f"{name_of(source)}: not a film that can be read: no frame comes out of it")
        turn, scale = _turn(first, source), _square(first, picture_track(container))
        notes = tuple(_notes(container, first, source))
    height, width = turn(np.empty((scale[1], scale[0], 0))).shape[:2]
    samples, lead = _measure_sound(source, clock, frames)
    return _Head(MediaFacts("film", width, height, frames, samples, notes), clock, lead, turn, scale)


def _measure_sound(source: Source, picture: Clock, frames: int) -> tuple[int, int]:
    """How many samples play while the picture does, and the lead of the sound; 0 and 0 for a silent film."""
    with open_container(source, "a film") as container:
        track = sound_track(container)
        if track is None:
            return 0, 0
        clock = read_clock(container, track, source, MAX_SECONDS)
    lead = lead_of(clock, picture)
    return max(0, min(count_samples(clock) + lead, audio_samples(frames))), lead


def _turn(frame: "av.VideoFrame", source: Source) -> Callable[[np.ndarray], np.ndarray]:
    """What puts a frame upright: the display matrix (x, y) -> (a x + c y, b x + d y), y down, of quarter turns."""
    found = [bytes(data) for data in frame.side_data if data.type.name == "DISPLAYMATRIX"]
    a, b, c, d = np.frombuffer(found[0], np.int32)[[0, 1, 3, 4]] / 65536 if found else (1, 0, 0, 1)
    upright = {(1, 0, 0, 1), (-1, 0, 0, 1), (1, 0, 0, -1), (-1, 0, 0, -1)}
    sideways = {(0, 1, 1, 0), (0, -1, 1, 0), (0, 1, -1, 0), (0, -1, -1, 0)}
    matrix = tuple(round(float(value)) for value in (a, b, c, d))
    if matrix not in upright | sideways:
        raise RequestError(f"{name_of(source)}: turned by {frame.rotation} degrees; quarter turns are allowed")

    def turn(picture: np.ndarray) -> np.ndarray:
        swapped = matrix in sideways
        picture = picture.swapaxes(0, 1) if swapped else picture  # x from y, and y from x
        across, down = (matrix[2], matrix[1]) if swapped else (matrix[0], matrix[3])
        return picture[::down, ::across]

    return turn


def _square(frame: "av.VideoFrame", track: Any) -> tuple[int, int]:
    """A frame's width and height once its pixels are square."""
    aspect = track.sample_aspect_ratio or 1
    return max(1, round(frame.width * aspect)), frame.height


def _notes(container: "av.container.InputContainer", frame: "av.VideoFrame", source: Source) -> Iterator[str]:
    name = name_of(source)
    if int(frame.color_trc) in HDR:
        yield f"{name}: its {HDR[int(frame.color_trc)]} high dynamic range is taken as it stands, without tone mapping"
    if len(container.streams.audio) > 1:
        yield f"{name}: of {len(container.streams.audio)} sound tracks, the first is used"
