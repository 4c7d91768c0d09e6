"""From a configuration and a request to a plan, before any weight is read: the same on the launcher and on ranks.

Opens the checkpoints' headers, counts the prompt's tokens, looks at the memory that is free. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from h3dist.config import Config
from h3dist.errors import ConfigError
from h3dist.material import conditions_of
from h3dist.plan import (
    ExchangePlan,
    Layout,
    Plan,
    choose_exchange,
    choose_products,
    fp4_linears,
    make_plan,
    released_dims,
)
from h3dist.plan.gemm import choose_gemm
from h3dist.request import Resolved
from h3dist.sampling.schedules import evaluations
from h3dist.text.presentation import Piece, pieces, shown_rows
from h3dist.text.tokenizer import count_tokens

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import DenoiserDims, DenoiserFile, Slots
    from h3dist.checkpoint.text_shard import TextStored

OFFLOADED = 2  # blocks on the device at a time: the one that computes, and the one that arrives
HOST_RESERVE = 1 << 28  # a rank's Python and torch on a CPU
CHARACTERS_PER_TOKEN = 4  # of English; without a tokenizer the plan estimates


@dataclass(frozen=True)
class Facts:
    """What a plan is made from beside the request: the files, and the number of text rows."""

    dims: "DenoiserDims"
    dfile: "DenoiserFile | None"
    sizes: Mapping[str, int]  # bytes of "text_encoder", "video_vae", "audio_vae" where they are there
    text_rows: int
    notes: tuple[str, ...]
    text: "TextStored | None" = None  # the text encoder's file by its parts, where it is there


def worth_telling(slots: "Slots") -> tuple[str, ...]:
    """Notes on the files, but for the video VAE's unused mask token, which every such file has."""
    return tuple(note for note in slots.notes if note not in slots.video_vae.notes)


def facts_of(slots: "Slots", text_rows: int) -> Facts:
    """What the opened files say."""
    from h3dist.checkpoint.text_shard import TextStored

    files = {"text_encoder": slots.text_encoder, "video_vae": slots.video_vae, "audio_vae": slots.audio_vae}
    sizes = {name: sum(info.nbytes for info in state.tensors.values()) for name, state in files.items()}
    return Facts(slots.denoiser.dims, slots.denoiser, sizes, text_rows, (), TextStored.of(slots.text_encoder))


def read_aloud(config: Config, resolved: Resolved) -> list[Piece]:
    """What the text encoder reads of a request: labels, vision blocks, the prompt."""
    contract = config.sampler.noise
    return pieces(resolved.prompt, conditions_of(resolved, contract), contract)


def facts_ahead(config: Config, found: Sequence[Piece]) -> Facts:
    """As `facts_of`, from whatever is there; `found` is what the text encoder reads."""
    from h3dist.checkpoint.comfy import open_denoiser

    model, notes = config.model, []
    dfile = open_denoiser(model.denoiser, qkv_order=model.qkv_order) if Path(model.denoiser).is_file() else None
    paths = {name: Path(getattr(model, name)) for name in ("text_encoder", "video_vae", "audio_vae")}
    sizes = {name: path.stat().st_size for name, path in paths.items() if path.is_file()}
    absent = {name: path for name, path in ({"denoiser": Path(model.denoiser)} | paths).items() if not path.is_file()}
    if absent:
        told = ", ".join(f"model.{name}={path}" for name, path in absent.items())
        notes.append(f"planned without what is not there: {told}")
    if Path(model.tokenizer).is_dir():
        text_rows = count_tokens(model.tokenizer, *found)
    else:
        text_rows = sum(_about(piece) for piece in found)
        notes.append(f"no tokenizer at {model.tokenizer}: {text_rows} text rows are an estimate")
    return Facts(dfile.dims if dfile else released_dims(), dfile, sizes, text_rows, tuple(notes), _text(config))


def _text(config: Config) -> "TextStored | None":
    """The text encoder's file by its parts, if it is there."""
    from h3dist.checkpoint.comfy import open_text_encoder
    from h3dist.checkpoint.text_shard import TextStored

    model = config.model
    there = Path(model.text_encoder).is_file()
    return TextStored.of(open_text_encoder(model.text_encoder, model.text_encoder_config)) if there else None


