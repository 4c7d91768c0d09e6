"""Media as a request names them: pictures, films and sound, by path, data URI or base64.

Nothing here opens a file but to see that a name is one; what a file holds is `h3dist.media`'s to find out.
"""

import base64
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
SOURCE = "a file's path, a data URI, or base64"
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
LEAST_BASE64 = 128  # characters; what is shorter is a path
MEDIA_FIELDS = ("first_frame", "last_frame", "keyframes", "references")
SOURCE_KEYS = ("image", "video", "audio", "soundtrack")


def _source(text: str) -> str:
    if not text.strip():
        raise ValueError("blank")
    if ADDRESS.match(text):
        raise ValueError(f"{text[:60]!r} is an address, and nothing is fetched from there: give {SOURCE}")
    return text


Source = Annotated[str, AfterValidator(_source), Field(description=SOURCE)]
Frame = Annotated[
    int, Field(ge=0, description="a whole number from 0, the first frame, to the number of frames less 1")
]


class _Item(BaseModel):
    model_config = STRICT


class ImageKeyframe(_Item):
    """A picture that the clip shows at one of its frames."""

    image: Source
    frame: Frame


class VideoKeyframe(_Item):
    """A film of 5, 22, 39, ... frames, with its sound, that the clip shows from one of its frames on."""

    video: Source
    frame: Frame


class ImageReference(_Item):
    """A picture of a subject, a style or a scene: <Picture i> in the prompt."""

    image: Source


class VideoReference(_Item):
    """A film of motion or camera: <Video k> in the prompt, its sound <Audio j>."""

    video: Source
    soundtrack: bool | Source | None = Field(
        None, description="true, false, or the sound to use instead; left out, the film's own if it has one"
    )


class AudioReference(_Item):
    """A voice or music: <Audio j> in the prompt."""

    audio: Source


def _kind_of(*kinds: str) -> Callable[[Any], str | None]:
    """Which of an item's models is meant: the one whose key the item holds."""

    def kind(item: Any) -> str | None:
        held = item if isinstance(item, Mapping) else getattr(item, "__dict__", {})
        return next((kind for kind in kinds if kind in held), None)

    return kind


Keyframes = tuple[
    Annotated[
        Annotated[ImageKeyframe, Tag("image")] | Annotated[VideoKeyframe, Tag("video")],
        Discriminator(_kind_of("image", "video")),
    ],
    ...,
]
References = tuple[
    Annotated[
        Annotated[ImageReference, Tag("image")]
        | Annotated[VideoReference, Tag("video")]
        | Annotated[AudioReference, Tag("audio")],
        Discriminator(_kind_of("image", "video", "audio")),
    ],
    ...,
]
ITEMS = (ImageKeyframe, VideoKeyframe, ImageReference, VideoReference, AudioReference)


@dataclass(frozen=True)
class MediaFacts:
    """What a file holds, as the model will take it: upright pixels, frames at 24 a second, samples at 32 kHz.

    kind "image", "film" or "sound"; `samples` of one channel, 0 where a film is silent; `notes` for the user.
    """

    kind: str
    width: int = 0
    height: int = 0
    frames: int = 0
    samples: int = 0
    notes: tuple[str, ...] = ()


def is_inline(text: str) -> bool:
    """Whether a source holds the media itself: a data URI, or at least 128 characters of base64 and no others."""
    if text.startswith("data:"):
        return True
    letters = len(text) - sum(text.count(space) for space in " \t\r\n")
    return letters >= LEAST_BASE64 and letters % 4 == 0 and BASE64.fullmatch(text) is not None


def as_json_value(value: Any) -> str:
    """`json.dumps`'s answer to what JSON does not know: bytes become a data URI, a Path its text."""
    if isinstance(value, bytes | bytearray):
        return "data:;base64," + base64.b64encode(value).decode("ascii")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is none")


def absolute_media(fields: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """The same fields with every media path taken from `folder`. What is no path, or not legal, stays as it is."""

    def settle(value: Any) -> Any:
        if not isinstance(value, str) or not value.strip() or is_inline(value) or ADDRESS.match(value):
            return value
        return os.path.join(os.path.abspath(folder), value)

    def settle_item(item: Any) -> Any:
        if not isinstance(item, Mapping):
            return item
        return {key: settle(value) if key in SOURCE_KEYS else value for key, value in item.items()}

    settled = dict(fields)
    for name in MEDIA_FIELDS:
        if isinstance(settled.get(name), list | tuple):
            settled[name] = [settle_item(item) for item in settled[name]]
        elif name in settled:
            settled[name] = settle(settled[name])
    return settled


def sources_of(request: BaseModel) -> Iterator[tuple[str, str, str]]:
    """Every medium that a validated request names: where, of which kind ("image", "film", "sound"), and it."""
    for name in ("first_frame", "last_frame"):
        if getattr(request, name, None) is not None:
            yield name, "image", getattr(request, name)
    kinds = {"image": "image", "video": "film", "audio": "sound", "soundtrack": "sound"}
    for name in ("keyframes", "references"):
        for place, item in enumerate(getattr(request, name, None) or ()):
            for key, value in item:
                if key in kinds and isinstance(value, str):
                    yield f"{name}[{place}].{key}", kinds[key], value
