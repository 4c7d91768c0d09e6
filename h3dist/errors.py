"""Errors that a user can see. Each has an exit code of `h3dist` and an HTTP status."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


class H3Error(Exception):
    """Base of every error that is answered with one line and no traceback.

    `rank` and `stage` say where it came up when it was another rank's, and this one only passes it on.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    rank: int | None = None
    stage: str | None = None


class RequestError(H3Error):
    """What was asked for is not legal: a field, its type or its range."""

    exit_code = 2
    http_status = 422


class ConfigError(H3Error):
    """How or where to run is not legal: an option, a configuration key, group or value."""

    exit_code = 2
    http_status = 400


class CheckpointError(H3Error):
    """A model file is missing, damaged, of another kind, or holds what we cannot read."""

    exit_code = 3


class PlanError(H3Error):
    """The layout is not legal for this model, or does not fit the memory that is free."""

    exit_code = 4
    http_status = 422


class OutputError(H3Error):
    """The result cannot be written: folder, permission, file name or disk space."""

    exit_code = 5
    http_status = 507


class NumericsError(H3Error):
    """The model produced NaN or infinity."""

    exit_code = 6


class RankError(H3Error):
    """A rank died, left, or did not answer in time."""

    exit_code = 7


class MissingDependency(H3Error):
    """An optional package is needed for what was asked."""

    exit_code = 8


def nearest(name: str, choices: Iterable[str]) -> str:
    """The choice spelt most like `name`, as the tail of a message: "; did you mean 'width'?".

    Empty when nothing comes close, so that it can be appended to any message.
    """
    found = get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""
