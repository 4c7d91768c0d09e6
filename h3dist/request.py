"""What to make: the request, its one validator, and how files, options and overrides become one.

A request is the request file, then the prompt file, then the prompt that was typed, then `request.*`
overrides that are not null; pydantic validates it once, in strict JSON mode, whoever asks.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from h3dist.errors import RequestError, nearest
from h3dist.geometry import (
    CANVAS_MULTIPLE,
    FPS,
    MAX_TRAINED_FRAMES,
    Geometry,
    align_frames,
    frames_for_duration,
    legal_frames,
    nearest_multiples,
)

TASKS = {"t2va": "text to video with sound"}
DEFAULT_WIDTH, DEFAULT_HEIGHT, DEFAULT_FRAMES, DEFAULT_STEPS = 1344, 768, 124, 12
MAX_SEED = 2**63 - 1
MAX_STEPS = 200
MAX_BETA_STEPS = (
    138  # from 139 on the beta schedule meets an index twice, so evaluations would be fewer than asked
)
GUIDANCE_FIELDS = ("negative_prompt", "guidance", "guidance_scale", "cfg", "cfg_scale")


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("blank")
    return text


Side = Annotated[int, Field(ge=CANVAS_MULTIPLE, multiple_of=CANVAS_MULTIPLE)]


class Request(BaseModel):
    """What to make. A field that is None takes its default; each description says what is legal."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    task: Literal["t2va"] | None = Field(None, description="t2va, the one task so far")
    prompt: Annotated[str, AfterValidator(_not_blank)] = Field(description="text that is not empty")
    width: Side | None = Field(None, description="a whole number of pixels, a multiple of 32")
    height: Side | None = Field(None, description="a whole number of pixels, a multiple of 32")
    frames: Annotated[int, Field(ge=1)] | None = Field(None, description="a whole number from 1 to 362")
    duration: Annotated[float, Field(gt=0)] | None = Field(None, description="a number of seconds above 0")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(
        None, description="a whole number from 0 to 2^63 - 1"
    )
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = Field(
        None, description=f"a whole number from 1 to {MAX_STEPS}"
    )
    mux_audio: bool | None = Field(None, description="true or false, without quotes")

    @model_validator(mode="after")
    def _one_length(self) -> "Request":
        if self.frames is not None and self.duration is not None:
            raise ValueError("frames and duration are two ways to say one thing: give one of them")
        return self


@dataclass(frozen=True)
class Resolved:
    """A request with every choice made: canvas, aligned frames, seed and evaluations."""

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

    @property
    def geometry(self) -> Geometry:
        """The clip's canvas and length."""
        return Geometry(self.width, self.height, self.frames)

    def as_request(self) -> dict[str, Any]:
        """The same as a request, legal as a request file: it gives this clip again."""
        return {name: getattr(self, name) for name in Request.model_fields if name != "duration"}


def unknown_field(name: str) -> str:
    """Why `name` is no field of a request: the message, with the nearest field or the reason."""
    if name in GUIDANCE_FIELDS:
        return (
            f"{name}: MiniMax H3 is guidance-distilled: it runs once a step, with no classifier-free "
            "guidance, so there is no negative prompt and no guidance scale"
        )
    hint = nearest(name, Request.model_fields)
    return f"unknown request field {name!r}{hint or '; fields are ' + ', '.join(Request.model_fields)}"


def parse_request(data: Mapping[str, Any]) -> Request:
    """`data` as a validated request. Raises RequestError in plain words: wrong type, range or field."""
    try:
        text = json.dumps(dict(data))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a request holds JSON values only: {error}") from None
    try:
        return Request.model_validate_json(text)
    except ValidationError as error:
        problems = [_in_words(problem) for problem in error.errors()]
        raise RequestError("; ".join(dict.fromkeys(problems))) from None


def resolve(request: Request, *, allow_untrained: bool = False, schedule: str = "beta") -> Resolved:
    """Every open choice of `request` made: defaults, frames snapped up to 17k + 5, the seed drawn.

    `allow_untrained` admits clips over 362 frames; `schedule` limits the steps. Raises RequestError. What was
    changed or drawn is said in `notes`.
    """
    asked = _frames_asked(request, allow_untrained)
    frames = align_frames(asked)
    seed = secrets.randbelow(MAX_SEED + 1) if request.seed is None else request.seed
    notes = [] if frames == asked else [f"frames: {asked} asked, {frames} made (17k + 5, snapped up)"]
    notes += [f"seed {seed} (drawn)"] if request.seed is None else []
    return Resolved(
        task=request.task or "t2va",
        prompt=request.prompt,
        width=request.width or DEFAULT_WIDTH,
        height=request.height or DEFAULT_HEIGHT,
        frames=frames,
        frames_asked=asked,
        seed=seed,
        steps=_steps(request, schedule),
        mux_audio=request.mux_audio is not False,
        notes=tuple(notes),
    )


