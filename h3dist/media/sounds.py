"""Sound as people have it, into stereo at 32 kHz, resampled by FFmpeg's own resampler."""

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from h3dist.errors import RequestError
from h3dist.geometry import AUDIO_RATE, SAMPLES_PER_AUDIO_LATENT, SOUND_CHANNELS
from h3dist.media.container import ALLOWED, Clock, open_container, read_clock, sound_track
from h3dist.media.source import Source, name_of
from h3dist.request import MediaFacts

if TYPE_CHECKING:
    import av

MAX_SECONDS = 600.0  # of any sound or film that is opened
MISSING = AUDIO_RATE // 4  # samples by which a decoder may stay behind the header: a codec's delay


def measure_sound(source: Source, longest: float = MAX_SECONDS) -> MediaFacts:
    """How many samples `read_sound` gives, without decoding any. Raises RequestError."""
    with open_container(source, "sound") as container:
        track = _track(container, source)
        samples = count_samples(read_clock(container, track, source, longest))
        notes = _notes(container, source)
    if samples < SAMPLES_PER_AUDIO_LATENT:
        raise RequestError(f"{name_of(source)}: {samples} samples at 32 kHz; at least {SAMPLES_PER_AUDIO_LATENT}")
    return MediaFacts("sound", samples=samples, notes=notes)


def read_sound(source: Source, samples: int | None = None) -> np.ndarray:
    """The sound of a source, float32 [2, N] at 32 kHz: all that `measure_sound` counts, or its first `samples`.

    One channel is given twice, unattenuated; more than two are mixed down. Raises RequestError, for a damaged
    file too.
    """
    whole = measure_sound(source).samples
    wanted = whole if samples is None else min(samples, whole)
    with open_container(source, "sound") as container:
        return decode_sound(container, _track(container, source), source, wanted)


def count_samples(clock: Clock) -> int:
    """Samples at 32 kHz that a track lasts, rounded down."""
    return int(clock.seconds * AUDIO_RATE)


def decode_sound(
    container: "av.container.InputContainer", track: Any, source: Source, samples: int, lead: int = 0
) -> np.ndarray:
    """Exactly [2, samples] of a track, after `lead` samples of silence; a negative lead drops as many.

    Decodes no more than it gives. Raises RequestError where far less comes than the packets promise.
    """
    import av

    mono = track.layout.nb_channels == 1
    resampler = av.AudioResampler(format="fltp", layout="mono" if mono else "stereo", rate=AUDIO_RATE)
    sound = np.zeros((SOUND_CHANNELS, samples), np.float32)
    place = lead
    for frame in container.decode(track):
        place = _lay(sound, resampler.resample(frame), place)
        if place >= samples:
            return sound
    place = _lay(sound, resampler.resample(None), place)
    if place < samples - MISSING:
        raise RequestError(
            f"{name_of(source)}: its sound breaks off {(samples - place) / AUDIO_RATE:.2f} s before its end; "
            f"the file is not whole. Allowed are {ALLOWED}"
        )
    return sound


def lead_of(sound: Clock, picture: Clock) -> int:
    """Samples at 32 kHz by which the sound begins after the picture; negative where it begins before."""
    return round((sound.start - picture.start) * Fraction(AUDIO_RATE))


def _lay(sound: np.ndarray, frames: list["av.AudioFrame"], place: int) -> int:
    """Copy resampled frames, of one channel or two, into `sound` from `place` on. Gives the place after them."""
    for frame in frames:
        samples = frame.to_ndarray()
        skipped = max(0, -place)
        end = min(sound.shape[1], place + samples.shape[1])
        if end > place + skipped:
            sound[:, place + skipped : end] = samples[:, skipped : end - place]
        place += samples.shape[1]
    return place


def _track(container: "av.container.InputContainer", source: Source) -> Any:
    track = sound_track(container)
    if track is None:
        raise RequestError(f"{name_of(source)}: holds no sound; allowed are {ALLOWED}")
    return track


def _notes(container: "av.container.InputContainer", source: Source) -> tuple[str, ...]:
    count = len(container.streams.audio)
    return (f"{name_of(source)}: of {count} sound tracks, the first is used",) if count > 1 else ()
