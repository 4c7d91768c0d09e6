"""Opens the four model files: what each is, a check of all its header, then its tensors and weights.

Nothing here needs torch until a tensor is read. Names are without the prefix that a merged file puts before
them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from h3dist.checkpoint import audio_names, denoiser_names, text_names, video_names
from h3dist.checkpoint.denoiser_names import DenoiserDims, denoiser_dims, denoiser_table, refuse_banks
from h3dist.checkpoint.expect import Linear, check, positive
from h3dist.checkpoint.file import TensorFile, TensorInfo
from h3dist.checkpoint.kinds import NAMES, Kind, find_parts, identify, looks_like, own_tensors
from h3dist.checkpoint.slices import Slice
from h3dist.checkpoint.storage import ALL, Spec
from h3dist.errors import CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from h3dist.checkpoint.formats import Weight

__all__ = [
    "DenoiserDims", "DenoiserFile", "Slots", "StateFile", "identify", "open_audio_vae", "open_denoiser",
    "open_part", "open_slots", "open_text_encoder", "open_vaes", "open_video_vae",
]  # fmt: skip

QkvOrder = Literal["bands", "interleaved"]
Pathlike = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class StateFile:
    """One model in an open file, every tensor of it checked by name, shape and dtype."""

    file: TensorFile
    prefix: str
    kind: Kind
    dims: Any
    table: Mapping[str, Spec]  # every tensor by its logical shape, whatever its format
    tensors: Mapping[str, TensorInfo]  # as they lie in the file
    linears: Mapping[str, Linear]
    notes: tuple[str, ...]

    @property
    def formats(self) -> dict[str, dict[str, Any]]:
        """Quantised layer -> its marker, with `format` and `full_precision_matrix_mult`."""
        return {layer: linear.config for layer, linear in self.linears.items() if linear.config}

    def linear(self, layer: str, cut: Slice = ALL) -> Weight:
        """The weight of a linear layer, or a cut of it, stored as it is in the file.

        Raises CheckpointError for scales that are NaN or zero, and for a cut that the format cannot make.
        """
        return self.linears[layer].storage.read(self.file, self.prefix + layer, cut)

    def tensor(self, name: str) -> Tensor:
        """A tensor in its own dtype; the `.weight` of a quantised layer as float32 [N, K]."""
        import torch

        layer = name.removesuffix(".weight")
        if name != layer and layer in self.linears and self.linears[layer].config:
            return self.linear(layer).dense(torch.float32)
        return self.file.read(self.prefix + name)

    def linear_bytes(self, layer: str, cut: Slice = ALL) -> int:
        """Bytes that `linear` asks of the file, from the header alone."""
        return self.linears[layer].storage.nbytes(cut)

    def tensor_bytes(self, name: str) -> int:
        """Bytes that `tensor` asks of the file, from the header alone."""
        layer = name.removesuffix(".weight")
        if name != layer and layer in self.linears and self.linears[layer].config:
            return self.linear_bytes(layer)
        return self.tensors[name].nbytes


@dataclass(frozen=True, eq=False)
class DenoiserFile(StateFile):
    """A denoiser. `qkv_order`: how the rows of its fused projections lie, in three bands or head by head."""

    dims: DenoiserDims
    qkv_order: QkvOrder


class Slots(NamedTuple):
    """The four opened models, and notes on how they were taken."""

    denoiser: DenoiserFile
    text_encoder: StateFile
    video_vae: StateFile
    audio_vae: StateFile
    notes: tuple[str, ...]


class Names(NamedTuple):
    """How one kind of model is told: `dims(path, tensors)`, `table(dims)`, the sizes that a config states."""

    dims: Callable[[Path, Mapping[str, TensorInfo]], Any]
    table: Callable[[Any], dict[str, Spec]]
    ignorable: re.Pattern[str]
    configured: Callable[[Mapping[str, Any]], Any] | None = None
    released: Any = None


KINDS: dict[Kind, Names] = {
    "denoiser": Names(denoiser_dims, denoiser_table, denoiser_names.IGNORABLE),
    "text_encoder": Names(
        text_names.text_dims,
        text_names.text_table,
        text_names.IGNORABLE,
        text_names.configured_dims,
        text_names.RELEASED,
    ),
    "video_vae": Names(
        video_names.video_dims,
        video_names.video_table,
        video_names.IGNORABLE,
        video_names.configured_dims,
        video_names.RELEASED,
    ),
    "audio_vae": Names(
        audio_names.audio_dims,
        audio_names.audio_table,
        audio_names.IGNORABLE,
        audio_names.configured_dims,
        audio_names.RELEASED,
    ),
}


def open_part(file: TensorFile, kind: Kind) -> StateFile:
    """A file's model of this kind, checked. Raises CheckpointError where absent, faulty or unsupported."""
    parts = find_parts(file)
    if kind not in parts:
        held = " and ".join(NAMES[part] for part in parts) or looks_like(file.tensors)
        raise CheckpointError(f"{file.path} is not {NAMES[kind]}: {'it is ' if parts else ''}{held}")
    names, tensors, prefix = KINDS[kind], own_tensors(file, kind, parts), parts[kind]
    dims = names.dims(file.path, tensors)
    if kind == "denoiser":
        refuse_banks(file.path, tensors, dims)
    table = names.table(dims)
    linears, notes = check(file, prefix, tensors, table, names.ignorable)
    if "latents_std" in tensors:
        positive(file, f"{prefix}latents_std")
    return StateFile(file, prefix, kind, dims, table, tensors, linears, notes)


