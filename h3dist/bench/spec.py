"""What to measure: shapes, layout, sizes of the model, and how often. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from h3dist.errors import ConfigError
from h3dist.geometry import Geometry, align_frames, nearest_multiples
from h3dist.plan import Layout, Plan, fp4_linears, make_layout, make_plan, released_dims
from h3dist.plan.gemm import choose_gemm

if TYPE_CHECKING:
    from h3dist.checkpoint.comfy import DenoiserDims

SMALL = {"hidden": 208, "heads": 14, "head_dim": 32, "ffn": 1168, "layers": 3, "rope_freqs": 4}
SHAPES = {
    "released": ("864x480x141", "1344x768x124", "1344x768x243"),
    "small": ("192x128x39",),
}


@dataclass(frozen=True)
class Clip:
    """What a plan asks of a request where there is none: its geometry, and nothing said about it."""

    geometry: Geometry
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """One benchmark. `limit`: seconds after which no further part is begun. `blocks`: fewer than the model's, in which
    a step is in proportion. `variants`: whole steps done otherwise, see `variants.choose`. `floor_only`: of the parts
    only what the floor is made of, and no plain step; `parts`: whether there are any."""

    shapes: tuple[str, ...]
    mode: str = "auto"
    sp: int | None = None
    tp: int | None = None
    size: str = "released"
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    attention: str = "sdpa"
    text_rows: int = 400
    repeats: int = 5
    diffusers: bool = False
    variants: tuple[str, ...] = ()
    floor_only: bool = False
    parts: bool = True
    blocks: int | None = None
    limit: float = 440.0
    seed: int = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Spec":
        """What `dataclasses.asdict` gave, by way of JSON."""
        lists = {name: tuple(values.get(name, ())) for name in ("shapes", "variants")}
        return cls(**{**values, **lists})

    @property
    def dims(self) -> "DenoiserDims":
        """The sizes of the model: released, or small with every oddity that a split can meet."""
        sizes = {} if self.size == "released" else SMALL
        return replace(released_dims(), **sizes | ({"layers": self.blocks} if self.blocks else {}))

    def layout(self, world: int) -> Layout:
        """The layout of `world` ranks. Raises `PlanError`."""
        return make_layout(self.mode, world, self.sp, self.tp, self.dims)

    def plan(
        self,
        shape: str,
        layout: Layout,
        *,
        dtype: str,
        capability: tuple[int, int] | None,
        steps: int,
        gemm: str = "auto",
    ) -> Plan:
        """The plan of `steps` evaluations of a shape, on devices of a compute capability (None: a CPU).

        Raises ConfigError for products that they cannot do.
        """
        gemm = choose_gemm(gemm, capability, dtype)
        fp4, amax = fp4_linears(self.dims, None, capability, dtype) if gemm == "nvfp4" else (0, 0)
        options = {"dtype": dtype, "attention": self.attention, "steps": steps, "fp4": fp4, "amax": amax, "gemm": gemm}
        return make_plan(Clip(parse_shape(shape)), self.dims, self.text_rows, layout, **options)


def parse_shape(text: str) -> Geometry:
    """A shape such as 864x480x141: width, height, frames. Raises ConfigError with the nearest legal one."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None or "0" in found.groups():
        raise ConfigError(f"--shape {text}: must be WIDTHxHEIGHTxFRAMES, as in 864x480x141")
    width, height, frames = map(int, found.groups())
    legal = (nearest_multiples(width)[0], nearest_multiples(height)[0], align_frames(frames))
    if (width, height, frames) != legal:
        near = "x".join(map(str, legal))
        raise ConfigError(f"--shape {text}: canvases are multiples of 32, frames 17k + 5; the nearest is {near}")
    return Geometry(width, height, frames)


def default_shapes(size: str) -> Sequence[str]:
    """The three shapes that figures are given for, or one that a CPU can do."""
    return SHAPES[size]
