"""What the text encoder takes while it runs, in bytes: the tensors alive at the widest points of one decoder layer.

transformers' Qwen3-VL in float32, L rows, hidden C, H query heads and G key-value heads of D, MLP width F:

    attention  the residual and its normed rows, 2 C; q and k as rotated and v, (H + 2 G) D; inside
               scaled_dot_product_attention q and k scaled, k and v repeated for H heads, and the output, 5 H D: an
               element of each of L rows. transformers asks for grouped-query attention, which in float32 only torch's
               plain kernel has on CUDA: the scores [H, L, L], their softmax and a byte each of what it masks, and one
               causal mask [L, L]: 9 H L^2 + 5 L^2 bytes (9.9 H L^2 measured for H 8, L 2500, on a CPU, torch 2.13).
    MLP        2 C; the gate activated, the other half and their product, 3 F; and a weight made dense, C F.
    vision     for a patch its pixels, two hidden states, and q, k, v twice or the MLP's inside twice; then for each
               token C of its own and C of each deepstack layer, which stay while the decoder runs.

Spread over ranks, attention is of a rank's own heads h, each with keys and values of its own, for which torch has a
kernel that keeps no scores; what is gathered is alive twice, as it came and joined.
"""

from math import prod

from h3dist.checkpoint.text_names import TextDims
from h3dist.checkpoint.text_shard import TextShare
from h3dist.plan.layout import length

FLOAT = 4
SCORE = 9  # bytes of one score: itself, its softmax, whether it is masked


def alone_bytes(dims: TextDims, rows: int, shown: int) -> int:
    """Activations on a rank that runs the whole encoder; `shown` of the rows are tokens of pictures."""
    width, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    attention = FLOAT * rows * (2 * dims.hidden + 6 * width + 2 * keys) + (SCORE * dims.heads + FLOAT + 1) * rows**2
    mlp = FLOAT * (rows * (2 * dims.hidden + 3 * dims.ffn) + dims.hidden * dims.ffn)
    return max(vision_bytes(dims, shown), max(attention, mlp) + features_bytes(dims, shown))


def spread_bytes(dims: TextDims, rows: int, shown: int, share: TextShare) -> int:
    """Activations of the decoder layers on one of the ranks that they are spread over."""
    heads, ffn, width = length(share.heads), length(share.ffn), dims.heads * dims.head_dim
    own = FLOAT * rows * (2 * dims.hidden + 6 * heads * dims.head_dim)
    output = FLOAT * rows * (3 * dims.hidden + 2 * width)
    mlp = FLOAT * (rows * (2 * dims.hidden + max(3 * ffn, ffn + 2 * dims.ffn)) + dims.ffn * length(share.hidden))
    return max(own, output, mlp) + features_bytes(dims, shown)


def vision_bytes(dims: TextDims, shown: int) -> int:
    """The vision tower's activations for `shown` tokens, and what it gives."""
    vision = dims.vision
    patch = prod(vision.patch) + 2 * vision.hidden + max(6 * vision.hidden, 2 * vision.ffn)
    return FLOAT * shown * vision.merge * patch + features_bytes(dims, shown)


def features_bytes(dims: TextDims, shown: int) -> int:
    """What the vision tower gives for `shown` tokens."""
    return FLOAT * shown * dims.hidden * (1 + dims.vision.deepstack)
