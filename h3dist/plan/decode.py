"""Where a clip is decoded: by rank 0 alone, or tile by tile by all ranks; why, who does what, and what that takes.

Tiles are decoded one a call, or a fixed number of them, which the canvas gives: the last call of a chunk is filled up,
and no call is shared between ranks, so that frames do not depend on how many there are.

Under "parallel" each rank has those tiles of the video VAE that `h3dist.spread` gives it, and the last rank the
sound; rank 0 fades the tiles into frames and writes them, chunk by chunk. Bytes that a rank sends, once a run, for
tiles [3, 22, y, x] of e bytes an element and A audio latents:

    decode.tiles   3 * 22 * y * x * e   a tile, all ranks but the first
    decode.sound   2 * 800 * A * 4      the last rank
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from h3dist.errors import ConfigError
from h3dist.geometry import (
    CHUNK_FRAMES,
    SAMPLES_PER_AUDIO_LATENT,
    SOUND_CHANNELS,
    TAIL_FRAMES,
    Geometry,
)
from h3dist.plan.gemm import NEEDS
from h3dist.plan.memory import Stored
from h3dist.spread import Extra, Schedule, makespan, spread
from h3dist.tiles import Cuts, cut_video, even_batch

if TYPE_CHECKING:
    from h3dist.plan.plan import Plan, Share

DECODE_LABELS = ("decode.tiles", "decode.sound")
FLOAT = 4
TILE_ELEMENT = {"cuda": 2, "cpu": 4}  # bytes: the decoder gives float16 on CUDA, float32 on the CPU
TILE_WORK = 1 << 28  # bytes: the widest point of one decoder layer on the 1797 tokens of a tile
FAST_CALL_TILES = 2  # on CUDA: an H200 takes 18.3 ms a tile so, 17.9 in calls of 4, which 8 ranks share less evenly
# Parts of a tile's decoding: what rank 0 does to a tile (fades, colours, the copy to the host), and one audio latent.
# Measured with benchmarks/parallel_decode.py, on a CPU and on an H200, beside a tile of the plain decoder.
BESIDE = {"cpu": (0.0005, 0.0004), "cuda": (0.007, 0.009)}
FAST_TILE = {"cpu": 1.0, "cuda": 0.52}  # of a plain one: 17.7 ms of 33.8 on an H200


@dataclass(frozen=True)
class DecodePlan:
    """Where a clip is decoded. `asked` is the configuration's word, `device` the kind of device of all ranks."""

    asked: str = "rank0"
    device: str = "cpu"
    parallel: bool = False
    why: str = ""
    fast: bool = False  # the video VAE's decoder in fewer, larger steps
    gemm: str = "exact"  # how it multiplies, or fp8
    batch: int = 1  # tiles of a call
    tiles: tuple[int, ...] = ()  # by rank; none where rank 0 decodes alone
    speedup: float = 1.0  # of the decoding, by the schedule: no transfer and no encoder counted

    @property
    def sound(self) -> int:
        """The rank that decodes the sound."""
        return len(self.tiles) - 1 if self.parallel else 0

    def text(self) -> str:
        """One line for people."""
        calls = f"; {self.batch} tiles a call" * (self.batch > 1) + ", by the fast decoder" * self.fast
        calls += ", with FP8 products (an approximation)" * (self.gemm == "fp8")
        if not self.parallel:
            return f"rank 0 decodes: {self.why}{calls}"
        counts = "-".join(map(str, sorted({min(self.tiles), max(self.tiles)})))
        return f"all ranks decode, {counts} tiles each, {self.speedup:.2f} x rank 0 by the schedule: {self.why}{calls}"


def ask_decode(
    asked: str, device: str, fast: bool, batch: int | None, geometry: Geometry, gemm: str = "exact"
) -> DecodePlan:
    """What is asked for, not decided yet: `batch` is the most tiles of a call, None what is best on the device."""
    most = batch or (FAST_CALL_TILES if fast and device == "cuda" else 1)
    return DecodePlan(asked, device, fast=fast, gemm=gemm, batch=even_batch(_cut(geometry).tiles, most))


