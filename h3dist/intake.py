"""A request with its media looked into: every limit that a file's header can break is checked before any work.

Imports no torch; PyAV and Pillow only where a request has media.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from h3dist.config import Config
from h3dist.errors import RequestError
from h3dist.fitting import check_aspect, reference_frames
from h3dist.geometry import AUDIO_RATE, FPS, MAX_TRAINED_FRAMES, TAIL_FRAMES, audio_samples
from h3dist.media import measure
from h3dist.request import MediaFacts, Request, Resolved, parse_request, resolve, sources_of

PARTITIONS = {"t2va": "fl2va", "i2va": "fl2va", "l2va": "fl2va", "fl2va": "fl2va", "ref2va": "ref2va"}
MIN_REFERENCE_FRAMES = 2 * FPS


def read_request(config: Config, fields: Mapping[str, Any]) -> Resolved:
    """`fields` validated, its media measured, every choice made, and the denoiser found to be of the right kind.

    Raises `RequestError`.
    """
    request = parse_request(fields)
    measured = measure_all(request)
    resolved = resolve(
        request,
        allow_untrained=config.runtime.allow_untrained,
        schedule=config.sampler.schedule,
        contract=config.sampler.noise,
        measured=measured,
    )
    check_partition(config.model.partition, config.model.denoiser, resolved.task)
    notes = check_keyframes(resolved) + check_references(resolved)
    told = [note for facts in measured.values() for note in facts.notes]
    return replace(resolved, notes=(*resolved.notes, *told, *notes))


def measure_all(request: Request) -> dict[tuple[str, str], MediaFacts]:
    """What each source of a request holds, by kind and source; one named twice is read once. Raises `RequestError`."""
    measured: dict[tuple[str, str], MediaFacts] = {}
    for where, kind, source in sources_of(request):
        if (kind, source) not in measured:
            with naming(where):
                measured[kind, source] = measure(source, kind)
    return measured


def check_partition(said: str, denoiser: str, task: str) -> None:
    """Raise `RequestError` where the denoiser was trained for other tasks than `task`.

    Files for "fl2va" and "ref2va" hold the same tensors by name and shape: the file's name decides, where it
    tells, and `said` where it is not "auto".
    """
    name = Path(denoiser).name
    told = [partition for partition in ("fl2va", "ref2va") if partition in name.lower()]
    partition = said if said != "auto" else told[0] if len(told) == 1 else None
    if partition is None or PARTITIONS[task] == partition:
        return
    takes = ", ".join(other for other, needed in PARTITIONS.items() if needed == partition)
    source = f"by its name {name}" if said == "auto" else f"by model.partition={said}"
    raise RequestError(
        f"task {task} needs a {PARTITIONS[task]} denoiser; this one is {partition} {source}, for {takes}. "
        f"Name another in model.denoiser, or override with model.partition={PARTITIONS[task]}"
    )


def check_keyframes(resolved: Resolved) -> list[str]:
    """Raise `RequestError` for keyframes that overlap, or a film that is too short or runs past the clip's end.

    Gives what to tell: a film of other than 17k + 5 frames is cut to the next below.
    """
    notes, taken = [], {}
    for item in resolved.keyframes:
        assert item.facts is not None, "measured before"
        held = item.facts.frames
        if held < TAIL_FRAMES and item.kind == "film":
            raise RequestError(f"{item.where}: {held} frames at {FPS} a second; a film has at least {TAIL_FRAMES}")
        used = reference_frames(held, "comfy") if item.kind == "film" else 1
        last = item.frame + used - 1
        if last >= resolved.frames:
            raise RequestError(
                f"{item.where}: {used} frames from frame {item.frame} on end at {last}; the clip's last is "
                f"{resolved.frames - 1}"
            )
        shared = [other for other, (start, stop) in taken.items() if item.frame <= stop and start <= last]
        if shared:
            raise RequestError(f"{shared[0]} and {item.where} both hold frame {item.frame}")
        taken[item.where] = item.frame, last
        notes += [f"{item.where}: of {held} frames the first {used} are used (17k + 5)"] if used < held else []
    return notes


def check_references(resolved: Resolved) -> list[str]:
    """Raise `RequestError` for a video of other than 2 to 15 s, or a picture beyond 1:4 or 4:1.

    Gives what to tell: what is longer than the clip is cut to it.
    """
    notes = []
    for place, item in enumerate(resolved.references):
        where, facts = f"references[{place}]", item.facts
        assert facts is not None, "measured before"
        if item.kind == "video" and not MIN_REFERENCE_FRAMES <= facts.frames <= MAX_TRAINED_FRAMES:
            raise RequestError(
                f"{where}: a video of {facts.frames / FPS:.2f} s; 2 to 15 s are allowed, {MIN_REFERENCE_FRAMES} to "
                f"{MAX_TRAINED_FRAMES} frames at {FPS} a second"
            )
        if item.kind != "audio":
            with naming(where):
                check_aspect((facts.width, facts.height))
        if facts.frames > resolved.frames:
            notes.append(f"{where}: of {facts.frames} frames the first {resolved.frames} are used, the clip's length")
        if item.samples > audio_samples(resolved.frames):
            seconds, kept = item.samples / AUDIO_RATE, resolved.frames / FPS
            notes.append(f"{where}: of {seconds:.2f} s of sound the first {kept:.2f} s are used, the clip's length")
    return notes


@contextmanager
def naming(where: str) -> Iterator[None]:
    """A `RequestError` inside begins with the field that it is about."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None
