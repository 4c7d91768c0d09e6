"""What all written files share: errors in plain words, and nothing left behind."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h3dist.errors import OutputError


@contextmanager
def deleted_on_error(path: str | Path) -> Iterator[None]:
    """Whatever goes wrong inside, interruption too, no file stays at `path`. Devices and folders are left."""
    try:
        yield
    except BaseException:
        if os.path.isfile(path):
            os.unlink(path)
        raise


@contextmanager
def plain_errors(path: str | Path) -> Iterator[None]:
    """Errors of the operating system and of FFmpeg while `path` is written become OutputError."""
    import av

    try:
        yield
    except (OSError, av.FFmpegError) as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
