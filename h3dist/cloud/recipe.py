"""How a pod is set up and what runs on it: every path and command in one place, each replaceable by a file."""

import json
import shlex
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from h3dist.errors import ConfigError, nearest

DEFAULT_IMAGE = "runpod/pytorch:1.0.3-cu1281-torch291-ubuntu2404"


class Checkpoint(BaseModel):
    """One file of a public repository, or with `folder` one folder of it. `size` in bytes is what it must have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: str
    variable: str
    repo: str
    revision: str
    file: str
    size: int | None = None
    folder: bool = False

    @property
    def witness(self) -> str:
        """The file whose presence and size say that this is here."""
        return f"{self.file}/tokenizer.json" if self.folder else self.file


class Recipe(BaseModel):
    """What the image is like and which commands are meant. The defaults fit RunPod's images and our own."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    image: str = DEFAULT_IMAGE
    start: list[str] = Field(default=["/start.sh"], min_length=1)
    user: str = "root"
    mount: str = "/workspace"
    workspace: str = "/workspace/h3dist"
    state: str = "/tmp/h3-pod"
    python: str = "python3"
    package: str = "checkout"  # "checkout", "image" (it is there already), or a requirement: h3dist==1.2.3
    install: str | None = None  # a shell command instead of venv and pip; runs in the workspace
    bin: str | None = None  # where h3dist and hf are; null: the workspace's venv/bin
    doctor: list[str] = ["h3dist", "doctor", "--json"]
    matrix: list[str] = ["h3dist", "matrix"]
    checkpoints: list[Checkpoint] | None = None  # null: the released set

    @property
    def models(self) -> str:
        """Where checkpoints lie: on the volume, so that the next pod finds them."""
        return f"{self.workspace}/models"

    @property
    def path(self) -> str:
        """The folder that is put in front of PATH; empty when the image has all."""
        if self.bin is not None:
            return self.bin
        return "" if self.package == "image" else f"{self.workspace}/venv/bin"

    def install_command(self, extras: list[str]) -> str:
        """The shell command that puts the package into the workspace's venv; empty for package=image."""
        if self.install is not None:
            return self.install
        if self.package == "image":
            return ""
        chosen = f"[{','.join(sorted(extras))}]" if extras else ""
        if self.package == "checkout":
            what = f"-c src/constraints.txt {shlex.quote('./src' + chosen)}"
        else:
            name, _, version = self.package.partition("==")
            what = shlex.quote(f"{name}{chosen}=={version}")
        return f"{shlex.quote(self.python)} -m venv venv && venv/bin/pip install --no-input -q {what}"


def load_recipe(path: Path | None, **changes: Any) -> Recipe:
    """The defaults, then a JSON file's fields, then `changes` that are not None. Raises ConfigError."""
    fields: dict[str, Any] = {}
    if path:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the recipe {path}: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"the recipe {path} must be a JSON object")
    fields |= {name: value for name, value in changes.items() if value is not None}
    for name in fields:
        if name not in Recipe.model_fields:
            raise ConfigError(f"a recipe has no field {name!r}{nearest(name, Recipe.model_fields)}")
    try:
        recipe = Recipe.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"recipe field {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if recipe.package not in ("checkout", "image") and "==" not in recipe.package:
        raise ConfigError(f"package {recipe.package!r}: want checkout, image, or a pinned one such as h3dist==1.0.0")
    return recipe