def _about(piece: Piece) -> int:
    """Tokens of a piece, without a tokenizer."""
    return max(1, len(piece) // CHARACTERS_PER_TOKEN) if isinstance(piece, str) else piece.tokens + 2


def plan_on(
    config: Config,
    resolved: Resolved,
    facts: Facts,
    layout: Layout,
    *,
    device: str,
    capability: tuple[int, int] | None,
    exchange: ExchangePlan | None = None,
    encode: str | None = None,
) -> Plan:
    """The plan on a layout that is already chosen: what every rank computes for itself and must agree on.

    `exchange` and `encode` are likewise what was chosen where the configuration says "auto"; without them the plainest.
    """
    sampler = config.sampler
    steps = evaluations(
        sampler.schedule,
        resolved.steps,
        video_shift=sampler.video_shift,
        beta_a=sampler.beta_a,
        beta_b=sampler.beta_b,
    )
    options = {} if device == "cuda" else {"reserve": HOST_RESERVE}
    conditions = conditions_of(resolved, sampler.noise)
    dtype = compute_dtype(config, device)
    gemm = choose_gemm(config.runtime.gemm, capability, dtype)
    check_cuda(config, device)
    check_graph(config, layout)
    check_transport(config, device)
    check_capture(config.attention.capture)
    fast = fast_decoder(config, device)
    fp4, amax = fp4_linears(facts.dims, facts.dfile, capability, dtype) if gemm == "nvfp4" else (0, 0)
    return make_plan(
        resolved,
        facts.dims,
        facts.text_rows,
        layout,
        dtype=dtype,
        attention=config.attention.name,
        steps=steps,
        dfile=facts.dfile,
        mode=config.parallel.mode,
        fp4=fp4,
        amax=amax,
        files=dict(facts.sizes),
        conditions=conditions,
        text=facts.text,
        shown_rows=shown_rows(conditions, sampler.noise),
        encode=encode or encoders(config)[0],
        encode_conditions=config.encode.conditions,
        exchange=exchange or choose_exchange(**vars(config.exchange)),
        gemm=gemm,
        resident_blocks=OFFLOADED if config.runtime.offload == "blocks" else None,
        decode=config.decode.mode,
        fast_decode=fast,
        decode_gemm=choose_products(config.decode.gemm, fast, capability),
        decode_batch=config.decode.batch,
        device=device,
        **options,
    )


def encoders(config: Config) -> tuple[str, ...]:
    """Where the text may be encoded, what is to be preferred first."""
    return ("rank0", "tp") if config.encode.text == "auto" else (config.encode.text,)


def compute_dtype(config: Config, device: str) -> str:
    """The denoiser's number format: as configured, else bfloat16 on CUDA and float32 on a CPU."""
    if config.runtime.dtype != "auto":
        return config.runtime.dtype
    return "bfloat16" if device == "cuda" else "float32"


def fast_decoder(config: Config, device: str) -> bool:
    """Whether the video VAE decodes in fewer steps: as asked, or by itself on CUDA where triton is installed."""
    there = device == "cuda" and find_spec("triton") is not None
    return there if config.decode.fast == "auto" else config.decode.fast == "on"


def check_cuda(config: Config, device: str) -> None:
    """Raises `ConfigError` for what is made for CUDA alone: the fused path, graphs, blocks in the host's memory."""
    for key, asked, off in (
        ("fused", config.runtime.fused == "on", "auto"),
        ("graph", config.runtime.graph == "on", "off"),
        ("offload", config.runtime.offload == "blocks", "none"),
    ):
        if asked and device != "cuda":
            value = getattr(config.runtime, key)
            raise ConfigError(
                f"runtime.{key}={value} is for CUDA devices, and this is {device}; use runtime.{key}={off}"
            )


def check_graph(config: Config, layout: Layout) -> None:
    """Raises `ConfigError` where steps are to be replayed in which the host or other ranks take part."""
    if config.runtime.graph != "on":
        return
    for against, holds in (
        (f"is for one rank, and these are {layout.world}", layout.world > 1),
        ("does not go with runtime.offload=blocks", config.runtime.offload == "blocks"),
        ("does not go with attention.capture", config.attention.capture is not None),
    ):
        if holds:
            raise ConfigError(f"runtime.graph=on {against}; use runtime.graph=off")


def check_transport(config: Config, device: str) -> None:
    """Raises `ConfigError` for heads that are to be copied between what are no GPUs with NCCL."""
    if config.exchange.transport == "copy" and (backend := check_backend(config, device)) != "nccl":
        raise ConfigError(
            f"exchange.transport=copy is for GPUs that have NCCL for all else, and this is {device} over {backend}; "
            "use exchange.transport=auto or collective"
        )


def check_capture(folder: str | None) -> None:
    """Raises `ConfigError` where q, k and v are to be saved in what is, or lies in, a file."""
    if folder is None:
        return
    there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"attention.capture={folder}: {there} is a file; name a folder, made where there is none")


def check_backend(config: Config, device: str) -> str:
    """The transport of tensors between ranks. Raises `ConfigError` for NCCL without CUDA."""
    backend = config.runtime.backend
    if backend == "nccl" and device != "cuda":
        raise ConfigError("runtime.backend=nccl needs CUDA devices; runtime.backend=gloo runs on the processor")
    return ("nccl" if device == "cuda" else "gloo") if backend == "auto" else backend
