"""Secrets: where the API key is read, and how nothing that is printed can hold it."""

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import SecretStr

from h3dist.cloud.failures import KeyRefused

KEY_VARIABLE = "RUNPOD_API_KEY"
TOKEN_VARIABLE = "HF_TOKEN"
SECRET_VARIABLES = (KEY_VARIABLE, TOKEN_VARIABLE, "HUGGING_FACE_HUB_TOKEN")


def read_key(environ: Mapping[str, str], key_file: Path | None = None) -> SecretStr:
    """The user's API key: from `key_file` when one is named, else from the environment.

    Raises KeyRefused where there is none, where others may read the file, or where the text cannot be
    a key. The key itself is never part of a message.
    """
    source = f"the file {key_file}" if key_file else f"the variable {KEY_VARIABLE}"
    text = _read_private(key_file) if key_file else environ.get(KEY_VARIABLE, "")
    key = text.strip()
    if not key:
        raise KeyRefused(f"no API key: set {KEY_VARIABLE}, or name a file of mode 0600 with --key-file")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise KeyRefused(f"what {source} holds is not an API key: one line of printable ASCII is wanted")
    return SecretStr(key)


def _read_private(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise KeyRefused(f"others can read the key file {path}; run: chmod 600 {path}")
            return file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        raise KeyRefused(f"cannot read the key file {path}: {type(error).__name__}") from None


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without secrets: what a child process such as ssh gets."""
    return {name: value for name, value in environ.items() if name not in SECRET_VARIABLES}


class Redactor:
    """Replaces every known secret in a text by three stars."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: list[str] = []
        for secret in secrets:
            self.add(secret)

    def add(self, secret: str) -> None:
        """Make `secret` unprintable from now on; shorter than 6 characters it would hide common words."""
        if len(secret) >= 6 and secret not in self._secrets:
            self._secrets.append(secret)
            self._secrets.sort(key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text
