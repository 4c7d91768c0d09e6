"""Random weights for tiny checkpoints: activations stay near 1, and every block can be seen in the output.

Every rule is by the tensor's name, in the order in which RULES lists them; the first that matches makes the
values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Generator, Tensor

from h3dist.checkpoint.storage import Spec

Rule = Callable[[tuple[int, ...], Generator], Tensor]


def around(mean: float, spread: float) -> Rule:
    """Normal values around a mean."""
    return lambda shape, source: mean + spread * torch.randn(shape, generator=source)


def fan_in(gain: float) -> Rule:
    """Normal values that keep the size of the input, times `gain`: a row has prod(shape[1:]) inputs."""
    return lambda shape, source: gain / math.sqrt(prod(shape[1:])) * torch.randn(shape, generator=source)


def rope_frequencies(shape: tuple[int, ...], _: Generator) -> Tensor:
    """10000 ** (-i / n), in float32."""
    count = shape[0]
    return 1.0 / 10000.0 ** (torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count))


def curve(shape: tuple[int, ...], source: Generator) -> Tensor:
    """A smooth table [G, k] over [0, 1]: each column a sine of its own pace and phase, without its mean."""
    time = torch.linspace(0, 1, shape[0])[:, None]
    pace, phase = (torch.rand(shape[1], generator=source) for _ in range(2))
    table = torch.sin(2 * math.pi * (pace * time + phase))
    return table - table.mean(dim=0)


def low_pass(shape: tuple[int, ...], _: Generator) -> Tensor:
    """The filter [1, 1, 12] around the audio decoder's activations: a sinc of cutoff 1/4, Kaiser's window.

    The window's beta is Kaiser's, for the attenuation that 5 half-taps give over a transition of 1.2.
    """
    taps = shape[-1]
    attenuation = 2.285 * (taps // 2 - 1) * math.pi * 1.2 + 7.95
    window = torch.kaiser_window(taps, periodic=False, beta=0.1102 * (attenuation - 8.7))
    time = torch.arange(taps) - (taps - 1) / 2
    response = window * torch.sinc(time / 2)
    return (response / response.sum()).view(shape)


def transposed(gain: float) -> Rule:
    """As `fan_in` for an upsampling convolution [in, out, kernel]: an output sees about half of its taps."""
    return lambda shape, source: gain * math.sqrt(2 / (shape[0] * shape[2])) * torch.randn(shape, generator=source)


DENOISER: dict[str, Rule] = {
    r"rope\.inv_freq": rope_frequencies,
    r"adaln_t_table": curve,
    r".*\.(q|k)_norm\.weight": around(1.5, 0.1),  # attention sharp enough to be seen
    r".*norm\d?\.weight": around(1.0, 0.1),
    r".*adaln_proj\.linear\.weight": fan_in(0.5),
    r".*adaln_proj\.linear\.bias": around(0.1, 0.4),  # gates far from zero
    r".*(out_proj|fc2)\.weight": fan_in(2.0),
    r"time_embedder\..*\.weight": fan_in(2.0),
    r".*\.weight": fan_in(1.0),
    r".*\.bias": around(0.0, 0.1),
}
TEXT: dict[str, Rule] = {
    r"model\.embed_tokens\.weight": around(0.0, 1.0),
    r".*norm\d?\.weight": around(1.0, 0.1),
    r".*(o_proj|down_proj)\.weight": fan_in(0.7),
    r"visual\.pos_embed\.weight": around(0.0, 0.5),
    r".*\.weight": fan_in(1.0),
    r".*\.bias": around(0.0, 0.1),
}
VIDEO: dict[str, Rule] = {
    r"latents_mean": around(0.0, 0.5),
    r"latents_std": lambda shape, source: 1 + 2 * torch.rand(shape, generator=source),
    r".*\.scale\d": around(0.5, 0.1),
    r".*norm(\d|_out)?\.weight": around(1.0, 0.1),
    r"decoder\.register_tokens": around(0.0, 1.0),
    r".*\.weight": fan_in(1.0),
    r".*\.bias": around(0.0, 0.1),
}
AUDIO: dict[str, Rule] = {
    r"latents_mean": around(0.0, 0.5),
    r"latents_std": lambda shape, source: 1 + 2 * torch.rand(shape, generator=source),
    r".*\.filter": low_pass,
    r".*zero_k_bias": around(0.0, 0.0),
    r"decoder.*\.act\.(alpha|beta)": around(0.0, 0.1),  # logarithms
    r"encoder.*\.alpha": around(1.0, 0.1),
    r".*norm\d?\.weight": around(1.0, 0.1),
    r"decoder\.ups\..*\.weight": transposed(1.0),
    r"decoder\.conv_post\.weight": fan_in(0.5),
    r"decoder\.resblocks\..*\.weight": fan_in(0.5),
    r".*\.weight": fan_in(1.0),
    r".*bias": around(0.0, 0.1),
}


def values(table: Mapping[str, Spec], rules: Mapping[str, Rule], source: Generator) -> dict[str, Tensor]:
    """Every tensor of a table in float32, made by the first rule that matches its whole name."""
    found = {}
    for name, spec in table.items():
        rule = next(rule for pattern, rule in rules.items() if re.fullmatch(pattern, name))
        found[name] = rule(spec.shape, source)
    return found
