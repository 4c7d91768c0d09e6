"""Filling diffusers' VAE modules from a Comfy-format file: configuration, latent statistics, tensors."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from h3dist.errors import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import StateFile

STATISTICS = ("latents_mean", "latents_std")
ROUNDING = 2e-3  # how far statistics may part: a file may hold them in float16


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of the latents, float32 [C]; the denoiser sees (latent - mean) / std."""

    mean: torch.Tensor
    std: torch.Tensor

    def restore(self, latents: torch.Tensor) -> torch.Tensor:
        """The denoiser's latents [B, C, ...] as the decoder wants them: float32, on its device."""
        shape = (1, -1, *[1] * (latents.ndim - 2))
        latents = latents.to(self.mean.device, torch.float32)
        return latents * self.std.view(shape) + self.mean.view(shape)

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        """The encoder's latents [B, C, ...] as the denoiser sees them: float32, where the latents are."""
        shape = (1, -1, *[1] * (latents.ndim - 2))
        mean, std = (values.to(latents.device).view(shape) for values in (self.mean, self.std))
        return (latents.to(torch.float32) - mean) / std


def read_config(path: str | Path | None, model: type) -> dict[str, Any]:
    """The arguments of diffusers' `model`: its defaults (the released size), then the JSON file's at `path`.

    `latents_mean` and `latents_std` are None unless the JSON gives them. Raises ConfigError where the file
    cannot be read or names an argument that the model does not have.
    """
    parameters = list(inspect.signature(model.__init__).parameters.values())[1:]
    config = {parameter.name: parameter.default for parameter in parameters}
    config |= dict.fromkeys(STATISTICS)
    if path is None:
        return config
    given = {key: value for key, value in _read_json(path).items() if not key.startswith("_")}
    for key in sorted(given.keys() - config.keys()):
        raise ConfigError(f"{path}: {model.__name__} has no setting {key!r}{nearest(key, config)}")
    return config | given


def _read_json(path: str | Path) -> dict[str, Any]:
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(given).__name__}")
    return given


def stored_statistics(state_file: "StateFile") -> dict[str, torch.Tensor]:
    """The latent statistics that a file holds, by name; none where it holds none."""
    return {name: state_file.tensor(name) for name in STATISTICS if name in state_file.tensors}


def read_statistics(
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    released: Mapping[str, Sequence[float]],
    *,
    source: str,
    device: torch.device,
) -> Statistics:
    """Latent statistics: the file's own, else the configuration's, else the released ones.

    Raises CheckpointError where the file's and the configuration's part, or are no statistics.
    """
    mean, std = (_statistic(name, state.get(name), config[name], released[name], source) for name in STATISTICS)
    if (std <= 0).any():
        raise CheckpointError(f"{source}: latents_std must be above zero")
    return Statistics(mean.to(device), std.to(device))


def _statistic(
    name: str,
    stored: torch.Tensor | None,
    given: Sequence[float] | None,
    released: Sequence[float],
    source: str,
) -> torch.Tensor:
    value = torch.tensor(released if given is None else given, dtype=torch.float32)
    if stored is not None:
        stored = stored.to("cpu", torch.float32).flatten()
        if given is not None and not _agree(stored, value):
            raise CheckpointError(f"{source}: the file's {name} is not the configuration's: another model?")
        value = stored
    if len(value) != len(released) or not torch.isfinite(value).all():
        raise CheckpointError(f"{source}: {name} must be {len(released)} finite numbers")
    return value


def _agree(stored: torch.Tensor, given: torch.Tensor) -> bool:
    return stored.shape == given.shape and torch.allclose(stored, given, rtol=ROUNDING, atol=ROUNDING)


def keep_float32(name: str) -> torch.dtype:
    """Every tensor is kept as float32, whatever its name."""
    return torch.float32


def fill(
    parts: nn.ModuleDict,
    state: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
    dtype: Callable[[str], torch.dtype],
    source: str,
) -> None:
    """Give `parts` (modules made on the meta device, no memory yet) the tensors of `state` that are theirs.

    `dtype` says for a tensor's name what it is kept as. Raises CheckpointError that counts missing,
    unexpected and misshapen tensors and names five.
    """
    wanted = parts.state_dict()
    mine = {name: tensor for name, tensor in state.items() if name.split(".", 1)[0] in parts}
    bad = [f"{name} (missing)" for name in wanted if name not in mine]
    bad += [f"{name} (unexpected)" for name in mine if name not in wanted]
    bad += [
        f"{name} {list(tensor.shape)} (expected {list(wanted[name].shape)})"
        for name, tensor in mine.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    if bad:
        raise CheckpointError(f"{source}: {len(bad)} tensors do not fit the VAE: {', '.join(bad[:5])}")
    placed = {name: tensor.to(device, dtype(name)) for name, tensor in mine.items()}
    parts.load_state_dict(placed, assign=True)
    parts.requires_grad_(False).eval()
