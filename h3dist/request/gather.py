"""How files, options and overrides become the fields of one request.

A request is the request file, then the prompt file, then the prompt that was typed, then `request.*` overrides
that are not null.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from h3dist.errors import RequestError
from h3dist.request.media import absolute_media
from h3dist.request.schema import FIELDS


def gather_request(
    config_request: Mapping[str, Any],
    request_file: str | None = None,
    prompt_file: str | None = None,
    prompt: str | None = None,
) -> dict[str, Any]:
    """The fields of one request from all the places that can say them, later ones winning; not validated.

    `config_request` are the `request.*` configuration values, None where unsaid; `file` and `prompt_file`
    among them stand in for the two arguments. Media paths become absolute: those in a request file are relative
    to that file. Raises RequestError for a file that cannot be read and for one said twice.
    """
    request_file = _said_once("a request file", request_file, config_request.get("file"))
    prompt_file = _said_once("a prompt file", prompt_file, config_request.get("prompt_file"))
    data = read_request_file(request_file) if request_file is not None else {}
    if prompt_file is not None:
        data["prompt"] = read_prompt_file(prompt_file)
    if prompt is not None:
        data["prompt"] = prompt
    said = {name: value for name, value in config_request.items() if name in FIELDS}
    said = {name: value for name, value in said.items() if value is not None}
    if "frames" in said or "duration" in said:  # either one says the length anew
        data.pop("frames", None), data.pop("duration", None)
    return data | absolute_media(said, ".")


def read_request_file(path: str) -> dict[str, Any]:
    """The fields in a JSON request file, or in the sidecar of an earlier run. Raises RequestError."""
    try:
        data = json.loads(_read(path, "request file"), object_pairs_hook=_no_field_twice)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"request file {path}: not JSON: {error}") from None
    if isinstance(data, dict) and isinstance(data.get("request"), dict):
        _nothing_beside(path, data)
        data = data["request"]
    if not isinstance(data, dict):
        raise RequestError(f"request file {path}: must hold one JSON object, {{...}}")
    said = {name: value for name, value in data.items() if value is not None or name not in FIELDS}
    return absolute_media(said, Path(path).parent)


def read_settings(path: str) -> dict[str, Any]:
    """The configuration that a sidecar tells of its run; none for a plain request file, which has been read before."""
    data = json.loads(_read(path, "request file"))
    settings = data.get("config") if isinstance(data.get("request"), dict) else None
    return settings if isinstance(settings, dict) else {}


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


def _nothing_beside(path: str, data: Mapping[str, Any]) -> None:
    """Refuse fields beside a sidecar's "request": they would not be read."""
    beside = [name for name in data if name in FIELDS]
    if beside:
        raise RequestError(f'request file {path}: {", ".join(beside)} must stand inside "request", not beside it')


def _said_once(what: str, option: str | None, override: str | None) -> str | None:
    if option is not None and override is not None:
        raise RequestError(f"{what} is named twice: {option} and {override}")
    return option if option is not None else override
