"""AdaLN tables: shifts, factors and gates for every step of a schedule, computed once before the first step.

A block's projection turns one time into 3 modalities x 6 chunks x C; a step needs three of the (stream
time, modality) pairs. For a full checkpoint these projections hold a third of all parameters: each is read,
used and dropped before the next.

Rows of keyframes and references ("kept" rows) have times of their own, and pairs only where there are such rows.

Shape letters: n steps, R pairs of stream time and modality, C hidden, Z the width of the time representation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from h3dist.checkpoint.comfy import DenoiserFile
from h3dist.checkpoint.shard import read_tensor
from h3dist.conditions import AUDIO_TIME, VISUAL_TIME
from h3dist.model.weights import read_dense, read_projection
from h3dist.packing import AUDIO_TAG, TEXT_TAG, VIDEO_TAG

PAIRS = (("video", VIDEO_TAG), ("video", TEXT_TAG), ("audio", AUDIO_TAG))  # rows of a block's table
KEPT_PAIRS = (("kept video", VIDEO_TAG), ("kept audio", AUDIO_TAG))  # and its last rows, with conditions
STREAMS = ("video", "audio")  # rows of the final table, which knows no modality
CHUNKS = 6  # shift, scale, gate for attention; then for the feed-forward half
SCALES = (1, 4)  # which of them are scales; the tables hold 1 + scale
FINAL_CHUNKS = 2  # shift, scale
MAX_PERIOD = 10000.0


class StepTables(NamedTuple):
    """One step's: a table [R, 6, C] for each block, and final [2, 2, C]."""

    blocks: tuple[Tensor, ...]
    final: Tensor


@dataclass(frozen=True)
class Modulation:
    """blocks: for each a table [n, R, 6, C], R 3 or with conditions 5; final [n, 2, 2, C]; in the compute dtype."""

    blocks: tuple[Tensor, ...]
    final: Tensor

    def at(self, step: int) -> StepTables:
        """Those of a step of the schedule, as views."""
        return StepTables(tuple(table[step] for table in self.blocks), self.final[step])


def tables(
    dfile: DenoiserFile,
    times_v: Sequence[float],
    times_a: Sequence[float],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    kept: bool = False,
) -> Modulation:
    """The tables of a schedule with the video at times_v [n] and the audio at times_a [n], t = 1 - sigma.

    `kept`: the sequence holds conditions; a visual one's time is 0.999, or the video's where that is later, and
    a sound's is 1 (both contracts).

    Curve form: W c(t) + b in float32. Full form: W silu(e(t)) + b, with e and silu in float32 and their
    result cast to the compute dtype, in which the projection runs. (Comfy checkpoint format, AdaLN forms.)
    """
    times = {"video": tuple(times_v), "audio": tuple(times_a)}
    if kept:
        times["kept video"] = tuple(max(time, VISUAL_TIME) for time in times_v)
        times["kept audio"] = (AUDIO_TIME,) * len(times_v)
    every = represent(dfile, sum(times.values(), ()), device=device, dtype=dtype)
    represented = dict(zip(times, every.split([len(part) for part in times.values()]), strict=True))
    names = [f"blocks.{index}.adaln_proj.linear" for index in range(dfile.dims.layers)]
    return Modulation(
        blocks=tuple(_block_table(dfile, name, represented).to(dtype) for name in names),
        final=_final_table(dfile, represented).to(dtype),
    )


def _block_table(dfile: DenoiserFile, name: str, represented: dict[str, Tensor]) -> Tensor:
    """[n, R, 6, C]. The projection's outputs are modality-major: the tag picks a contiguous band of rows."""
    weight, bias = _projection(dfile, name, represented["video"])
    band = CHUNKS * dfile.dims.hidden
    rows = [
        F.linear(represented[stream], weight[tag * band :][:band], bias[tag * band :][:band])
        for stream, tag in (*PAIRS, *KEPT_PAIRS)
        if stream in represented
    ]
    table = torch.stack(rows, dim=1).unflatten(2, (CHUNKS, -1))
    table[:, :, SCALES] += 1
    return table


def _final_table(dfile: DenoiserFile, represented: dict[str, Tensor]) -> Tensor:
    weight, bias = _projection(dfile, "final_layer.adaln_proj.linear", represented["video"])
    rows = [F.linear(represented[stream], weight, bias) for stream in STREAMS]
    table = torch.stack(rows, dim=1).unflatten(2, (FINAL_CHUNKS, -1))
    table[:, :, 1] += 1
    return table


def _projection(dfile: DenoiserFile, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
    weight = read_dense(dfile, name, like.device, like.dtype)
    return weight, read_tensor(dfile, f"{name}.bias").to(like)


def represent(dfile: DenoiserFile, times: Sequence[float], *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """What the AdaLN projections see of each time, [n, Z]: a curve point (f32) or silu(e(t)) in dtype."""
    t_n = torch.tensor(times, dtype=torch.float32, device=device)
    if dfile.dims.form == "curve":
        return interpolate(read_tensor(dfile, "adaln_t_table").to(device, torch.float32), t_n)
    hidden = read_projection(dfile, "time_embedder.proj_in", device)
    out = read_projection(dfile, "time_embedder.proj_out", device)
    e_nZ = F.linear(F.silu(F.linear(sinusoid(t_n, hidden.weight.shape[1]), *hidden)), *out)
    return F.silu(e_nZ).to(dtype)


def sinusoid(t_n: Tensor, width: int) -> Tensor:
    """[n, width]: cos(t f_j), then sin(t f_j); f_j = exp(-ln(10000) j / (width / 2)), t unscaled."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=t_n.device) * (-math.log(MAX_PERIOD) / half)
    angles = t_n[:, None] * exponents.exp()
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def interpolate(curve_GZ: Tensor, t_n: Tensor) -> Tensor:
    """[n, Z]: the curve at t, linear between its G grid points on [0, 1]."""
    last = curve_GZ.shape[0] - 1
    place_n = t_n.clamp(0, 1) * last
    below_n = place_n.floor().clamp_max(last - 1).long()
    return torch.lerp(curve_GZ[below_n], curve_GZ[below_n + 1], (place_n - below_n)[:, None])