def open_denoiser(path: Pathlike, qkv_order: str = "bands") -> DenoiserFile:
    """Opens a denoiser, full or curve, and checks all but its values. Raises CheckpointError, ConfigError."""
    if qkv_order not in get_args(QkvOrder):
        hint = nearest(qkv_order, get_args(QkvOrder))
        raise ConfigError(f"model.qkv_order is {qkv_order!r}; it may be bands or interleaved{hint}")
    state = open_part(TensorFile.open(path), "denoiser")
    return DenoiserFile(**vars(state), qkv_order=qkv_order)


def open_text_encoder(path: Pathlike, config: Pathlike | None = None) -> StateFile:
    """Opens a text encoder; with `config`, a Hugging Face JSON file, its sizes must be those stated there."""
    return _sized(open_part(TensorFile.open(path), "text_encoder"), config)


def open_video_vae(path: Pathlike, config: Pathlike | None = None) -> StateFile:
    """Opens a video VAE; with `config`, a diffusers JSON file, its sizes must be those stated there."""
    return _sized(open_part(TensorFile.open(path), "video_vae"), config)


def open_audio_vae(path: Pathlike, config: Pathlike | None = None) -> StateFile:
    """Opens an audio VAE; with `config`, a diffusers JSON file, its sizes must be those stated there."""
    return _sized(open_part(TensorFile.open(path), "audio_vae"), config)


class ModelPaths(Protocol):
    """The part of the configuration that names the model files."""

    denoiser: str
    text_encoder: str
    video_vae: str
    audio_vae: str
    text_encoder_config: str | None
    video_vae_config: str | None
    audio_vae_config: str | None
    qkv_order: str


def open_slots(model: ModelPaths) -> Slots:
    """Opens the four files of a configuration. The two VAEs exactly swapped are put right, with a note.

    Without a config of its own a file must be of the released size. Raises CheckpointError for any other
    mistake.
    """
    text = open_text_encoder(model.text_encoder, model.text_encoder_config)
    video, audio, notes = open_vaes(model)
    slots = Slots(
        open_denoiser(model.denoiser, model.qkv_order),
        released(text, model.text_encoder_config),
        video,
        audio,
        notes,
    )
    return slots._replace(notes=notes + tuple(note for state in slots[:4] for note in state.notes))


def open_vaes(model: ModelPaths) -> tuple[StateFile, StateFile, tuple[str, ...]]:
    """The video VAE, the audio VAE, and a note where their paths were swapped. Raises CheckpointError."""
    video, audio, notes = model.video_vae, model.audio_vae, ()
    if _only(video) == "audio_vae" and _only(audio) == "video_vae":
        notes = (f"the two VAEs were swapped: {audio} is the video VAE, {video} the audio VAE",)
        video, audio = audio, video
    return (
        released(open_video_vae(video, model.video_vae_config), model.video_vae_config),
        released(open_audio_vae(audio, model.audio_vae_config), model.audio_vae_config),
        notes,
    )


def released(state: StateFile, config: Pathlike | None) -> StateFile:
    """The state itself. Raises CheckpointError where it has no config and is not of the released size."""
    if config is None:
        hint = f"for another size give model.{state.kind}_config"
        _same_dims(state, KINDS[state.kind].released, f"the released sizes ({hint})")
    return state


def _only(path: Pathlike) -> str:
    return identify(TensorFile.open(path))


def _json_object(path: Pathlike) -> dict[str, Any]:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object, {...}")
    return found


def _sized(state: StateFile, config: Pathlike | None) -> StateFile:
    configured = KINDS[state.kind].configured
    if config is not None and configured is not None:
        try:
            dims = configured(_json_object(config))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{config} cannot be used as a config of {NAMES[state.kind]}: {error!r}") from None
        _same_dims(state, dims, str(config))
    return state


def _same_dims(state: StateFile, due: Any, source: str) -> None:
    found, wanted = _flat(state.dims), _flat(due)
    faults = [f"{name} {found[name]}, not {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if faults:
        raise CheckpointError(f"{state.file.path} is not of the sizes in {source}: {', '.join(faults)}")


def _flat(dims: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in vars(dims).items():
        flat |= (
            {f"{name}.{key}": each for key, each in _flat(value).items()}
            if hasattr(value, "__dict__")
            else {name: value}
        )
    return flat
