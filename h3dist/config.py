"""How and where to run: the structured configuration behind `conf/`, and how overrides become one.

Hydra composes; what it would answer at length, or not at all, is checked before it and answered once.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from h3dist.errors import ConfigError, RequestError, nearest
from h3dist.request import unknown_field


@dataclass
class ModelConfig:
    """The checkpoint files, and the JSON configs of those that are not of the released size."""

    denoiser: str = ""
    text_encoder: str = ""
    tokenizer: str = ""
    video_vae: str = ""
    audio_vae: str = ""
    text_encoder_config: str | None = None  # null: the released model's constants
    video_vae_config: str | None = None
    audio_vae_config: str | None = None
    qkv_order: str = "bands"  # interleaved: the official shards, head by head
    partition: str = "auto"  # the tasks that the denoiser was trained for, by its file's name: fl2va or ref2va


@dataclass
class RuntimeConfig:
    """Devices, number format and patience."""

    device: str = "auto"
    dtype: str = "auto"  # bfloat16 on cuda, float32 on cpu
    backend: str = "auto"  # nccl on cuda, gloo on cpu
    threads: str = "auto"  # cores / ranks; all of them while one rank works alone
    timeout: float = 300  # seconds a tensor exchange may take
    stage_timeout: float = 1800  # seconds the others wait while one rank works alone
    allow_untrained: bool = False  # clips over 362 frames, prompts over 7000 characters
    gemm: str = "auto"  # dense, nvfp4, fp8 or int8 products; auto: nvfp4 on GPUs that have it, else dense
    offload: str = "none"  # blocks: they wait in the host's memory, two at a time on the device; CUDA only
    fused: str = "auto"  # fewer passes over memory between products, weights made dense ahead: on CUDA with triton
    graph: str = "off"  # on: steps after the first replayed as a CUDA graph, on one rank, for a slow host


@dataclass
class ParallelConfig:
    """The layout; what is null follows from the mode and the number of ranks."""

    mode: str = "auto"
    dp: int = 1
    sp: int | None = None
    tp: int | None = None


@dataclass
class AttentionConfig:
    """The attention backend, by its name in `h3dist attention`."""

    name: str = "sdpa"
    fallback: bool = False  # true: where its first call is past its bound, go on with exact attention
    capture: str | None = None  # a folder: rank 0 saves q, k and v there, for `h3dist bench --capture`


@dataclass
class ExchangeConfig:
    """How heads move between the ranks of a sequence group. auto: what is predicted to be fastest on this machine."""

    variant: str = "heads"  # heads: q, k and v move; hidden: all rows do, before the projection
    groups: str = "1"  # groups of heads, one of which moves while another is attended to
    codec: str = "none"  # int8: codes and a scale a block, which is approximate
    chunks: int = 1  # of the columns that a tp group sums, one of which moves while the next is multiplied
    rows: str = "plain"  # packed: gathered rows go as the codes that NVFP4 products take, with the same result
    transport: str = "collective"  # copy: GPUs copy heads to each other; auto: that where every rank can


@dataclass
class SamplerConfig:
    """The noise schedule, the steps along it, and the order in which noise is drawn."""

    name: str = "beta_res"
    schedule: str = "beta"
    sampler: str = "res_multistep"
    noise: str = "comfy"
    video_shift: float = 12.0
    audio_shift: float = 3.0
    beta_a: float = 0.6
    beta_b: float = 0.6


@dataclass
class EncodeConfig:
    """Where the request's text, keyframes and references become rows."""

    text: str = "rank0"  # rank0: rank 0 alone; tp: spread over all ranks; auto: spread where rank 0 does not hold it
    conditions: str = "rank0"  # keyframes and references. parallel: tile by tile, and sound by sound, on all ranks


@dataclass
class DecodeConfig:
    """Where latents become frames and sound."""

    mode: str = "auto"  # rank0: rank 0 alone; parallel: tile by tile on all ranks; auto: as the plan finds
    fast: str = "auto"  # the video VAE's decoder in fewer, larger steps: on CUDA with triton; near as float16 allows
    gemm: str = "auto"  # how the fast decoder multiplies; auto: exactly; fp8: E4M3, an approximation
    batch: int | None = None  # tiles of a call at most; null: 4 by the fast decoder on CUDA, else one


@dataclass
class OutputConfig:
    """Files to write. Null: not written."""

    path: str = "h3dist.mp4"
    latents: str | None = None
    intermediates: str | None = None
    trace: str | None = None
    clobber: bool = True  # false: an existing file is an error


