"""A recording of the machine as a file that `h3dist plan --links` and `load_topology` read."""

import json
import os
from collections.abc import Mapping
from typing import Any

from h3dist.errors import ConfigError, OutputError
from h3dist.outputs import remove


def write_recording(recording: Mapping[str, Any] | None, path: str) -> None:
    """Write a recording, whole or not at all.

    Raises ConfigError where the driver could not be asked and there is none, OutputError where it cannot be written.
    """
    if recording is None:
        raise ConfigError(f"there is nothing to record to {path}: the driver does not answer")
    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(recording, file, indent=1)
        os.replace(part, path)
    except OSError as error:
        remove([part])
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
