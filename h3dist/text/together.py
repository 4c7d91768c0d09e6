"""The text encoder spread over ranks: each holds some rows of every linear of the decoder layers.

transformers' own layers run on every rank, over all rows of text, with a rank's own query heads and its own columns of
the MLP inside; what has to be whole, attention's output, the MLP's inside, and what the two give, is gathered. No sum
is split, so that the states are one rank's but for the rounding of a product of another shape. Rank 0 first computes
what the layers are given, and lets the embedding and the vision tower go before it reads its layers.

Shape letters: L rows of text, C hidden, V of the rows tokens of pictures, N outputs, n own outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from h3dist.checkpoint.comfy import ModelPaths, Slots, StateFile, open_text_encoder, released
from h3dist.checkpoint.text_names import TextDims
from h3dist.checkpoint.text_shard import TextShare, kv_span, text_slices
from h3dist.comm import Comm
from h3dist.comm.encoding import RankEncoding
from h3dist.plan import EncodePlan, Span
from h3dist.plan.encode import widths
from h3dist.text.encoder import TextEncoder, finite, read_config, skeleton, stored_linears, with_plain
from h3dist.text.layers import StoredLinear
from h3dist.text.presentation import Presentation
from h3dist.text.vision import Vision

if TYPE_CHECKING:
    from transformers import Qwen3VLTextModel

KEYS = ("self_attn.k_proj", "self_attn.v_proj")
JOINED = {"self_attn.o_proj": ("encode.heads", "heads"), "mlp.down_proj": ("encode.ffn", "ffn")}  # of their inputs


class Given(nn.Module):
    """In the place of the decoder layers: keeps what they would be given."""

    embed_tokens: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, Any] = {}

    def get_input_embeddings(self) -> nn.Module:
        """As transformers asks for them."""
        return self.embed_tokens

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        self.inputs = inputs
        return {"last_hidden_state": inputs["inputs_embeds"]}


class OwnKeys(nn.Module):
    """Keys or values, [1, L, n], once for every query head of this rank that attends to them."""

    def __init__(self, linear: StoredLinear, places: Tensor, size: int) -> None:
        super().__init__()
        self.linear, self.places, self.size = linear, places, size

    def forward(self, x: Tensor) -> Tensor:
        kept = self.linear(x)
        heads = kept.unflatten(-1, (kept.shape[-1] // self.size, self.size))
        return heads.index_select(-2, self.places).flatten(-2)


class Joined(nn.Module):
    """A product whose inputs lie over the ranks and whose outputs do: it joins the ones, and then the others."""

    def __init__(self, linear: StoredLinear, into: "Join", out: "Join") -> None:
        super().__init__()
        self.linear, self.into, self.out = linear, into, out

    def forward(self, x_1Ln: Tensor) -> Tensor:
        return self.out(self.linear(self.into(x_1Ln[0])))[None]


@dataclass(frozen=True)
class Join:
    """Puts all ranks' columns side by side: [L, n] to [L, N]."""

    ranks: RankEncoding
    label: str
    widths: tuple[int, ...]

    def __call__(self, mine_Ln: Tensor) -> Tensor:
        return self.ranks.join(self.label, mine_Ln, self.widths)


def encoder_for(plan: EncodePlan, slots: Slots | None, model: ModelPaths) -> StateFile | None:
    """The text encoder's file as this rank needs it: rank 0 has opened it, and the others open it if all encode.

    Raises CheckpointError.
    """
    if slots is not None:
        return slots.text_encoder
    config = model.text_encoder_config
    return released(open_text_encoder(model.text_encoder, config), config) if plan.spread else None


