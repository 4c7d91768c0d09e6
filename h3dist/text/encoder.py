"""Qwen3-VL as MiniMax H3 reads it: the residual stream after decoder layer 50, before any norm, in float32.

The modules are transformers' own, built without storage and without the layers, final norm and head that the
file lacks; every linear and the token embedding are then exchanged for ones over the stored weights.
Shapes: L rows of text, C hidden.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from h3dist.checkpoint.comfy import StateFile
from h3dist.checkpoint.readers import ahead
from h3dist.checkpoint.slices import Slice
from h3dist.checkpoint.storage import ALL
from h3dist.checkpoint.text_names import LAYERS
from h3dist.errors import CheckpointError, ConfigError, NumericsError
from h3dist.text.layers import StoredEmbedding, StoredLinear
from h3dist.text.presentation import Presentation
from h3dist.text.released import RELEASED_CONFIG
from h3dist.text.vision import MERGE, Vision
from h3dist.vae.exact import exact_convolutions

if TYPE_CHECKING:
    from transformers import Qwen3VLModel

M = TypeVar("M", bound=nn.Module)
EMBEDDING = "model.embed_tokens"
VISION_INPUTS = {  # pad -> token type, and transformers' names of patches and grids
    "image": (1, "pixel_values", "image_grid_thw"),
    "video": (2, "pixel_values_videos", "video_grid_thw"),
}


class TextEncoder:
    """The conditioner on one device. `load` reads it, `encode` runs it, `release` gives its memory back."""

    def __init__(self, model: "Qwen3VLModel", device: torch.device) -> None:
        self.model: Qwen3VLModel | None = model
        self._device = device

    @classmethod
    def load(
        cls, state: StateFile, config: str | None, device: torch.device | str, decoder: nn.Module | None = None
    ) -> "TextEncoder":
        """Reads every tensor of the file onto `device`: matrices as they are stored, the rest as float32.

        `config` is the path of the Hugging Face config.json that the file was opened with, None for the
        released model. With `decoder` in the place of the decoder layers, these are not read. Raises ConfigError for
        one that is no Qwen3-VL's, CheckpointError for damaged scales.
        """
        model = skeleton(read_config(config))
        if decoder is not None:
            decoder.embed_tokens = model.language_model.embed_tokens
            model.set_submodule("language_model", decoder)
        table = StoredEmbedding(state.linear(EMBEDDING).to(device))
        model.set_submodule("language_model.embed_tokens", table)
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        layers = stored_linears(state, [(file_name(name), ALL) for name in names], device)
        for name, layer in zip(names, layers, strict=True):
            model.set_submodule(name, layer)
        return cls(with_plain(model, state, file_name, device), torch.device(device))

    @torch.no_grad()
    def encode(self, presentation: Presentation, vision: Mapping[str, Vision] | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states float32 [L, C] on the encoder's device and modality tags int64 [L] on the CPU.

        `vision` is what the presentation's blocks show, by pad. Raises CheckpointError for a token id that the
        embedding lacks or for vision tokens that are not the configuration's, NumericsError for NaN or infinity.
        """
        assert self.model is not None, "the encoder was released"
        rows = self.model.get_input_embeddings().stored.shape[0]
        if max(presentation.ids) >= rows:
            raise CheckpointError(
                f"the tokenizer gives token id {max(presentation.ids)}, but the text encoder's embedding has "
                f"{rows} rows: they do not belong together"
            )
        ids_1L = torch.tensor([presentation.ids], device=self._device)
        shown = self._vision_inputs(ids_1L, vision) if vision else {}
        with exact_convolutions():  # the vision tower's patches
            states_LC = self.model(input_ids=ids_1L, use_cache=False, **shown).last_hidden_state[0]
        return finite(states_LC), torch.tensor(presentation.tags, dtype=torch.int64)

    def _vision_inputs(self, ids_1L: Tensor, vision: Mapping[str, Vision]) -> dict[str, Tensor]:
        """transformers' own names: patches and grids, and the type of each token (1 image, 2 video) for mRoPE."""
        assert self.model is not None
        inputs = {"mm_token_type_ids": torch.zeros_like(ids_1L)}
        for pad, (token_type, patches, grids) in VISION_INPUTS.items():
            token = getattr(self.model.config, f"{pad}_token_id")
            seen = vision.get(pad)
            wanted = sum(t * h * w for t, h, w in seen.grids) // MERGE**2 if seen else 0
            mine = ids_1L == token
            if int(mine.sum()) != wanted:
                raise CheckpointError(
                    f"{wanted} tokens show a {pad}, and {int(mine.sum())} of the presentation's have the text "
                    f"encoder's id for them, {token}: tokenizer and text encoder do not belong together"
                )
            if seen:
                inputs["mm_token_type_ids"][mine] = token_type
                inputs[patches] = seen.patches.to(self._device)
                inputs[grids] = torch.tensor(seen.grids, device=self._device)
        return inputs

    def release(self) -> None:
        """Drops the weights; on CUDA their memory goes back to the device."""
        self.model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def finite(states_LC: Tensor) -> Tensor:
    """The states themselves. Raises NumericsError for NaN or infinity."""
    if not bool(torch.isfinite(states_LC).all()):
        raise NumericsError("the text encoder's hidden states are NaN or infinite")
    return states_LC


