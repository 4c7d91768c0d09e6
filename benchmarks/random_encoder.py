"""A text encoder of random weights in the form in which the released file holds them, made on a device: its values mean
nothing, its work does.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from h3dist.checkpoint.formats import Int8Weight, PlainWeight, Weight
from h3dist.checkpoint.slices import Slice
from h3dist.model.random_weights import RandomSource
from h3dist.text.encoder import TextEncoder, skeleton
from h3dist.text.layers import StoredEmbedding, StoredLinear
from h3dist.text.released import RELEASED_CONFIG

PRESCALED = ("o_proj", "down_proj")  # linears with an AWQ scale
NORMAL = 0.02  # deviation of what is neither a norm nor quantised
TINY = {
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1, 2, 3],
    },
}
TINY_ROPE = [6, 5, 5]


def settings(*, tiny: bool) -> dict[str, Any]:
    """The released configuration, or a small one of the same form and vocabulary."""
    config = deepcopy(RELEASED_CONFIG)
    if tiny:
        for part, sizes in TINY.items():
            config[part] |= sizes
        config["text_config"]["rope_parameters"]["mrope_section"] = TINY_ROPE
    return config


def random_encoder(config: dict[str, Any], layers: int, device: torch.device, seed: int = 0) -> TextEncoder:
    """An encoder with the first `layers` of its decoder layers, at least as many as the vision tower gives features."""
    source, model = RandomSource(seed, device, torch.float32), skeleton(config)
    model.language_model.layers = model.language_model.layers[:layers]
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            bias = None if module.bias is None else torch.zeros(module.out_features, device=device)
            model.set_submodule(name, StoredLinear(_weight(source, name, module), bias))
    table = model.language_model.embed_tokens
    model.set_submodule("language_model.embed_tokens", StoredEmbedding(_table(source, table.weight.shape)))
    plain = {name: _plain(source, name, value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(plain, assign=True)
    return TextEncoder(model.to(device).requires_grad_(False).eval(), device)


def _weight(source: RandomSource, name: str, linear: nn.Linear) -> Weight:
    """NVFP4 in the decoder layers, with AWQ scales where the file has them; bfloat16 in the vision tower."""
    shape = linear.out_features, linear.in_features
    if not name.startswith("language_model."):
        return PlainWeight(NORMAL * source.normal(name, *shape, dtype=torch.bfloat16))
    weight = replace(source.nvfp4(name, shape, Slice()), full_precision=True)
    if not name.endswith(PRESCALED):
        return weight
    scale = (0.1 * source.normal(f"{name}.awq", shape[1])).exp().bfloat16()
    return replace(weight, pre_quant_scale=scale)


def _table(source: RandomSource, shape: torch.Size) -> Int8Weight:
    drawn = torch.randint(-127, 128, shape, generator=source.generator("table"), device=source.device, dtype=torch.int8)
    return Int8Weight(
        drawn, torch.full((shape[0], 1), NORMAL / 73, device=source.device)
    )  # 73: theirs, root mean square


def _plain(source: RandomSource, name: str, shape: torch.Size) -> Tensor:
    if "norm" in name:
        return (torch.zeros if name.endswith("bias") else torch.ones)(shape, device=source.device)
    return NORMAL * source.normal(name, *shape)
