"""The text refiner: prompt states to the text rows of the sequence. Once a request, on one rank, in fp32.

Shape letters: L text rows, t the encoder's width, C hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.attention.sdpa import sdpa
from h3dist.checkpoint.comfy import DenoiserFile
from h3dist.checkpoint.shard import read_tensor
from h3dist.model.block import as_heads
from h3dist.model.dense import dense_linear
from h3dist.model.elementwise import NORM_EPS, PLAIN
from h3dist.model.weights import BlockWeights, read_block, read_projection


@torch.no_grad()
def refine_text(dfile: DenoiserFile, states_Lt: Tensor, device: torch.device | str) -> Tensor:
    """f32 [L, C] on the device: condition_proj, the refiner's blocks, its final norm.

    The weights are read one block at a time and dropped: nothing of the refiner stays resident.
    """
    dims = dfile.dims
    x_LC = F.linear(states_Lt.to(device, torch.float32), *read_projection(dfile, "condition_proj", device))
    for index in range(dims.refiner_layers):
        name = f"token_refiner.blocks.{index}"
        whole = (0, dims.heads), (0, dims.ffn)
        refine_block(x_LC, read_block(dfile, name, *whole, device=device, dtype=torch.float32))
    norm_C = read_tensor(dfile, "token_refiner.final_norm.weight").to(device, torch.float32)
    return F.rms_norm(x_LC, norm_C.shape, norm_C, NORM_EPS)


def refine_block(x_LC: Tensor, weights: BlockWeights) -> None:
    """A plain pre-norm block, in place: no rotation and no modulation; queries and keys are normed."""
    h_LC = F.rms_norm(x_LC, weights.norm1.shape, weights.norm1, NORM_EPS)
    q_LHD, k_LHD, v_LHD = as_heads(dense_linear(h_LC, weights.qkv), weights)
    q_LHD = F.rms_norm(q_LHD, weights.q_norm.shape, weights.q_norm, NORM_EPS)
    k_LHD = F.rms_norm(k_LHD, weights.k_norm.shape, weights.k_norm, NORM_EPS)
    o_LHD = sdpa(q_LHD, k_LHD, v_LHD)
    x_LC += dense_linear(o_LHD.flatten(1), weights.out)
    h_LC = F.rms_norm(x_LC, weights.norm2.shape, weights.norm2, NORM_EPS)
    x_LC += dense_linear(PLAIN.activate(dense_linear(h_LC, weights.fc1)), weights.fc2)