def choose_products(asked: str, fast: bool, capability: tuple[int, int] | None) -> str:
    """How the decoder multiplies where `asked` was typed: "auto" is exact.

    capability: the lowest of the ranks' GPUs, None on CPUs, where fp8 is computed in plain torch, to the same numbers
    and slowly. Raises ConfigError for what decoder or GPUs cannot do.
    """
    if asked == "auto":
        return "exact"
    if not fast:
        raise ConfigError(f"decode.gemm={asked} is for the fast decoder, which is off here; use decode.fast=on with it")
    if capability is not None and capability < NEEDS[asked]:
        least, there = ("{}.{}".format(*found) for found in (NEEDS[asked], capability))
        raise ConfigError(
            f"decode.gemm={asked} needs GPUs of compute capability {least} or later, and this is {there}; "
            "decode.gemm=auto runs everywhere"
        )
    return asked


def schedule_decode(
    geometry: Geometry, ranks: int, device: str, batch: int = 1, *, fast: bool = False
) -> tuple[Cuts, Schedule]:
    """How a clip is cut, and which rank decodes which tile: the same on every rank, and for the plan's bytes."""
    cuts = _cut(geometry)
    return cuts, spread(_costs(cuts, batch), ranks, _extra(cuts, geometry, device, fast), batch)


def with_decode(plan: "Plan") -> "Plan":
    """The same plan with its decoding decided, by what `plan.decode` asks for; bytes and memory with it."""
    decode = _decide(plan)
    shares = tuple(replace(share, sent=share.sent | _sent(plan, decode, share.rank)) for share in plan.shares)
    memory = _memory(plan, decode) if decode.parallel else _alone_memory(plan, decode)
    return replace(plan, decode=decode, shares=shares, memory=memory)


def _decide(plan: "Plan") -> DecodePlan:
    """What was asked for, as far as there is more than one rank; "auto" weighs."""
    ask, ranks = plan.decode, plan.layout.ranks
    alone = DecodePlan(ask.asked, ask.device, fast=ask.fast, gemm=ask.gemm, batch=ask.batch)
    if ranks == 1:
        return replace(alone, why="there is one rank")
    if ask.asked == "rank0":
        return replace(alone, why="as asked for")
    together = _spread_out(plan)
    if ask.asked == "parallel":
        return replace(together, why="as asked for")
    against = _against(plan, together)
    return replace(alone, why=against) if against else replace(together, why="no rank needs more for it than rank 0")


def _spread_out(plan: "Plan") -> DecodePlan:
    ranks, geometry = plan.layout.ranks, plan.geometry
    ask = plan.decode
    cuts, schedule = schedule_decode(geometry, ranks, ask.device, ask.batch, fast=ask.fast)
    costs, extra = _costs(cuts, ask.batch), _extra(cuts, geometry, ask.device, ask.fast)
    one = makespan(spread(costs, 1, extra), costs, extra)
    speedup = round(one / makespan(schedule, costs, extra), 3)
    tiles = tuple(schedule.total(rank) for rank in range(ranks))
    return replace(ask, parallel=True, tiles=tiles, speedup=speedup)


def _against(plan: "Plan", together: DecodePlan) -> str | None:
    """Why "auto" leaves decoding to rank 0; None where it does not."""
    if sum(together.tiles) == 1:
        return "there is one tile"
    needs = [stages["decode"] for stages in _memory(plan, together)]
    most = max(range(len(needs)), key=needs.__getitem__)
    if needs[most] > max(plan.peaks):
        return f"rank {most} would need {needs[most] >> 20} MiB for tiles, more than any rank needs without"
    if plan.decode.device == "cpu":
        return "the ranks share the processor, and rank 0 alone may use all of it"
    return None


def _cut(geometry: Geometry) -> Cuts:
    return cut_video(geometry.latent_t, geometry.latent_h, geometry.latent_w)