def read_config(path: str | None) -> dict[str, Any]:
    """The Hugging Face config of the file at `path`, the released one for None. Raises ConfigError."""
    if path is None:
        return RELEASED_CONFIG
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.text_encoder_config {path} is no readable JSON file: {error}") from error
    if not isinstance(config, dict) or config.get("model_type") != "qwen3_vl":
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise ConfigError(f"model.text_encoder_config {path} must be of model_type 'qwen3_vl', found {found!r}")
    return config


def skeleton(config: dict[str, Any]) -> "Qwen3VLModel":
    """transformers' model with `LAYERS` decoder layers and no final norm; parameters on the meta device."""
    from transformers import Qwen3VLConfig, Qwen3VLModel

    settings = Qwen3VLConfig(**config)
    settings.text_config.num_hidden_layers = LAYERS
    with torch.device("meta"):
        model = Qwen3VLModel(settings)
    model.language_model.norm = nn.Identity()
    # Rotary frequencies are in no file: built again where arithmetic is real.
    model.language_model.rotary_emb = type(model.language_model.rotary_emb)(settings.text_config)
    model.visual.rotary_pos_emb = type(model.visual.rotary_pos_emb)(settings.vision_config)
    return model


def stored_linears(
    state: StateFile, layers: Iterable[tuple[str, Slice]], device: torch.device | str
) -> Iterator[StoredLinear]:
    """Linears over the stored weights of layers, or over cuts of them, in order; read by threads, as they are taken.

    From then on what the file gives for a GPU is in pinned memory. Raises CheckpointError.
    """
    device = torch.empty(0, device=device).device  # with its index: a thread has a current device of its own
    state.file.pinned = device.type == "cuda"
    return ahead(partial(stored_linear, state, layer, device, cut) for layer, cut in layers)


def stored_linear(state: StateFile, layer: str, device: torch.device | str, cut: Slice = ALL) -> StoredLinear:
    """A linear over the stored weight of `layer`, or over a cut of its rows. Raises CheckpointError."""
    bias = None
    if f"{layer}.bias" in state.table:
        assert cut is ALL, layer
        bias = state.tensor(f"{layer}.bias").to(device, torch.float32)
    return StoredLinear(state.linear(layer, cut).to(device), bias)


def with_plain(model: M, state: StateFile, named: Callable[[str], str], device: torch.device | str) -> M:
    """The model with what is no matrix read as float32, ready to run; `named` gives the file's name of a tensor."""
    plain = {name: state.tensor(named(name)).to(device, torch.float32) for name in model.state_dict()}
    model.load_state_dict(plain, assign=True)
    return model.to(device).requires_grad_(False).eval()


def file_name(name: str) -> str:
    """The file's name of a tensor: Comfy says `model.` where transformers says `language_model.`."""
    part, _, rest = name.partition(".")
    return f"model.{rest}" if part == "language_model" else name
