"""Every open choice of a request made: canvas, length, seed, steps, and where its media stand in the clip."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from h3dist.errors import RequestError
from h3dist.fitting import canvas_like
from h3dist.geometry import FPS, MAX_TRAINED_FRAMES, Geometry, align_frames, frames_for_duration
from h3dist.request.media import MEDIA_FIELDS, MediaFacts, is_inline
from h3dist.request.names import check_names
from h3dist.request.schema import MAX_PROMPT, MAX_SEED, MAX_STEPS, Request

DEFAULT_WIDTH, DEFAULT_HEIGHT, DEFAULT_FRAMES, DEFAULT_STEPS = 1344, 768, 124, 12
MAX_BETA_STEPS = 138  # from 139 on the beta schedule meets an index twice: fewer evaluations than asked

Measured = Mapping[tuple[str, str], MediaFacts]  # by kind ("image", "film", "sound") and source


@dataclass(frozen=True)
class Keyframe:
    """A picture ("image") or a film with its sound ("film") that the clip shows from `frame` on.

    fit: how it comes to the canvas, "stretch" or "cover" (scaled to cover it, cropped at its centre). facts: what
    its file holds, None where nobody has looked into it.
    """

    source: str
    frame: int
    kind: str
    fit: str
    where: str  # the field that names it
    facts: MediaFacts | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Reference:
    """An "image", a "video" or an "audio" that the model reads. `soundtrack` of a video: whether its own sound
    is read too, or the sound that is read instead; None where nobody has looked into the file yet. `facts` are of
    the file, `samples` of one channel of what is heard."""

    kind: str
    source: str
    soundtrack: bool | str | None = None
    facts: MediaFacts | None = field(default=None, compare=False)
    samples: int = field(default=0, compare=False)

    @property
    def heard(self) -> bool:
        """Whether it has a number among the <Audio j>."""
        return self.kind == "audio" or bool(self.soundtrack)


@dataclass(frozen=True)
class Resolved:
    """A request with every choice made. Keyframes are in the order of their frames, references as given."""

    task: str
    prompt: str
    width: int
    height: int
    frames: int
    frames_asked: int
    seed: int
    steps: int
    mux_audio: bool
    notes: tuple[str, ...] = ()
    keyframes: tuple[Keyframe, ...] = ()
    references: tuple[Reference, ...] = ()
    media: Mapping[str, Any] = field(default_factory=dict)  # the request's own media fields

    @property
    def geometry(self) -> Geometry:
        """The clip's canvas and length."""
        return Geometry(self.width, self.height, self.frames)

    @property
    def files(self) -> tuple[str, ...]:
        """The paths among its media."""
        soundtracks = [item.soundtrack for item in self.references if isinstance(item.soundtrack, str)]
        sources = [item.source for item in (*self.keyframes, *self.references)] + soundtracks
        return tuple(source for source in sources if not is_inline(source))

    def as_request(self) -> dict[str, Any]:
        """The same as a request, legal as a request file: it gives this clip again."""
        fields = {name: getattr(self, name) for name in Request.model_fields if name != "duration"}
        return fields | dict(self.media)


def resolve(
    request: Request,
    *,
    allow_untrained: bool = False,
    schedule: str = "beta",
    contract: str = "comfy",
    measured: Measured | None = None,
) -> Resolved:
    """Every open choice of `request` made: defaults, frames snapped up to 17k + 5, the seed drawn.

    `allow_untrained` admits clips over 362 frames and longer prompts; `schedule` limits the steps; `contract`,
    "comfy" or "official", says how a lone last frame is fitted. `measured` tells what each source holds, by
    kind ("image", "film", "sound") and source: without it a clip of no said canvas takes the default one, and
    soundtracks stay open. Raises RequestError. What was changed, drawn or left unused is said in `notes`.
    """
    _check_prompt(request, allow_untrained)
    asked = _frames_asked(request, allow_untrained)
    frames = align_frames(asked)
    seed = secrets.randbelow(MAX_SEED + 1) if request.seed is None else request.seed
    notes = [] if frames == asked else [f"frames: {asked} asked, {frames} made (17k + 5, snapped up)"]
    notes += [f"seed {seed} (drawn)"] if request.seed is None else []
    keyframes = _keyframes(request, frames, contract, measured or {})
    references = _references(request, measured or {})
    width, height, said = _canvas(request, keyframes)
    pictures = sum(item.kind == "image" for item in (*keyframes, *references))
    videos, audios = sum(item.kind == "video" for item in references), sum(item.heard for item in references)
    if all(item.soundtrack is not None for item in references if item.kind == "video"):  # else not counted yet
        counts = {"Picture": pictures, "Video": videos, "Audio": audios}
        said += check_names(request.prompt, counts, required=bool(references))
    return Resolved(
        task=request.task or "t2va",
        prompt=request.prompt,
        width=width,
        height=height,
        frames=frames,
        frames_asked=asked,
        seed=seed,
        steps=_steps(request, schedule),
        mux_audio=request.mux_audio is not False,
        notes=(*notes, *said),
        keyframes=keyframes,
        references=references,
        media=_media(request, references),
    )


