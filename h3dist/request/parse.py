"""The one validator: a request's fields to its task's schema, and what pydantic found, in words."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from h3dist.errors import RequestError, nearest
from h3dist.geometry import legal_frames, nearest_multiples
from h3dist.request.media import ITEMS, as_json_value
from h3dist.request.schema import (
    ADAPTER,
    FIELDS,
    MAX_SEED,
    MAX_SIDE,
    MAX_STEPS,
    TASKS,
    Request,
    describe,
    infer_task,
    own_fields,
)

GUIDANCE_FIELDS = ("negative_prompt", "guidance", "guidance_scale", "cfg", "cfg_scale")
MOST_TOLD = 10  # problems of one request
ITEM_WORDS = {name: info.description for item in ITEMS for name, info in item.model_fields.items()}


def parse_request(data: Mapping[str, Any]) -> Request:
    """`data` as a validated request of its task, which is inferred from its media where `task` is absent.

    Bytes and paths among the media are taken as such. Raises RequestError in plain words: a wrong type, range
    or field, or one that does not belong to the task.
    """
    fields = {name: value for name, value in data.items() if value is not None or name not in FIELDS}
    task, problems = fields.get("task"), []
    if task is not None and not (isinstance(task, str) and task in TASKS):
        problems.append(f"task={_shown(task)}: must be {describe('task')}{nearest(str(task), TASKS)}")
    if task is None or problems:
        fields["task"] = infer_task(fields)
    try:
        text = json.dumps(fields, default=as_json_value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a request holds JSON values only: {error}") from None
    try:
        request = ADAPTER.validate_json(text)
    except ValidationError as error:
        problems += [_in_words(problem) for problem in error.errors() if not _follows(problem)]
    if problems:
        raise RequestError(_joined(list(dict.fromkeys(problems))))
    return request


def unknown_field(name: str, task: str | None = None) -> str:
    """Why `name` is no field of a request, or not of one for `task`: with the nearest field or the reason."""
    if name in GUIDANCE_FIELDS:
        return (
            f"{name}: MiniMax H3 is guidance-distilled: it runs once a step, with no classifier-free "
            "guidance, so there is no negative prompt and no guidance scale"
        )
    if task is not None and name in FIELDS:
        own = ", ".join(own_fields(task)) or "no media"
        others = ", ".join(other for other in TASKS if name in TASKS[other].model_fields)
        return f"{name} does not belong to {task}, which takes {own}; {name} goes with {others}"
    return f"unknown request field {_cut(name)!r}{nearest(_cut(name), FIELDS) or '; fields are ' + ', '.join(FIELDS)}"


def _joined(problems: Sequence[str]) -> str:
    """The first problems in one line, and how many more there are."""
    more = [f"and {len(problems) - MOST_TOLD} more"] if len(problems) > MOST_TOLD else []
    return "; ".join([*problems[:MOST_TOLD], *more])


def _follows(problem: Mapping[str, Any]) -> bool:
    """Whether pydantic found this only because an item of the list was refused, which it tells besides."""
    return problem["type"] == "too_short" and bool(problem["input"])


def _in_words(problem: Mapping[str, Any]) -> str:
    """One of pydantic's findings as a sentence a user can act on."""
    if problem["type"] == "json_invalid":
        if "recursion" in problem["ctx"]["error"]:
            return "a value in the request is nested too deep"
        return "a text in the request is not valid Unicode"
    task, *place = problem["loc"]
    if not place:
        return str(problem["ctx"]["error"])
    if len(place) > 1:
        return _item_in_words(problem, place)
    field = str(place[0])
    if problem["type"] == "extra_forbidden":
        return unknown_field(field, task)
    if problem["type"] == "missing":
        return f"{field} is missing: it must be {describe(field)}"
    if problem["type"] == "value_error" and str(problem["ctx"]["error"]) != "blank":
        return f"{field}: {problem['ctx']['error']}"
    legal = f"{describe(field)}{_nearest_value(field, problem['input'])}"
    return f"{field}={_shown(problem['input'])}: must be {legal}"


def _item_in_words(problem: Mapping[str, Any], place: Sequence[Any]) -> str:
    """The same for what stands inside keyframes or references: FIELD[INDEX], or FIELD[INDEX].KEY."""
    field, index, *rest = place
    where = f"{field}[{index}]"
    key = str(rest[1]) if len(rest) > 1 else None  # rest[0] is the item's kind
    if key is None:
        return f"{where}={_shown(problem['input'])}: {field} must be {describe(field)}"
    if problem["type"] == "missing":
        return f"{where}.{key} is missing: it must be {ITEM_WORDS[key]}"
    if problem["type"] == "extra_forbidden":
        close = nearest(key, ITEM_WORDS.keys() - {key})
        return f"{where}: {key!r} does not belong there{close}; {field} must be {describe(field)}"
    if problem["type"] == "value_error" and str(problem["ctx"]["error"]) != "blank":
        return f"{where}.{key}: {problem['ctx']['error']}"
    return f"{where}.{key}={_shown(problem['input'])}: must be {ITEM_WORDS[key]}"


def _shown(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False, default=str))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest_value(field: str, value: Any) -> str:
    """The legal value closest to a refused one, as the tail of a message; empty where nothing is close."""
    if field == "mux_audio" and str(value).lower() in ("true", "false"):
        return f"; the nearest is {str(value).lower()}"
    whole = _whole(value)
    if whole is None:
        return ""
    if field in ("width", "height"):
        sides = dict.fromkeys(nearest_multiples(min(whole, MAX_SIDE)))
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
