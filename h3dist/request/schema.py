"""The tasks, with one schema each: which fields a request has, and what each may hold."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, model_validator

from h3dist.geometry import CANVAS_MULTIPLE, FPS
from h3dist.request.media import SOURCE, STRICT, ImageReference, Keyframes, References, Source, VideoReference

MAX_SEED = 2**63 - 1
MAX_STEPS = 200
MAX_SIDE = 16384  # pixels: the most that H.264's encoder takes
MAX_SECONDS = 3600  # whatever is admitted beyond the trained range
MAX_PROMPT = 7000  # characters, the one limit that is published: 1800 tokens of English, and a row each
MAX_IMAGES, MAX_VIDEOS, MAX_AUDIOS, MAX_REFERENCES = 9, 3, 3, 12


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("blank")
    if "\0" in text:
        raise ValueError("holds a NUL character, which no text has; the file may be no text, or UTF-16")
    return text


Side = Annotated[int, Field(ge=CANVAS_MULTIPLE, le=MAX_SIDE, multiple_of=CANVAS_MULTIPLE)]
SIDE = f"a whole number of pixels, a multiple of {CANVAS_MULTIPLE} up to {MAX_SIDE}"


class Request(BaseModel):
    """What every task's request holds. A field that is None takes its default."""

    model_config = STRICT

    task: str | None = None
    prompt: Annotated[str, AfterValidator(_not_blank)] = Field(
        description=f"text that is not empty, at most {MAX_PROMPT} characters"
    )
    width: Side | None = Field(None, description=SIDE)
    height: Side | None = Field(None, description=SIDE)
    frames: Annotated[int, Field(ge=1, le=FPS * MAX_SECONDS)] | None = Field(
        None, description="a whole number from 1 to 362"
    )
    duration: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = Field(
        None, description=f"a number of seconds above 0, at most {MAX_SECONDS}"
    )
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(None, description="a whole number from 0 to 2^63 - 1")
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = Field(
        None, description=f"a whole number from 1 to {MAX_STEPS}"
    )
    mux_audio: bool | None = Field(None, description="true or false, without quotes")

    @model_validator(mode="after")
    def _one_length(self) -> "Request":
        if self.frames is not None and self.duration is not None:
            raise ValueError("frames and duration are two ways to say one thing: give one of them")
        return self


class TextToVideo(Request):
    """text to video with sound"""

    task: Literal["t2va"] = "t2va"


class ImageToVideo(Request):
    """from a first frame"""

    task: Literal["i2va"] = "i2va"
    first_frame: Source = Field(description="a picture, stretched to the canvas")


class LastToVideo(Request):
    """up to a last frame"""

    task: Literal["l2va"] = "l2va"
    last_frame: Source = Field(description="a picture, cropped to the canvas")


class FramesToVideo(Request):
    """through keyframes: the first, the last, and any between them"""

    task: Literal["fl2va"] = "fl2va"
    first_frame: Source | None = Field(None, description="a picture, stretched to the canvas")
    last_frame: Source | None = Field(None, description="a picture, cropped to the canvas")
    keyframes: Annotated[Keyframes, Field(min_length=1)] | None = Field(
        None,
        description='a list of {"image": F, "frame": N} and {"video": F, "frame": N}, F of 5, 22, 39, ... frames',
    )

    @model_validator(mode="after")
    def _some_keyframe(self) -> "FramesToVideo":
        if self.first_frame is None and self.last_frame is None and self.keyframes is None:
            raise ValueError("fl2va needs first_frame, last_frame or keyframes; without them the task is t2va")
        return self