@dataclass
class RequestConfig:
    """The request's fields, null where unsaid, and the files that say them. Types are not judged here."""

    task: Any = None
    prompt: Any = None
    width: Any = None
    height: Any = None
    frames: Any = None
    duration: Any = None
    seed: Any = None
    steps: Any = None
    mux_audio: Any = None
    first_frame: Any = None
    last_frame: Any = None
    keyframes: Any = None
    references: Any = None
    file: str | None = None
    prompt_file: str | None = None


@dataclass
class Config:
    """Everything that is not the request itself; `job` is the launcher's file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    job: str | None = None


CHOICES: Mapping[str, tuple[str, ...]] = {
    "model.qkv_order": ("bands", "interleaved"),
    "model.partition": ("auto", "fl2va", "ref2va"),
    "runtime.device": ("auto", "cpu", "cuda"),
    "runtime.dtype": ("auto", "float32", "bfloat16"),
    "runtime.backend": ("auto", "nccl", "gloo"),
    "runtime.gemm": ("auto", "dense", "nvfp4", "fp8", "int8"),
    "runtime.fused": ("auto", "off", "on"),
    "runtime.graph": ("off", "on"),
    "runtime.offload": ("none", "blocks"),
    "parallel.mode": ("auto", "single", "ulysses", "tensor", "hybrid"),
    "exchange.variant": ("auto", "heads", "hidden"),
    "exchange.codec": ("none", "int8"),
    "exchange.rows": ("plain", "packed"),
    "exchange.transport": ("collective", "copy", "auto"),
    "sampler.schedule": ("simple", "beta", "official"),
    "sampler.sampler": ("euler", "res_multistep"),
    "sampler.noise": ("comfy", "official"),
    "encode.text": ("auto", "rank0", "tp"),
    "encode.conditions": ("rank0", "parallel"),
    "decode.mode": ("auto", "rank0", "parallel"),
    "decode.fast": ("auto", "off", "on"),
    "decode.gemm": ("auto", "fp8"),
}
POSITIVE = (
    "runtime.timeout",
    "runtime.stage_timeout",
    "exchange.chunks",
    "decode.batch",
    "parallel.dp",
    "parallel.sp",
    "parallel.tp",
    "sampler.beta_a",
    "sampler.beta_b",
)
FOLDERS = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.chdir")  # keys without effect
NOT_FROM_TEXT = "name a file with --prompt-file or request.prompt_file=, or quote it: request.prompt='...'"


def conf_dir() -> Path:
    """The absolute folder of the Hydra groups: `conf/` in a checkout, `h3dist/conf/` from a wheel."""
    package = Path(__file__).resolve().parent
    places = (package / "conf", package.parent / "conf")
    return next(path for path in places if (path / "config.yaml").is_file())


def register_schema(schema: type[Config] = Config) -> None:
    """Let Hydra find the types of `conf/config.yaml`; an entrypoint calls it before Hydra reads the files.

    An entrypoint with more keys has a `schema` that adds them to `Config`.
    """
    ConfigStore.instance().store("schema", node=schema)


def group_choices(group: str) -> tuple[str, ...]:
    """The names that `group=NAME` takes, from the files in `conf/`."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def compose(overrides: Sequence[str], name: str = "config", schema: type[Config] = Config) -> Config:
    """The configuration that the file `name`, the environment and `overrides` give, as a `schema`.

    Raises ConfigError, or RequestError for a request field, with the nearest name; at most one error is told.
    """
    check_overrides(overrides, schema)
    register_schema(schema)
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = hydra_compose(name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_in_words(error)) from error
    return to_config(composed, overrides)


def to_config(composed: DictConfig, overrides: Sequence[str]) -> Config:
    """What Hydra composed from `overrides`, as dataclasses with their values checked. Raises ConfigError.

    The prompt is taken from the override as it stands: OmegaConf would read `${...}` and `???` inside it.
    """
    composed = deepcopy(composed)
    composed.request.prompt = None
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_in_words(error)) from error
    assert isinstance(config, Config)
    config.request.prompt = _quoted_prompt(overrides)
    _check_values(config)
    return config