def gather_request(
    config_request: Mapping[str, Any],
    request_file: str | None = None,
    prompt_file: str | None = None,
    prompt: str | None = None,
) -> dict[str, Any]:
    """The fields of one request from all the places that can say them, later ones winning; not validated.

    `config_request` are the `request.*` configuration values, None where unsaid; `file` and `prompt_file`
    among them stand in for the two arguments. Raises RequestError for a file that cannot be read and for one
    said twice.
    """
    request_file = _said_once("a request file", request_file, config_request.get("file"))
    prompt_file = _said_once("a prompt file", prompt_file, config_request.get("prompt_file"))
    data = read_request_file(request_file) if request_file is not None else {}
    if prompt_file is not None:
        data["prompt"] = read_prompt_file(prompt_file)
    if prompt is not None:
        data["prompt"] = prompt
    said = {name: value for name, value in config_request.items() if name in Request.model_fields}
    said = {name: value for name, value in said.items() if value is not None}
    if "frames" in said or "duration" in said:  # either one says the length anew
        data.pop("frames", None), data.pop("duration", None)
    return data | said


def read_request_file(path: str) -> dict[str, Any]:
    """The fields in a JSON request file, or in the sidecar of an earlier run. Raises RequestError."""
    try:
        data = json.loads(_read(path, "request file"), object_pairs_hook=_no_field_twice)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"request file {path}: not JSON: {error}") from None
    if isinstance(data, dict) and isinstance(data.get("request"), dict):
        data = data["request"]
    if not isinstance(data, dict):
        raise RequestError(f"request file {path}: must hold one JSON object, {{...}}")
    return {name: value for name, value in data.items() if value is not None}


def read_prompt_file(path: str) -> str:
    """The text of a UTF-8 prompt file, all of it but one final newline. Raises RequestError."""
    try:
        text = _read(path, "prompt file").decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"prompt file {path}: not UTF-8: byte {error.start} is {error.reason}") from None
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\r\n") else text.removesuffix("\n")


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise RequestError(f"{what} {path}: {getattr(error, 'strerror', None) or error}") from None


def _no_field_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice")
    return data


def _said_once(what: str, option: str | None, override: str | None) -> str | None:
    if option is not None and override is not None:
        raise RequestError(f"{what} is named twice: {option} and {override}")
    return option if option is not None else override


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


def _in_words(problem: Mapping[str, Any]) -> str:
    """One of pydantic's findings as a sentence a user can act on."""
    field = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        return unknown_field(field)
    if problem["type"] == "missing":
        return f"{field} is missing: it must be {Request.model_fields[field].description}"
    if problem["type"] == "json_invalid":
        return "a text in the request is not valid Unicode"
    if not field:
        return str(problem["ctx"]["error"])
    shown = shorten(json.dumps(problem["input"], ensure_ascii=False), width=60)
    legal = Request.model_fields[field].description
    return f"{field}={shown}: must be {legal}{_nearest_value(field, problem['input'])}"


def _nearest_value(field: str, value: Any) -> str:
    """The legal value closest to a refused one, as the tail of a message; empty where nothing is close."""
    if field == "mux_audio" and str(value).lower() in ("true", "false"):
        return f"; the nearest is {str(value).lower()}"
    whole = _whole(value)
    if whole is None:
        return ""
    if field in ("width", "height"):
        sides = dict.fromkeys(nearest_multiples(whole))
        return f"; the nearest {'are' if len(sides) > 1 else 'is'} {' and '.join(map(str, sides))}"
    if field == "frames":
        return f"; the nearest is {min(legal_frames(), key=lambda frames: abs(frames - whole))}"
    low, high = {"steps": (1, MAX_STEPS), "seed": (0, MAX_SEED)}.get(field, (None, None))
    return "" if low is None else f"; the nearest is {min(max(whole, low), high)}"


def _whole(value: Any) -> int | None:
    """The whole number that a refused value was perhaps meant to be."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value) if not isinstance(value, float) else round(value)
    except (ValueError, OverflowError):
        return None