class ReferencesToVideo(Request):
    """with references: pictures, films and sounds that the prompt names"""

    task: Literal["ref2va"] = "ref2va"
    references: Annotated[References, Field(min_length=1)] = Field(
        description='a list, in the order that the model reads them, of {"image": F}, '
        '{"video": F, "soundtrack": true, false or F} and {"audio": F}'
    )

    @model_validator(mode="after")
    def _not_too_many(self) -> "ReferencesToVideo":
        images = sum(isinstance(item, ImageReference) for item in self.references)
        videos = sum(isinstance(item, VideoReference) for item in self.references)
        audios = len(self.references) - images - videos
        limits = {"image": (images, MAX_IMAGES), "video": (videos, MAX_VIDEOS), "audio": (audios, MAX_AUDIOS)}
        over = [f"{count} {kind}s, of {most} allowed" for kind, (count, most) in limits.items() if count > most]
        if len(self.references) > MAX_REFERENCES:
            over.append(f"{len(self.references)} in all, of {MAX_REFERENCES} allowed")
        if over:
            raise ValueError("references: " + "; ".join(over))
        if audios == len(self.references):
            raise ValueError("references: sound cannot be the only one; add an image or a video")
        return self


TASKS: dict[str, type[Request]] = {
    "t2va": TextToVideo,
    "i2va": ImageToVideo,
    "l2va": LastToVideo,
    "fl2va": FramesToVideo,
    "ref2va": ReferencesToVideo,
}
AnyRequest = Annotated[
    TextToVideo | ImageToVideo | LastToVideo | FramesToVideo | ReferencesToVideo, Field(discriminator="task")
]
ADAPTER: TypeAdapter[Request] = TypeAdapter(AnyRequest)
LIMITS = f"""\
F is {SOURCE}; a path in a request file is relative to that file, others to the working folder.
frames or duration, not both; frames are snapped up to 17k + 5. A task that is left out follows from the media.
fl2va takes at least one of its fields. Keyframes stand at frames 0 to frames - 1, none over another; a film is cut
    to 17k + 5 frames. Without width and height the canvas takes the first keyframe's aspect, at short edge 768.
ref2va takes at most {MAX_IMAGES} images, {MAX_VIDEOS} videos of 2 to 15 s and {MAX_AUDIOS} audios, {MAX_REFERENCES} in
    all, and not audio alone. What is longer than the clip is cut to it. The prompt names them <Picture i>, <Video k>
    and <Audio j>, each counted from 1; a video's soundtrack counts among the audios, before those that follow it.
Pictures: JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, up to 89 million pixels; upright by their EXIF, transparency laid on
    white, of an animation the first frame. Films: up to 4096 x 2304 pixels, resampled to 24 frames a second. Sound:
    any rate and layout, to 32 kHz stereo. A file holds at most 512 MiB and 10 minutes."""
FIELDS = {name: info for task in TASKS.values() for name, info in task.model_fields.items()}


def infer_task(fields: dict[str, Any]) -> str:
    """The task that a request without one means, by the media it names."""
    if "references" in fields:
        return "ref2va"
    given = {"first_frame", "last_frame", "keyframes"} & fields.keys()
    if not given:
        return "t2va"
    return {"first_frame": "i2va", "last_frame": "l2va"}.get(min(given), "fl2va") if len(given) == 1 else "fl2va"


def describe(field: str) -> str:
    """What is legal for a field, in words."""
    return f"one of {', '.join(TASKS)}" if field == "task" else str(FIELDS[field].description)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a request file. The task may be left out, so any of the five may match, not one alone."""
    schema = ADAPTER.json_schema()
    schema["anyOf"] = schema.pop("oneOf")
    schema.pop("discriminator")
    schema["$defs"]["FramesToVideo"]["anyOf"] = [
        {"required": [name]} for name in ("first_frame", "last_frame", "keyframes")
    ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "h3dist request", **schema}


def task_table() -> str:
    """The tasks with their own fields, then the fields of them all, each with what it may hold."""
    lines = []
    for task, model in TASKS.items():
        lines.append(f"{task:8} {model.__doc__}")
        for name in own_fields(task):
            needed = "needed; " if model.model_fields[name].is_required() else ""
            lines.append(f"    {name:12} {needed}{describe(name)}")
    lines += ["", "every task"]
    lines += [f"    {name:12} {describe(name)}" for name in Request.model_fields]
    return "\n".join([*lines, "", LIMITS])


def own_fields(task: str) -> list[str]:
    """The fields of a task that not every task has."""
    return [name for name in TASKS[task].model_fields if name not in Request.model_fields]