def _keyframes(request: Request, frames: int, contract: str, measured: Measured) -> tuple[Keyframe, ...]:
    """In the order of their frames. Raises RequestError for a frame that the clip does not have, or has taken.

    The first frame is stretched to the canvas, all others cover it. A last frame alone is stretched too under
    the official contract, where whatever keyframe comes first is.
    """
    first, last = (getattr(request, name, None) for name in ("first_frame", "last_frame"))
    guides = getattr(request, "keyframes", None) or ()
    found = [("first_frame", "image", first, 0)] if first else []
    for place, guide in enumerate(guides):
        kind, source = ("image", guide.image) if hasattr(guide, "image") else ("film", guide.video)
        found.append((f"keyframes[{place}]", kind, source, guide.frame))
    found += [("last_frame", "image", last, frames - 1)] if last else []
    taken: dict[int, Keyframe] = {}
    for where, kind, source, frame in found:
        if frame >= frames:
            raise RequestError(f"{where}.frame={frame}: the clip has frames 0 to {frames - 1}")
        if frame in taken:
            raise RequestError(f"{taken[frame].where} and {where} both stand at frame {frame}")
        stretched = where == "first_frame" or (contract == "official" and len(found) == 1 and source is last)
        facts = measured.get((kind, source))
        taken[frame] = Keyframe(source, frame, kind, "stretch" if stretched else "cover", where, facts)
    return tuple(taken[frame] for frame in sorted(taken))


def _references(request: Request, measured: Measured) -> tuple[Reference, ...]:
    """In the order given, with every soundtrack decided where the film is `measured`."""
    kinds = {"image": "image", "video": "film", "audio": "sound"}
    found = []
    for place, item in enumerate(getattr(request, "references", None) or ()):
        (kind, source), *rest = item
        facts, soundtrack = measured.get((kinds[kind], source)), dict(rest).get("soundtrack")
        if kind == "video" and facts is not None:
            if soundtrack is True and not facts.samples:
                raise RequestError(f"references[{place}]: soundtrack is true, but the video has no sound")
            soundtrack = facts.samples > 0 if soundtrack is None else soundtrack
        heard = measured.get(("sound", soundtrack)) if isinstance(soundtrack, str) else facts
        sounds = heard is not None and (kind == "audio" or bool(soundtrack))
        found.append(Reference(kind, source, soundtrack, facts, heard.samples if sounds else 0))
    return tuple(found)


def _canvas(request: Request, keyframes: tuple[Keyframe, ...]) -> tuple[int, int, list[str]]:
    """Width and height: as said, else after the first keyframe's aspect, else the default; and what to say."""
    width, height = request.width, request.height
    if not keyframes or (width and height):
        return width or DEFAULT_WIDTH, height or DEFAULT_HEIGHT, []
    if width or height:
        raise RequestError(
            "width and height go together where there are keyframes: give both, or neither to take the "
            "first keyframe's aspect"
        )
    lead = keyframes[0]
    if lead.facts is None:
        return DEFAULT_WIDTH, DEFAULT_HEIGHT, []
    width, height = canvas_like((lead.facts.width, lead.facts.height))
    return width, height, [f"canvas {width} x {height}, after {lead.where} of {lead.facts.width} x {lead.facts.height}"]


def _media(request: Request, references: tuple[Reference, ...]) -> dict[str, Any]:
    """The media fields as JSON values, every soundtrack as decided."""
    fields = request.model_dump(mode="json", include=set(MEDIA_FIELDS), exclude_none=True)
    for item, reference in zip(fields.get("references", ()), references, strict=True):
        if reference.soundtrack is not None:
            item["soundtrack"] = reference.soundtrack
    return fields


def _check_prompt(request: Request, allow_untrained: bool) -> None:
    """Raises RequestError for a prompt that is longer than any that others admit: it is likely another file."""
    length = len(request.prompt)
    if length > MAX_PROMPT and not allow_untrained:
        raise RequestError(
            f"prompt: {length} characters; at most {MAX_PROMPT} are read, and --allow-untrained admits more, each "
            "token a row that every step attends to"
        )


def _frames_asked(request: Request, allow_untrained: bool) -> int:
    """The clip length before alignment. Raises RequestError past the trained range."""
    frames, asked = request.frames, f"frames={request.frames}"
    if request.duration is not None:
        frames, asked = frames_for_duration(request.duration), f"duration={request.duration:g}"
    if frames is None:
        return DEFAULT_FRAMES
    if frames > MAX_TRAINED_FRAMES and not allow_untrained:
        raise RequestError(
            f"{asked}: the model was trained for 1 to {MAX_TRAINED_FRAMES} frames; the nearest is "
            f"{MAX_TRAINED_FRAMES} ({MAX_TRAINED_FRAMES / FPS:.4g} s), and --allow-untrained admits more"
        )
    return frames


def _steps(request: Request, schedule: str) -> int:
    """Model evaluations. Raises RequestError where the schedule has fewer."""
    steps = DEFAULT_STEPS if request.steps is None else request.steps
    if schedule == "beta" and steps > MAX_BETA_STEPS:
        raise RequestError(
            f"steps={steps}: the beta schedule gives at most {MAX_BETA_STEPS} distinct steps; the nearest is "
            f"{MAX_BETA_STEPS}, and sampler=comfy_simple takes up to {MAX_STEPS}"
        )
    return steps
