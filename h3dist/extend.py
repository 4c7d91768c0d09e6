"""Make a clip longer: its end becomes the first guide of a new clip, and both are joined into one film.

    NAME.guide.mov    the last frames of the earlier clip and their sound, lossless: the new clip's first guide
    NAME.mp4          the new clip, which begins with the guide's frames again
    NAME.joined.mp4   the earlier clip whole, then the new one from where the guide ends

The joined film is encoded anew, at one frame every 1/24 s throughout.
"""

import os
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from h3dist import launcher
from h3dist.errors import OutputError, RequestError
from h3dist.geometry import (
    AUDIO_RATE,
    CANVAS_MULTIPLE,
    CHUNK_FRAMES,
    SOUND_CHANNELS,
    TAIL_FRAMES,
    align_frames,
    audio_samples,
)
from h3dist.media import film_frames, film_sound, measure_film, write_film_lossless, write_mp4
from h3dist.outputs import beside, claimed
from h3dist.request import MediaFacts, parse_request, resolve

OVERLAP = 22  # frames of the earlier clip that guide the new one, where nobody says
FADE = AUDIO_RATE // 100  # samples over which the sound goes from one clip to the other, where both play


@dataclass(frozen=True)
class Extension:
    """What to make of `clip`, which holds `facts`: the job that makes the new clip, and the files beside it."""

    clip: str
    facts: MediaFacts
    overlap: int
    job: launcher.Job
    guide: str
    joined: str


def run_extend(clip: str, job: launcher.Job, path: str, overlap: int = OVERLAP) -> int:
    """Make the clip of `job` go on from the end of `clip`, into `path`, and join both. Gives the exit code.

    `overlap` frames of the earlier clip guide the new one. Raises `RequestError` and `OutputError`, and what
    making a clip raises; where the new clip fails, neither guide nor joined film stays.
    """
    made = prepare(clip, job, path, overlap)
    with claimed((made.guide, made.joined)):
        return _extend(made, path, overlap)


def _extend(made: Extension, path: str, overlap: int) -> int:
    write_guide(made)
    code = 1
    try:
        code = launcher.run_generate(made.job)
    finally:
        if code:
            os.unlink(made.guide)
    if code == 0:
        join(made.clip, path, overlap, made.joined, made.job.request["prompt"])
        print(made.joined, flush=True)
    return code


def prepare(clip: str, job: launcher.Job, path: str, overlap: int) -> Extension:
    """`job` with the guide as its first keyframe and the clip's size. Raises `RequestError` and `OutputError`."""
    facts = measure_film(clip)
    check_overlap(facts, overlap)
    guide, joined = beside(os.path.abspath(path), ".guide.mov"), beside(os.path.abspath(path), ".joined.mp4")
    for file in (path, guide, joined):
        if os.path.exists(file) and os.path.samefile(file, clip):
            raise OutputError(f"{file} is the clip to go on from, and would be replaced; name another output")
    for file in (guide, joined):
        if job.output.get("clobber") is False and os.path.lexists(file):
            raise OutputError(f"{file} exists, and --no-clobber keeps it")
    fields = {**_sized(job.request, facts, clip), "keyframes": _guided(job.request, guide)}
    frames = resolve(parse_request(fields), allow_untrained=True, schedule="simple").frames
    if frames <= overlap:
        raise RequestError(f"frames: the new clip has {frames}, of which --overlap repeats {overlap}; ask for more")
    output = {**job.output, "path": path}
    return Extension(clip, facts, overlap, replace(job, request=fields, output=output), guide, joined)


def check_overlap(facts: MediaFacts, overlap: int) -> None:
    """Raise `RequestError` for a guide that is not 17k + 5 frames long, or longer than its clip."""
    above = align_frames(overlap)
    if overlap != above:
        below = max(TAIL_FRAMES, above - CHUNK_FRAMES)
        raise RequestError(f"--overlap {overlap}: must be 5, 22, 39, ... frames; the nearest are {below} and {above}")
    if overlap > facts.frames:
        raise RequestError(f"--overlap {overlap}: the clip has {facts.frames} frames")


def write_guide(made: Extension) -> None:
    """Write the last frames of the clip and the sound beside them, lossless. Raises `OutputError`."""
    frames = np.stack(deque(film_frames(made.clip), maxlen=made.overlap))
    sound = film_sound(made.clip)
    if sound is not None:
        begins = audio_samples(made.facts.frames) - audio_samples(made.overlap)
        sound = sound[:, begins:] if sound.shape[1] > begins else None
    write_film_lossless(made.guide, frames, sound)


def join(clip: str, made: str, overlap: int, joined: str, title: str) -> None:
    """Write `clip` and then `made` from its frame `overlap` on into `joined`, one frame every 1/24 s.

    Raises `RequestError`, `OutputError`.
    """
    first, second = measure_film(clip), measure_film(made)
    frames = first.frames + second.frames - overlap
    part = os.path.join(os.path.dirname(joined), f".h3dist-{secrets.token_hex(6)}-joined.mp4")
    write_mp4(
        part,
        _chunks(chain(film_frames(clip), islice(film_frames(made), overlap, None))),
        join_sound(film_sound(clip), film_sound(made), first.frames, overlap, frames),
        width=first.width,
        height=first.height,
        frames=frames,
        metadata={"title": title, "comment": "h3dist, joined"},
    )
    try:
        os.replace(part, joined)
    except OSError as error:
        os.unlink(part)
        raise OutputError(f"cannot write {joined}: {error.strerror}") from error


def join_sound(
    first: np.ndarray | None, second: np.ndarray | None, first_frames: int, overlap: int, frames: int
) -> np.ndarray | None:
    """float32 [2, N] for `frames`: the first clip's sound, then the second's from after the overlap.

    Within the last 10 ms of the overlap, where both play, one fades into the other. None if both are silent.
    """
    if first is None and second is None:
        return None
    whole = np.zeros((SOUND_CHANNELS, audio_samples(frames)), np.float32)
    seam = audio_samples(first_frames)
    if first is not None:
        whole[:, : min(seam, first.shape[1])] = first[:, :seam]
    if second is None:
        return whole
    begins = seam - audio_samples(overlap)  # where the second clip's sound starts
    place = seam - FADE
    new = second[:, place - begins : whole.shape[1] - begins]
    ramp = np.minimum(np.arange(new.shape[1], dtype=np.float32) / FADE, 1)
    whole[:, place : place + new.shape[1]] *= 1 - ramp
    whole[:, place : place + new.shape[1]] += ramp * new
    return whole


def _sized(fields: Mapping[str, Any], facts: MediaFacts, clip: str) -> dict[str, Any]:
    """The fields with the clip's own size, which the joined film needs."""
    if facts.width % CANVAS_MULTIPLE or facts.height % CANVAS_MULTIPLE:
        raise RequestError(f"{clip}: {facts.width} x {facts.height} pixels; to go on, both must be multiples of 32")
    for name, size in (("width", facts.width), ("height", facts.height)):
        if fields.get(name, size) != size:
            raise RequestError(f"{name}={fields[name]}: the clip to go on from has {size}; leave {name} out")
    if fields.get("mux_audio") is False:
        raise RequestError("mux_audio=false: a joined film takes its sound from the new clip; leave mux_audio out")
    return {**fields, "width": facts.width, "height": facts.height}


def _guided(fields: Mapping[str, Any], guide: str) -> list[Any]:
    return [{"video": guide, "frame": 0}, *(fields.get("keyframes") or ())]


def _chunks(pictures: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    for picture in pictures:
        yield picture[None]