def _costs(cuts: Cuts, batch: int) -> list[list[float]]:
    """Of every tile, chunk by chunk: a call that is filled up costs what a full one does."""
    filled = [batch / min(batch, cuts.tiles - place // batch * batch) for place in range(cuts.tiles)]
    return [filled] * len(cuts.chunks)


def _extra(cuts: Cuts, geometry: Geometry, device: str, fast: bool) -> Extra:
    tile = FAST_TILE[device] if fast else 1.0
    blending, latent = (part / tile for part in BESIDE[device])
    return Extra(chunk=blending * cuts.tiles, sound=latent * geometry.audio_latents)


def _tile_bytes(cuts: Cuts, device: str) -> int:
    return 3 * (CHUNK_FRAMES + TAIL_FRAMES) * cuts.rows.size * cuts.cols.size * TILE_ELEMENT[device]


def _sent(plan: "Plan", decode: DecodePlan, rank: int) -> dict[str, int]:
    """Bytes by label of one rank, by the formulas above."""
    index = rank % plan.layout.ranks
    if not decode.parallel or index == 0:
        return dict.fromkeys(DECODE_LABELS, 0)
    tile = _tile_bytes(_cut(plan.geometry), decode.device)
    sound = FLOAT * SOUND_CHANNELS * SAMPLES_PER_AUDIO_LATENT * plan.geometry.audio_latents
    return {"decode.tiles": decode.tiles[index] * tile, "decode.sound": sound if index == decode.sound else 0}


def _alone_memory(plan: "Plan", decode: DecodePlan) -> tuple[dict[str, int], ...]:
    """Of every rank at each stage where rank 0 decodes: beside a chunk's pictures it holds the tiles of a call, and
    the two rows of them that are being faded."""
    cuts = _cut(plan.geometry)
    tiles = decode.batch + 2 * len(cuts.cols.starts)
    extra = decode.batch * TILE_WORK + tiles * _tile_bytes(cuts, decode.device)
    return tuple(
        stages | {"decode": stages["decode"] + (share.rank % plan.layout.ranks == 0) * extra}
        for stages, share in zip(plan.memory, plan.shares, strict=True)
    )


def _memory(plan: "Plan", decode: DecodePlan) -> tuple[dict[str, int], ...]:
    """The memory of every rank at each stage where all decode."""
    cuts, schedule = schedule_decode(plan.geometry, plan.layout.ranks, decode.device, decode.batch, fast=decode.fast)
    return tuple(
        stages | {"decode": _rank_memory(plan, decode, cuts, schedule, share)}
        for stages, share in zip(plan.memory, plan.shares, strict=True)
    )


def _rank_memory(plan: "Plan", decode: DecodePlan, cuts: Cuts, schedule: Schedule, share: "Share") -> int:
    """The denoiser's weights stay; a VAE is read by a rank that has work for it. Of tiles a rank holds those it makes,
    the copy on its way and those before; rank 0 two chunks of all, and a chunk's pictures twice."""
    stored, rank = plan.stored, share.rank % plan.layout.ranks
    tile = _tile_bytes(cuts, decode.device)
    most = max(schedule.counts(chunk)[rank] for chunk in range(len(cuts.chunks)))
    held = 3 * most * tile
    if rank == 0:
        held = 2 * cuts.tiles * tile + 2 * plan.geometry.width * plan.geometry.height * 3 * CHUNK_FRAMES * FLOAT
    work = decode.batch * TILE_WORK if decode.tiles[rank] else 0
    return stored.reserve + share.weight_bytes + vae_bytes(decode, stored, rank) + work + held


def vae_bytes(decode: DecodePlan, stored: Stored, rank: int) -> int:
    """What of the two VAEs a rank reads to decode."""
    if not decode.parallel:
        return stored.video_vae + stored.audio_vae if rank == 0 else 0
    return bool(decode.tiles[rank]) * stored.video_vae + (rank == decode.sound) * stored.audio_vae
