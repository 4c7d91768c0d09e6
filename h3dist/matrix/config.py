"""What a matrix is made of: the keys of `conf/matrix.yaml`, and which overrides its runs take too."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from h3dist.config import Config, ExchangeConfig, RequestConfig, compose, config_keys, parse_override, to_config
from h3dist.errors import ConfigError, nearest
from h3dist.plan import MODES
from h3dist.plan.exchange import AUTO, open_exchanges

SIZES = ("released", "small")
PLAINLY = "heads"  # the word for the plain exchange
NAMED = tuple(mode for mode in MODES if mode != "auto")
BY_CELLS = {  # what the cells decide, and the key that says it for all of them
    "parallel": "layouts=[...] and worlds=[...]",
    "attention": "attentions=[...]",
    "exchange": "exchanges=[...]",
    "output": "results=FILE",
    "job": "results=FILE",
    "request.width": "shapes=[...]",
    "request.height": "shapes=[...]",
    "request.frames": "shapes=[...]",
    "request.duration": "shapes=[...]",
}
OF_BOTH = ("request.steps", "request.seed", "runtime.fused")
WAYS = (  # how a clip is computed
    "runtime.gemm",
    "runtime.fused",
    "runtime.graph",
    "runtime.offload",
    "encode.text",
    "encode.conditions",
    "decode.mode",
)
OF_CLIPS = ("model", "sampler", "encode", "decode", *WAYS, *(f"request.{name}" for name in config_keys(RequestConfig)))
OF_RANDOM_WEIGHTS = ("size", "text_rows", "together")


@dataclass
class MatrixConfig(Config):
    """The axes of a matrix, and how to go through its cells, beside everything that a run takes."""

    name: str = "scaling"
    layouts: list[str] = field(default_factory=list)  # single, ulysses, tensor, hybrid, or SPxTP such as 4x2
    worlds: list[int] = field(default_factory=list)  # numbers of ranks
    shapes: list[str] = field(default_factory=list)  # WIDTHxHEIGHTxFRAMES
    attentions: list[str] = field(default_factory=lambda: ["sdpa"])
    exchanges: list[str] = field(
        default_factory=lambda: ["heads"]
    )  # auto, or VARIANT/GROUPS/CODEC as far as it is said; +copy, +packed, +chunksN
    cells: list[str] = field(default_factory=list)  # "SHAPE[/STEPS] LAYOUT RANKS [EXCHANGE]", for these axes
    repeats: int = 1
    denoise_only: bool = True  # denoiser steps on random weights; false: whole clips from the checkpoints
    size: str = "released"  # of the random model
    text_rows: int = 400  # of the random prompt
    cell_seconds: float = 900  # a cell that takes longer is ended
    total_seconds: float | None = None  # none begins that would not end by then: the next matrix goes on with it
    together: bool = False  # cells of one layout on random weights in one start of its ranks
    save_latents: bool = True  # keep each cell's latents beside the JSON
    resume: bool = True  # keep the done cells of the JSON that is there; false: set it aside
    results: str = "h3dist-matrix-${name}.json"


@dataclass(frozen=True)
class Shape:
    """A canvas in pixels and a number of frames."""

    width: int
    height: int
    frames: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    @classmethod
    def of(cls, text: str) -> "Shape":
        """The shape written as 864x480x141. Raises `ConfigError`; sizes are judged with the request."""
        found = re.fullmatch(r"(\d{1,6})x(\d{1,6})x(\d{1,6})", text)
        if found is None:
            raise ConfigError(f"shapes: {text!r} is none; write WIDTHxHEIGHTxFRAMES, as in 864x480x141")
        return cls(*map(int, found.groups()))


@dataclass(frozen=True)
class Listed:
    """A cell named by itself; `steps` are its own evaluations, None as many as the others have."""

    shape: Shape
    steps: int | None
    asked: str
    ranks: int
    exchange: str

    @classmethod
    def of(cls, text: str) -> "Listed":
        """The cell written as "1344x768x124/4 ulysses 2 hidden/4+copy". Raises `ConfigError`."""
        found = re.fullmatch(r"([^/ ]+)(?:/([1-9]\d*))? (\S+) ([1-9]\d*)(?: (\S+))?", text)
        if found is None:
            example = "1344x768x124/4 ulysses 2 hidden/4+copy"
            raise ConfigError(f"cells: {text!r} is none; write SHAPE[/STEPS] LAYOUT RANKS [EXCHANGE], as in {example}")
        shape, steps, asked, ranks, exchange = found.groups()
        _check_layout(asked)
        exchange_of(exchange or PLAINLY)
        return cls(Shape.of(shape), int(steps) if steps else None, asked, int(ranks), exchange or PLAINLY)


def exchange_of(text: str) -> ExchangeConfig:
    """The exchange written as "auto", "hidden", "heads/7", "heads/4/int8", "heads/4+copy", "hidden/4+packed" or
    "heads+chunks4", with any of the words after a plus sign. Raises `ConfigError`.
    """
    said, *words = text.split("+")
    parts, more = said.split("/"), dict(map(_word, words))
    variant, groups, codec = (*parts, "", "")[:3]
    free = AUTO if variant == AUTO else "1"
    made = ExchangeConfig(variant, groups or free, codec or "none", **more)
    if len(parts) > 3 or not (made.groups == AUTO or made.groups.isdecimal()):
        raise ConfigError(f"exchanges: {text!r} is none; write auto, or VARIANT/GROUPS/CODEC as in hidden/4+copy")
    open_exchanges(**vars(made))
    return made


def _word(word: str) -> tuple[str, Any]:
    """What a word after a plus sign sets: a transport, packed rows, or runs of columns that are summed."""
    if word == "packed":
        return "rows", word
    chunks = re.fullmatch(r"chunks([1-9]\d*)", word)
    return ("chunks", int(chunks[1])) if chunks else ("transport", word)


def compose_matrix(overrides: Sequence[str]) -> tuple[MatrixConfig, list[str]]:
    """The matrix that `overrides` ask for, and those of them that each of its runs takes. Raises `ConfigError`."""
    config = compose(overrides, "matrix", MatrixConfig)
    assert isinstance(config, MatrixConfig)
    return _checked(config, overrides), run_words(overrides)


def matrix_of(composed: object, overrides: Sequence[str]) -> tuple[MatrixConfig, list[str]]:
    """The same from what a Hydra app composed."""
    config = to_config(composed, overrides)  # type: ignore[arg-type]
    assert isinstance(config, MatrixConfig)
    return _checked(config, overrides), run_words(overrides)


def run_words(overrides: Sequence[str]) -> list[str]:
    """The overrides that are not the matrix's own."""
    own = {"matrix"} | (config_keys(MatrixConfig).keys() - config_keys(Config).keys())
    return [word for word in overrides if parse_override(word).key_or_group not in own]