def load_layers(
    state: StateFile, config: str | None, plan: EncodePlan, rank: int, ranks: RankEncoding, device: torch.device
) -> "Qwen3VLTextModel":
    """transformers' decoder layers over a rank's rows of their weights, tied to the other ranks.

    Only those rows are read. Raises ConfigError, and CheckpointError for damaged scales.
    """
    dims, share = state.dims, plan.shares[rank]
    model, slices = skeleton(read_config(config)).language_model, text_slices(dims, share)
    model.embed_tokens = nn.Identity()  # what it would give is given
    hidden = Join(ranks, "encode.hidden", widths(plan.shares, "hidden"))
    places = _places(dims, share.heads).to(device)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    kinds = [name.split(".", 2)[2] for name in names]  # past "layers.3."
    wanted = [(f"model.{name}", slices[kind]) for name, kind in zip(names, kinds, strict=True)]
    layer: nn.Module
    for name, kind, layer in zip(names, kinds, stored_linears(state, wanted, device), strict=True):
        if kind in KEYS:
            layer = OwnKeys(layer, places, dims.head_dim)
        if kind in JOINED:
            layer = Joined(layer, _into(kind, plan.shares, dims.head_dim, ranks), hidden)
        model.set_submodule(name, layer)
    for layer in model.layers:
        layer.self_attn.num_key_value_groups = 1  # each of my query heads has keys of its own
    return with_plain(model, state, "model.{}".format, device)


def _places(dims: TextDims, heads: Span) -> Tensor:
    """Of each query head the place, among the key heads that are held, of the one it attends to."""
    group, first = dims.heads // dims.kv_heads, kv_span(dims, heads)[0]
    return torch.tensor([head // group - first for head in range(*heads)], dtype=torch.int64)


def _into(kind: str, shares: tuple[TextShare, ...], size: int, ranks: RankEncoding) -> Join:
    label, of = JOINED[kind]
    unit = size if of == "heads" else 1
    return Join(ranks, label, tuple(unit * width for width in widths(shares, of)))


@torch.no_grad()
def encode_together(
    state: StateFile,
    config: str | None,
    plan: EncodePlan,
    comm: Comm,
    presentation: Presentation,
    vision: Mapping[str, Vision] | None = None,
) -> Tensor:
    """Hidden states f32 [L, C], on every rank of the request and its device; all call it.

    `vision`, what the presentation's blocks show, is the first rank's. Raises as `TextEncoder` does, on any rank.
    """
    first = comm.rank == 0
    told, given_XC = _first_inputs(state, config, comm.device, presentation, vision) if first else (None, None)
    ranks = comm.encoding()
    layers = load_layers(state, config, plan, comm.rank, ranks, comm.device)
    comm.agree("reading the text encoder")  # nobody waits on the tensors' groups for one that reads
    told = comm.share(told)
    given_XC = ranks.spread(given_XC, told.shape)
    states_LC = layers(**told.inputs(given_XC)).last_hidden_state[0]
    ranks.settle()
    return finite(states_LC)


@dataclass(frozen=True)
class Told:
    """How what the layers are given lies in one tensor [L + d V, C]: its shape, the number of rows of text, the places
    of all and which of them show pictures."""

    shape: tuple[int, int]
    rows: int
    positions: Tensor | None  # [3, 1, L]; None: one after the other
    shown: Tensor | None  # bool [1, L]

    def inputs(self, given_XC: Tensor) -> dict[str, Any]:
        """The layers' inputs under transformers' names, from the tensor on its device."""
        text_LC, features = given_XC[: self.rows], given_XC[self.rows :]
        found: dict[str, Any] = {"inputs_embeds": text_LC[None], "use_cache": False}
        if self.positions is not None:
            found["position_ids"] = self.positions.to(given_XC.device)
        if self.shown is not None:
            found["visual_pos_masks"] = self.shown.to(given_XC.device)
            found["deepstack_visual_embeds"] = list(features.split(int(self.shown.sum())))
        return found


def _first_inputs(
    state: StateFile,
    config: str | None,
    device: torch.device,
    presentation: Presentation,
    vision: Mapping[str, Vision] | None,
) -> tuple[Told, Tensor]:
    """What the embedding and the vision tower give, f32 [L + d V, C]: the rows of text, then each deepstack layer's."""
    given = Given()
    front = TextEncoder.load(state, config, device, decoder=given)
    text_LC, _ = front.encode(presentation, vision)
    front.release()
    shown, features = given.inputs["visual_pos_masks"], given.inputs["deepstack_visual_embeds"] or []
    positions = given.inputs["position_ids"]
    whole = torch.cat([text_LC, *features])
    places = [None if tensor is None else tensor.cpu() for tensor in (positions, shown)]
    return Told((whole.shape[0], whole.shape[1]), len(text_LC), *places), whole
