"""q, k and v of a run on real weights, one head of every layer at three of its evaluations, to judge backends on.

Shape letters: S all rows, h heads of one call, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from h3dist.attention.backend import Attention
from h3dist.errors import ConfigError, OutputError


class Place(NamedTuple):
    """How often attention is called: a layer's heads in so many calls, so many layers, so many evaluations."""

    calls: int
    layers: int
    evaluations: int


class Captured(NamedTuple):
    """One head's q, k and v, each [S, 1, D], of a layer at an evaluation; `lead` rows stand before the video's."""

    evaluation: int
    layer: int
    lead: int
    q: Tensor
    k: Tensor
    v: Tensor


class Capturing:
    """An attention that writes what it is given to a folder: at the first, middle and last evaluation, of each layer
    one head, another in every layer.

    A file is 6 S D bytes in bfloat16: at 38110 rows 29 MB, and 50 layers at three evaluations 4.4 GB.
    """

    def __init__(self, attention: Attention, folder: Path, place: Place, lead: int) -> None:
        """Makes the folder. Raises OutputError."""
        self._attention, self._folder, self._place, self._lead = attention, folder, place, lead
        self._kept = {0, place.evaluations // 2, place.evaluations - 1}
        self._count = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"attention.capture={folder}: {error.strerror}") from error

    def __call__(self, q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        index, call = divmod(self._count, self._place.calls)
        evaluation, layer = divmod(index, self._place.layers)
        self._count += 1
        if call == 0 and evaluation in self._kept:
            self._save(evaluation, layer, {"q": q_ShD, "k": k_ShD, "v": v_ShD})
        return self._attention(q_ShD, k_ShD, v_ShD)

    def _save(self, evaluation: int, layer: int, given: dict[str, Tensor]) -> None:
        path = self._folder / f"evaluation-{evaluation:03d}.layer-{layer:03d}.safetensors"
        head = layer % given["q"].shape[1]
        tensors = {name: x[:, head : head + 1].contiguous().cpu() for name, x in given.items()}
        try:
            save_file(tensors, path, metadata={"lead": str(self._lead)})
        except (OSError, SafetensorError) as error:
            raise OutputError(f"cannot write {path}: {error}") from error


def read(folder: Path, device: Any) -> Iterator[Captured]:
    """What a run wrote to a folder, in order, one at a time on the device. Raises ConfigError where nothing is."""
    paths = sorted(folder.glob("evaluation-*.layer-*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder} holds nothing that attention.capture wrote")
    for path in paths:
        evaluation, layer = (int(part.split("-")[1]) for part in path.name.split(".")[:2])
        with safe_open(path, framework="pt") as file:
            lead = int(file.metadata()["lead"])
            q, k, v = (file.get_tensor(name).to(device) for name in "qkv")
        yield Captured(evaluation, layer, lead, q, k, v)