def _checked(config: MatrixConfig, overrides: Sequence[str]) -> MatrixConfig:
    for axis in ("layouts", "worlds", "shapes", "attentions", "exchanges"):
        if not getattr(config, axis):
            raise ConfigError(f"{axis}=[]: a matrix without {axis} has no cells")
    for name in ("worlds", "repeats", "text_rows", "cell_seconds", "total_seconds"):
        values = getattr(config, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value}: must be above 0")
    if config.size not in SIZES:
        raise ConfigError(f"size={config.size}: must be one of {', '.join(SIZES)}{nearest(config.size, SIZES)}")
    for layout in config.layouts:
        _check_layout(layout)
    for shape in config.shapes:
        Shape.of(shape)
    for exchange in config.exchanges:
        exchange_of(exchange)
    listed = [Listed.of(text) for text in config.cells]
    if any(each.steps for each in listed) and not config.denoise_only:
        raise ConfigError("cells: the evaluations of clips are request.steps=N, one number for all of them")
    _check_words(config, overrides)
    return config


def _check_layout(name: str) -> None:
    if name == "auto":
        raise ConfigError("layouts: auto is one of the others; a matrix runs them all")
    if name not in NAMED and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", name):
        raise ConfigError(f"layouts: {name!r} is none of {', '.join(NAMED)}, or SPxTP as in 4x2{nearest(name, NAMED)}")


def _check_words(config: MatrixConfig, overrides: Sequence[str]) -> None:
    """Refuse overrides that no cell would read."""
    unread = OF_CLIPS if config.denoise_only else OF_RANDOM_WEIGHTS
    for word in overrides:
        key = parse_override(word).key_or_group
        for name, instead in BY_CELLS.items():
            if key == name or key.startswith(name + "."):
                raise ConfigError(f"{word}: the cells of a matrix decide that; use {instead}")
        if key not in OF_BOTH and any(key == name or key.startswith(name + ".") for name in unread):
            other = str(not config.denoise_only).lower()
            raise ConfigError(
                f"{word}: not read with denoise_only={str(config.denoise_only).lower()}; denoise_only={other} does"
            )
