"""A request's keyframes and references: their sizes as conditions, and on rank 0 their pixels and sound, fitted.

The sizes follow from what the files' headers say, the same on every rank; only rank 0 opens the files again.
Imports no torch; Pillow and PyAV only where there is something to read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from h3dist.conditions import Condition
from h3dist.errors import RequestError
from h3dist.fitting import Size, cover, fit_keyframe, fit_reference, reference_frames
from h3dist.intake import naming
from h3dist.media import read_film, read_image, read_sound
from h3dist.request import Keyframe, Reference, Resolved

Fit = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Material:
    """One condition with its frames uint8 [F, H, W, 3], as many as are shown or encoded, and sound f32 [2, N]."""

    condition: Condition
    frames: np.ndarray | None
    sound: np.ndarray | None


def conditions_of(resolved: Resolved, contract: str) -> tuple[Condition, ...]:
    """Every keyframe and then every reference of a measured request, by size, as `contract` fits them.

    Raises RequestError for an extreme aspect.
    """
    keyframes = [_keyframe(item, resolved) for item in resolved.keyframes]
    return (*keyframes, *(_reference(item, resolved, contract) for item in resolved.references))


def _keyframe(item: Keyframe, resolved: Resolved) -> Condition:
    facts = item.facts
    assert facts is not None, "measured before"
    frames = reference_frames(facts.frames, "comfy") if item.kind == "film" else 1
    return fit_keyframe((resolved.width, resolved.height), frames, facts.samples, item.frame)


def _reference(item: Reference, resolved: Resolved, contract: str) -> Condition:
    facts = item.facts
    assert facts is not None, "measured before"
    return fit_reference(
        item.kind,
        (facts.width, facts.height),
        facts.frames,
        item.samples,
        canvas=(resolved.width, resolved.height),
        clip_frames=resolved.frames,
        contract=contract,
    )


def read_material(resolved: Resolved, conditions: tuple[Condition, ...]) -> list[Material]:
    """What `conditions_of` told of, read and fitted. Raises RequestError for a damaged file, with its field."""
    items = [(item.where, item) for item in resolved.keyframes]
    items += [(f"references[{place}]", item) for place, item in enumerate(resolved.references)]
    made = []
    for (where, item), condition in zip(items, conditions, strict=True):
        with naming(where):
            made.append(_read(item, condition))
    return made


def _read(item: Keyframe | Reference, condition: Condition) -> Material:
    fit = partial(fit_picture, size=(condition.width, condition.height), covering=getattr(item, "fit", "") == "cover")
    frames, sound = None, None
    if condition.frames == 1 and item.kind == "image":
        frames = fit(read_image(item.source))[None]
    elif condition.frames:
        film = read_film(item.source, frames=max(condition.frames, condition.shown), fit=fit)
        frames, sound = film.frames, film.sound
    if condition.samples and (item.kind == "audio" or isinstance(getattr(item, "soundtrack", None), str)):
        source = item.source if item.kind == "audio" else item.soundtrack
        sound = read_sound(source, condition.samples)
    return Material(condition, frames, _cut(sound, condition, item.source))


def _cut(sound: np.ndarray | None, condition: Condition, source: str) -> np.ndarray | None:
    """The samples that the plan counts on; None for a condition without sound."""
    if not condition.samples:
        return None
    if sound is None or sound.shape[1] < condition.samples:
        raise RequestError(f"{source}: its sound is shorter than its header says; the file is not whole")
    return sound[:, : condition.samples]


def fit_picture(frame: np.ndarray, size: Size, *, covering: bool) -> np.ndarray:
    """A frame uint8 [H, W, 3] stretched to `size`, or scaled to cover it and cropped at its centre, by Lanczos."""
    from PIL import Image

    if (frame.shape[1], frame.shape[0]) == size:
        return frame
    picture, box = Image.fromarray(frame), None
    scaled = size
    if covering:
        scaled, box = cover(picture.size, size)
    resized = picture.resize(scaled, Image.Resampling.LANCZOS)
    return np.array(resized.crop(box) if box else resized)
