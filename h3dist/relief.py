"""What a request can leave out, shorten or shrink where its plan does not fit, and the sizes that are left then.

Rows of the text are those of the whole request less the vision blocks that go; labels, a few tokens each, stay
counted. Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import replace

from h3dist.fitting import reference_frames
from h3dist.geometry import CANVAS_MULTIPLE, CHUNK_FRAMES, FPS, TAIL_FRAMES, audio_samples
from h3dist.intake import MIN_REFERENCE_FRAMES
from h3dist.material import conditions_of
from h3dist.plan import Cut
from h3dist.request import Keyframe, Reference, Resolved
from h3dist.text.presentation import shown_rows, vision_rows

LEAST_SIDE = 256  # pixels of the shorter side, and frames, below which no clip is worth advising
LEAST_FRAMES = 22


def cuts(resolved: Resolved, contract: str, text_rows: int) -> Iterator[list[Cut]]:
    """Every kind of cut of a measured request whose presentation has `text_rows`: each kind's in any order."""
    plain_rows = text_rows - vision_rows(conditions_of(resolved, contract), contract)
    for kind in (_without, _shortened, _fewer_frames, _smaller_canvas):
        yield [_cut(words, smaller, contract, plain_rows) for words, smaller in kind(resolved)]


def _cut(words: str, smaller: Resolved, contract: str, plain_rows: int) -> Cut:
    conditions = conditions_of(smaller, contract)
    text_rows = plain_rows + vision_rows(conditions, contract)
    return Cut(words, smaller.geometry, conditions, text_rows, shown_rows(conditions, contract))


def _without(resolved: Resolved) -> Iterator[tuple[str, Resolved]]:
    """Each keyframe or reference left out alone, then from the front two, three and more together.

    A task of references keeps one that is seen, without which it would be none.
    """
    items = (*resolved.keyframes, *resolved.references)
    alone = [(place,) for place in range(len(items))]
    for gone in [*alone, *(tuple(range(count)) for count in range(2, len(items) + 1))]:
        kept = [item for place, item in enumerate(items) if place not in gone]
        references = tuple(item for item in kept if isinstance(item, Reference))
        if resolved.references and all(item.kind == "audio" for item in references):
            continue
        keyframes = tuple(item for item in kept if isinstance(item, Keyframe))
        names = " and ".join(_name(resolved, place) for place in gone)
        yield f"without {names}", replace(resolved, keyframes=keyframes, references=references)


def _name(resolved: Resolved, place: int) -> str:
    """The field that names a keyframe or, after all of those, a reference."""
    count = len(resolved.keyframes)
    return resolved.keyframes[place].where if place < count else f"references[{place - count}]"


def _shortened(resolved: Resolved) -> Iterator[tuple[str, Resolved]]:
    """Each film among the references cut by 17 frames and more, down to 2 s."""
    for place, item in enumerate(resolved.references):
        if item.kind != "video" or item.facts is None:
            continue
        used = min(item.facts.frames, resolved.frames)
        for frames in _lengths_below(used, MIN_REFERENCE_FRAMES):
            heard = audio_samples(frames)
            facts = replace(item.facts, frames=frames, samples=min(item.facts.samples, heard))
            shorter = replace(item, facts=facts, samples=min(item.samples, heard))
            references = (*resolved.references[:place], shorter, *resolved.references[place + 1 :])
            words = f"references[{place}] cut to its first {frames / FPS:.2f} s"
            yield words, replace(resolved, references=references)


def _fewer_frames(resolved: Resolved) -> Iterator[tuple[str, Resolved]]:
    """Shorter clips, as far as every keyframe but the last frame, which moves along, keeps its place."""
    inner = [item for item in resolved.keyframes if item.where != "last_frame"]
    least = max(
        [LEAST_FRAMES, *(item.frame + _length(item) + (len(inner) < len(resolved.keyframes)) for item in inner)]
    )
    for frames in _lengths_below(resolved.frames, least):
        yield f"request.frames={frames}", replace(resolved, frames=frames)


def _length(item: Keyframe) -> int:
    return reference_frames(item.facts.frames, "comfy") if item.kind == "film" and item.facts else 1


def _lengths_below(frames: int, least: int) -> range:
    """Lengths of 17k + 5 frames below `frames`, the longest first, down to `least`."""
    longest = (frames - 1 - TAIL_FRAMES) // CHUNK_FRAMES * CHUNK_FRAMES + TAIL_FRAMES
    return range(longest, max(least, TAIL_FRAMES) - 1, -CHUNK_FRAMES)


def _smaller_canvas(resolved: Resolved) -> Iterator[tuple[str, Resolved]]:
    """The same aspect, rounded to 32, at each shorter short side."""
    short = min(resolved.width, resolved.height)
    for side in range(short - CANVAS_MULTIPLE, LEAST_SIDE - 1, -CANVAS_MULTIPLE):
        width, height = (
            max(CANVAS_MULTIPLE, round(old * side / short / CANVAS_MULTIPLE) * CANVAS_MULTIPLE)
            for old in (resolved.width, resolved.height)
        )
        yield f"request.width={width} request.height={height}", replace(resolved, width=width, height=height)
