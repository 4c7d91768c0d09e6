"""The job: what every rank of a run is told, as JSON values, written by the launcher.

{"request": a legal request with every choice made, "notes": what was chosen for the user,
 "output": the fields of `Outputs`, "layout": those of the `Layout` that the launcher chose, or null,
 "exchange": those of the `ExchangePlan` that it chose with it, or null,
 "encode": where it chose to have the text encoded, or null,
 "status_dir": a folder or null, "verbose": true or false}
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from h3dist.config import Config
from h3dist.intake import read_request
from h3dist.outputs import check_outputs, choose_outputs, refuse_inputs


def make_job(
    config: Config, fields: Mapping[str, Any], output: Mapping[str, Any], inputs: Sequence[str] = ()
) -> dict[str, Any]:
    """The job for a request of `fields`, checked as far as can be before any work.

    `output` says where to write (`path`, `latents`, `intermediates`, `trace`, `clobber`); what it leaves out
    or null comes from the configuration. `inputs` are files that `fields` were read from, which no output may
    replace. Raises `RequestError` and `OutputError`.
    """
    resolved = read_request(config, fields)
    said = vars(config.output) | {name: value for name, value in output.items() if value is not None}
    outputs = choose_outputs(**said, mux_audio=resolved.mux_audio)
    read = (config.request.file, config.request.prompt_file, *vars(config.model).values(), *resolved.files, *inputs)
    refuse_inputs(outputs, read)
    check_outputs(outputs, resolved.geometry, resolved.steps)
    return {
        "request": resolved.as_request(),
        "notes": list(resolved.notes),
        "output": outputs.as_dict(),
        "layout": None,
        "exchange": None,
        "encode": None,
        "status_dir": None,
        "verbose": False,
    }


def write_job(job: Mapping[str, Any], path: Path) -> None:
    """Write a job for `read_job`, in ASCII whatever its prompt and paths hold."""
    path.write_text(json.dumps(job), encoding="ascii")


def read_job(path: str) -> dict[str, Any]:
    """The job that the launcher wrote."""
    return json.loads(Path(path).read_text(encoding="ascii"))