def check_overrides(overrides: Sequence[str], schema: type[Config] = Config) -> None:
    """Raise for the first override that is malformed, names no key or group, or leaves a prompt unquoted."""
    keys = config_keys(schema)
    groups = [path.name for path in conf_dir().iterdir() if path.is_dir()]
    seen: set[str] = set()
    for override in map(parse_override, overrides):
        name = override.key_or_group
        if name.startswith(FOLDERS):
            raise ConfigError(
                f"{override.input_line}: runs have no folder of Hydra's; output.path= says where to write"
            )
        if name in groups:
            _check_group(override, seen)
        elif name.split(".")[0].split("/")[0] != "hydra":
            _check_key(override, keys, groups)


def parse_override(text: str) -> Override:
    """One override as Hydra's grammar reads it. Raises ConfigError where it does not, or where it is a sweep."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"{text!r} is no override: {str(error).splitlines()[0]}; overrides are key=value, "
            "and a prompt is one quoted argument"
        ) from None
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: values are not swept; a list stands in [brackets], a value that holds commas in quotes"
        )
    return override


def as_override(key: str, value: str) -> str:
    """The override that gives `key` this text, whatever it holds; quoted where Hydra's grammar needs it."""
    if re.fullmatch(r"[\w./~-]*[a-zA-Z/][\w./~-]*", value, re.ASCII) and value.lower() not in ("null", "true", "false"):
        return f"{key}={value}"
    escaped = re.sub(r"\\+(?=')|\\+$", lambda found: 2 * found[0], value).replace("'", "\\'")
    escaped = escaped.replace("${", r"\${")  # OmegaConf would look a key up
    return f"{key}='{escaped}'"


def _check_group(override: Override, seen: set[str]) -> None:
    name, value = override.key_or_group, override.value()
    choices = group_choices(name)
    if name in seen:
        raise ConfigError(f"{name}= is given twice")
    if value not in choices:
        hint = nearest(str(value), choices)
        raise ConfigError(f"{override.input_line}: {name} is one of {', '.join(choices)}{hint}")
    seen.add(name)


def _check_key(override: Override, keys: Mapping[str, bool], groups: Sequence[str]) -> None:
    name = override.key_or_group
    if name not in keys and name.startswith("request."):
        raise RequestError(unknown_field(name.removeprefix("request.")))
    if name not in keys:
        raise ConfigError(f"no configuration key {name!r}{nearest(name, [*keys, *groups])}")
    if not keys[name]:
        inside = ", ".join(key for key in keys if key.startswith(name + "."))
        raise ConfigError(f"{override.input_line}: {name} is a section; its keys are {inside}")
    if name == "request.prompt" and not isinstance(override._value, QuotedString):
        raise ConfigError(f"{override.input_line}: a prompt here must be a quoted string; {NOT_FROM_TEXT}")


def config_keys(section: type, prefix: str = "") -> dict[str, bool]:
    """Every dotted key below a dataclass; True for a value, False for a section."""
    keys: dict[str, bool] = {}
    for item in fields(section):
        keys[prefix + item.name] = not is_dataclass(item.type)
        if is_dataclass(item.type):
            keys |= config_keys(item.type, f"{prefix}{item.name}.")
    return keys


def _quoted_prompt(overrides: Sequence[str]) -> str | None:
    """The text of the last `request.prompt='...'`, untouched by OmegaConf."""
    parsed = [item for item in map(parse_override, overrides) if item.key_or_group == "request.prompt"]
    return parsed[-1]._value.text if parsed else None


def _check_values(config: Config) -> None:
    for key, choices in CHOICES.items():
        value = _value(config, key)
        if value not in choices:
            raise ConfigError(f"{key}={value}: must be one of {', '.join(choices)}{nearest(value, choices)}")
    for key in POSITIVE:
        value = _value(config, key)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{key}={value}: must be a finite number above 0")
    for key in ("sampler.video_shift", "sampler.audio_shift"):
        if not 0.001 <= _value(config, key) <= 1000:  # beyond, float32 sigmas run together or divide by zero
            raise ConfigError(f"{key}={_value(config, key)}: must be from 0.001 to 1000")
    for key in ("runtime.threads", "exchange.groups"):
        count = _value(config, key)
        if count != "auto" and not (count.isdecimal() and int(count) > 0):
            raise ConfigError(f"{key}={count}: must be auto or a whole number above 0")


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _in_words(error: Exception) -> str:
    """What Hydra or OmegaConf found, on one line: the override, then the reason beneath it."""
    causes = [error] if error.__cause__ is None else [error, error.__cause__]
    return ": ".join(str(cause).strip().splitlines()[0].rstrip(".") for cause in causes)
