"""An estimate of each rank's memory, stage by stage: what is resident, and the largest set of live
activations.

It is an estimate, made to refuse what cannot run: it counts the tensors that one block keeps alive at its
widest point, not the allocator's fragments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from h3dist.checkpoint.text_names import RELEASED, TextDims
from h3dist.conditions import Condition
from h3dist.geometry import CHUNK_FRAMES, Geometry
from h3dist.plan.gemm import NARROW, working_bytes
from h3dist.plan.layout import length
from h3dist.plan.slots import slot_bytes
from h3dist.plan.text_memory import alone_bytes
from h3dist.plan.traffic import Work
from h3dist.plan.weights import (
    F32,
    LINEARS,
    kept_bytes,
    linear_shapes,
    linear_weights,
    modulation_bytes,
    refiner_weights,
)

if TYPE_CHECKING:
    from h3dist.checkpoint.text_shard import TextStored
    from h3dist.plan.plan import Share

STAGES = ("encode", "refine", "denoise", "decode")
ENCODED_TILE = 4 * 128 * 17 * 256 * 256 * F32  # 4 of the video VAE's widest activations of one tile of a clip
CUDA_RESERVE = 1 << 30  # a CUDA context, NCCL's buffers and the libraries' work spaces


@dataclass(frozen=True)
class Stored:
    """What the memory depends on beside the layout, in bytes; a file whose size is not known counts 0."""

    bytes_per_weight: float  # of the blocks' linears as they stay in memory, scales included
    reserve: int = CUDA_RESERVE  # what a rank takes before it holds anything of ours
    text_encoder: int = 0
    video_vae: int = 0
    audio_vae: int = 0
    gemm: str = "dense"  # how those linears are multiplied: see `gemm`
    resident_blocks: int | None = None  # on the device at a time, the others in the host's memory; None: all
    text: "TextStored | None" = None  # the text encoder's file by its parts, where it is at hand

    @property
    def text_dims(self) -> TextDims:
        """The text encoder's sizes; without a file the released ones."""
        return self.text.dims if self.text else RELEASED


def weight_bytes(work: Work, stored: Stored, share: "Share") -> int:
    """What a rank keeps of the denoiser on its device: quantised slices, small tensors, the modulation table."""
    cut = length(share.tp_heads), length(share.ffn), length(share.projected_heads)
    held = min(work.dims.layers, stored.resident_blocks or work.dims.layers) / work.dims.layers
    linears = round(held * stored.bytes_per_weight * linear_weights(work.dims, *cut))
    return linears + kept_bytes(work.dims) + modulation_bytes(work.dims, work.steps, kept=bool(work.conditions))


def activation_bytes(work: Work, gemm: str, share: "Share") -> int:
    """The wider of a block's two halves, attention and MLP, at its widest point.

    Both hold the residual, its modulated rows, those that are projected, the partial sum, and what products work
    with: memory for the largest weight made dense, which is used again, or an input narrowed. Attention is widest
    where q, k and v leave for the exchange (as they came from the linear and as normed and rotated; over sp their
    packed copy and what arrives), or, where hidden rows were gathered, in itself, and what it gives goes back to its
    rows. The MLP holds fc1's two halves and the activation of one. Heads that move by copies arrive in slots, which
    both halves hold besides.
    """
    dims, e = work.dims, work.element
    own, group, projected = length(share.rows), length(share.group_rows), length(share.projected_rows)
    shapes = linear_shapes(dims, length(share.tp_heads), length(share.ffn), length(share.projected_heads))
    rows = {name: projected if name == LINEARS[0] else group for name in shapes}
    work_space = {name: working_bytes(gemm, rows[name], shape, e) for name, shape in shapes.items()}
    if gemm not in NARROW:
        work_space = dict.fromkeys(shapes, max(work_space.values()))
    before = group * length(share.tp_heads) * dims.head_dim * e  # one of q, k, v, split by rows
    after = work.rows * length(share.heads) * dims.head_dim * e if work.layout.sp > 1 else 0  # or by heads
    wide, held = 5 * after + 2 * before if work.hidden else 7 * before + 3 * after, slot_bytes(work)
    if held and not work.hidden:
        wide -= 3 * after
    attention = (
        (group + projected) * dims.hidden * e + wide + max(work_space["attn.qkv_proj"], work_space["attn.out_proj"])
    )
    mlp = (
        2 * group * dims.hidden * e
        + 3 * group * length(share.ffn) * e
        + max(work_space["mlp.fc1"], work_space["mlp.fc2"])
    )
    return 2 * own * dims.hidden * e + held + max(attention, mlp)


def estimate(work: Work, stored: Stored, share: "Share", geometry: Geometry) -> dict[str, int]:
    """Bytes at each stage for one rank. Only rank 0 encodes, refines and decodes; the others wait with
    nothing.

    The text encoder and the refiner leave before the denoiser is loaded; the denoiser stays while rank 0
    decodes. Where others than rank 0 encode too `encode` says what they need.
    """
    states = work.text_rows * work.dims.text_dim * F32
    picture = geometry.width * geometry.height * 3 * CHUNK_FRAMES * F32
    vaes = stored.video_vae + stored.audio_vae
    first = share.rank % work.layout.ranks == 0
    read = max(alone_text(stored, work.text_rows, work.shown_rows), encoding_bytes(work.conditions, stored))
    return {
        "encode": stored.reserve + first * (read + states),
        "refine": stored.reserve + first * (F32 * refiner_weights(work.dims) + states + refining_bytes(work)),
        "denoise": stored.reserve + share.weight_bytes + activation_bytes(work, stored.gemm, share),
        "decode": stored.reserve + share.weight_bytes + first * (vaes + 2 * picture),
    }


def refining_bytes(work: Work) -> int:
    """What a block of the refiner keeps alive of the text rows, in float32: the residual, its normed rows, and either
    q, k and v, q and k as normed and the output, or fc1's two halves and the activation of one."""
    dims = work.dims
    return F32 * work.text_rows * (2 * dims.hidden + max(6 * dims.inner, 3 * dims.ffn))


def alone_text(stored: Stored, rows: int, shown: int) -> int:
    """What the whole text encoder takes on one rank; nothing where its file is not known."""
    return stored.text_encoder and stored.text_encoder + alone_bytes(stored.text_dims, rows, shown)


def encoding_bytes(conditions: Sequence[Condition], stored: Stored) -> int:
    """What the VAEs take to encode the conditions, after the text encoder has left; one VAE at a time."""
    video = any(condition.frames for condition in conditions) * (stored.video_vae + ENCODED_TILE)
    return max(video, any(condition.samples for condition in conditions) * stored.audio_vae)
