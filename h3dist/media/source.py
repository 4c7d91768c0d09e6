"""Where media come from: a path, bytes, base64 or a data URI, all read alike; and what every reader refuses alike."""

import base64
import binascii
import io
import os
import stat
import struct
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from h3dist.errors import RequestError
from h3dist.request import is_inline

Source = str | bytes | Path
MAX_BYTES = 512 << 20


@contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """What a source holds, as a binary file that can seek.

    Raises RequestError: no such file, none that is plain, empty, above 512 MiB, base64 that is none.
    """
    if isinstance(source, bytes) or (isinstance(source, str) and is_inline(source)):
        yield io.BytesIO(_checked(source, _inline_bytes(source)))
        return
    try:
        mode = os.stat(source)
        if not stat.S_ISREG(mode.st_mode):
            raise RequestError(f"{name_of(source)}: {'a folder' if stat.S_ISDIR(mode.st_mode) else 'no plain file'}")
        _check_size(source, mode.st_size)
        file = open(source, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise RequestError(f"{name_of(source)}: {getattr(error, 'strerror', None) or error}") from None
    with file:  # apart from the above, so that a reader's errors are not taken for this file's
        yield file


def name_of(source: Source) -> str:
    """A source as a message names it: its path, or how many bytes it holds."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    text = str(source)
    if not is_inline(text):
        return text
    kind = text[5:].split(",", 1)[0].split(";")[0] if text.startswith("data:") else "base64"
    return f"{kind[:40] or 'inline'} data of {len(text)} characters"


@contextmanager
def plain_reading(source: Source, what: str, allowed: str) -> Iterator[None]:
    """What Pillow and FFmpeg raise for a damaged file, or one of another kind, becomes RequestError."""
    import av
    from PIL import Image, UnidentifiedImageError

    damaged = (OSError, av.FFmpegError, SyntaxError, ValueError, EOFError, LookupError, RuntimeError, struct.error)
    try:
        yield
    except UnidentifiedImageError:
        raise RequestError(f"{name_of(source)}: not {what} that can be read; allowed are {allowed}") from None
    except Image.DecompressionBombError as error:
        raise RequestError(f"{name_of(source)}: {error}") from None
    except damaged as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"{name_of(source)}: not {what} that can be read ({why}); allowed are {allowed}") from None


def _inline_bytes(source: bytes | str) -> bytes:
    if isinstance(source, bytes):
        return source
    header, text = source.split(",", 1) if source.startswith("data:") and "," in source else ("base64", source)
    if source.startswith("data:") and header == "base64":
        raise RequestError(f"{name_of(source)}: a data URI is data:TYPE;base64,DATA")
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        _check_size(source, len(text) * 3 // 4)
    if not header.endswith("base64"):
        return urllib.parse.unquote_to_bytes(text)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{name_of(source)}: no base64: {error}") from None


def _checked(source: Source, data: bytes) -> bytes:
    _check_size(source, len(data))
    return data


def _check_size(source: Source, size: int) -> None:
    if size == 0:
        raise RequestError(f"{name_of(source)}: holds no bytes")
    if size > MAX_BYTES:
        raise RequestError(f"{name_of(source)}: {size / 2**20:.0f} MiB; at most {MAX_BYTES >> 20} are read")
