"""What to make: the request, its tasks and their one validator, and how files, options and overrides become one."""

from h3dist.request.gather import gather_request, read_prompt_file, read_request_file, read_settings
from h3dist.request.media import MediaFacts, absolute_media, is_inline, sources_of
from h3dist.request.parse import parse_request, unknown_field
from h3dist.request.resolve import MAX_BETA_STEPS, Keyframe, Reference, Resolved, resolve
from h3dist.request.schema import (
    FIELDS,
    MAX_SEED,
    MAX_STEPS,
    TASKS,
    Request,
    describe,
    infer_task,
    json_schema,
    task_table,
)

__all__ = [
    "FIELDS",
    "MAX_BETA_STEPS",
    "MAX_SEED",
    "MAX_STEPS",
    "TASKS",
    "Keyframe",
    "MediaFacts",
    "Reference",
    "Request",
    "Resolved",
    "absolute_media",
    "describe",
    "gather_request",
    "infer_task",
    "is_inline",
    "json_schema",
    "parse_request",
    "read_prompt_file",
    "read_request_file",
    "read_settings",
    "resolve",
    "sources_of",
    "task_table",
    "unknown_field",
]
