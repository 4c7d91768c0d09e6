"""How a linear layer lies in a file: the tensors of its format, what a cut of it costs, and reading that.

To add a format: a class with the four members of `Storage` here, its weight in `formats` or a file of its
own, and a line in FORMATS. All but `read` works from the header alone, without torch. Shapes: N rows
(outputs), K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from h3dist.checkpoint.file import ITEM_BYTES, TensorFile, TensorInfo
from h3dist.checkpoint.slices import Slice, length
from h3dist.checkpoint.tiles import (
    BLOCK,
    PAIR,
    TILE_BLOCKS,
    TILE_BYTES,
    ceil_to,
    code_shape,
    scale_shape,
    tile_cols,
    tile_rows,
)
from h3dist.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from h3dist.checkpoint.formats import Weight

PLAIN_NAMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
FLOATS = tuple(PLAIN_NAMES)
ALL = Slice()


@dataclass(frozen=True)
class Spec:
    """What a tensor must be. `linear`: a linear layer's weight, which a format may store otherwise."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    linear: bool = False

    def __str__(self) -> str:
        return f"{'/'.join(self.dtypes)} {list(self.shape)}"

    def fits(self, info: TensorInfo) -> bool:
        """Whether a tensor of the file is this; a scalar may also be a vector of one."""
        same = info.shape == self.shape or (self.shape == () and info.shape == (1,))
        return same and info.dtype in self.dtypes


class Storage(Protocol):
    """One layer's weight of logical `shape` (N, K), stored in `format`."""

    @property
    def format(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def parts(self) -> dict[str, Spec]:
        """The tensors that the layer must have in the file, by the last part of their names."""
        ...

    def nbytes(self, cut: Slice = ALL) -> int:
        """Bytes that `read` asks of the file for a cut."""
        ...

    def read(self, file: TensorFile, layer: str, cut: Slice = ALL) -> Weight:
        """The cut of a layer (full name). Raises CheckpointError: scales NaN or zero, an illegal cut."""
        ...


@dataclass(frozen=True)
class Plain:
    """`weight` [N, K] as it is."""

    shape: tuple[int, int]
    dtype: str

    @property
    def format(self) -> str:
        return PLAIN_NAMES.get(self.dtype, self.dtype.lower())

    def parts(self) -> dict[str, Spec]:
        return {"weight": Spec(self.shape, (self.dtype,) if self.dtype in FLOATS else FLOATS)}

    def nbytes(self, cut: Slice = ALL) -> int:
        return prod(cut.shape(self.shape)) * ITEM_BYTES[self.dtype]

    def read(self, file: TensorFile, layer: str, cut: Slice = ALL) -> Weight:
        from h3dist.checkpoint.formats import PlainWeight

        return PlainWeight(file.read(f"{layer}.weight", rows=cut.rows, cols=cut.cols))


@dataclass(frozen=True)
class Extras:
    """What a quantised layer may carry for its activations: `input_scale` [] and `pre_quant_scale` [K]."""

    input_scale: bool
    pre_quant_dtype: str | None

    @classmethod
    def of(cls, parts: Mapping[str, TensorInfo]) -> Extras:
        scale = parts.get("pre_quant_scale")
        return cls("input_scale" in parts, scale.dtype if scale else None)

    def parts(self, width: int) -> dict[str, Spec]:
        fixed = {"input_scale": Spec((), ("F32",))} if self.input_scale else {}
        return fixed | ({"pre_quant_scale": Spec((width,))} if self.pre_quant_dtype else {})

    def nbytes(self, width: int) -> int:
        scales = width * ITEM_BYTES[self.pre_quant_dtype] if self.pre_quant_dtype else 0
        return scales + ITEM_BYTES["F32"] * self.input_scale

    def read(self, file: TensorFile, layer: str, cut: Slice, width: int) -> dict[str, Tensor]:
        found = {}
        if self.input_scale:
            found["input_scale"] = checked(file.read(f"{layer}.input_scale").reshape(()), f"{layer}.input_scale")
        if self.pre_quant_dtype:
            name = f"{layer}.pre_quant_scale"
            found["pre_quant_scale"] = checked(file.read(name, rows=(cut.col_range(width),)), name, signed=True)
        return found


@dataclass(frozen=True)
class Int8:
    """`weight` I8 [N, K] and `weight_scale` F32, one a row ([N, 1] or [N]) or one in all ([] or [1])."""

    shape: tuple[int, int]
    scale_shape: tuple[int, ...]
    full_precision: bool
    extras: Extras
    format: str = "int8_tensorwise"

    def parts(self) -> dict[str, Spec]:
        weight, scale = Spec(self.shape, ("I8",)), Spec(self.scale_shape, ("F32",))
        return {"weight": weight, "weight_scale": scale} | self.extras.parts(self.shape[1])

    def nbytes(self, cut: Slice = ALL) -> int:
        rows, width = cut.shape(self.shape)
        scales = 1 if prod(self.scale_shape) == 1 else rows
        return rows * width + scales * ITEM_BYTES["F32"] + self.extras.nbytes(width)

    def read(self, file: TensorFile, layer: str, cut: Slice = ALL) -> Weight:
        from h3dist.checkpoint.formats import Int8Weight

        codes = file.read(f"{layer}.weight", rows=cut.rows, cols=cut.cols)
        one = prod(self.scale_shape) == 1
        scale = file.read(f"{layer}.weight_scale", rows=None if one else cut.rows)
        scale = checked(scale, f"{layer}.weight_scale").reshape(-1, 1).expand(codes.shape[0], 1).contiguous()
        extras = self.extras.read(file, layer, cut, self.shape[1])
        return Int8Weight(codes, scale, self.full_precision, **extras)


@dataclass(frozen=True)
class Nvfp4:
    """`weight` U8 of packed codes, `weight_scale` E4M3 in swizzled tiles, `weight_scale_2` F32."""

    shape: tuple[int, int]
    full_precision: bool
    extras: Extras
    format: str = "nvfp4"

    def parts(self) -> dict[str, Spec]:
        return {
            "weight": Spec(code_shape(self.shape), ("U8",)),
            "weight_scale": Spec(scale_shape(self.shape), ("F8_E4M3", "U8")),
            "weight_scale_2": Spec((), ("F32",)),
        } | self.extras.parts(self.shape[1])

    def nbytes(self, cut: Slice = ALL) -> int:
        ranges, cols = cut.row_ranges(self.shape[0]), cut.col_range(self.shape[1])
        codes = length(ranges) * (ceil_to(cols[1], BLOCK) - cols[0]) // PAIR
        across = tile_cols(cols)
        tiles = length(tile_rows(ranges)) * (across[1] - across[0])
        return codes + tiles * TILE_BYTES + ITEM_BYTES["F32"] + self.extras.nbytes(cols[1] - cols[0])

    def read(self, file: TensorFile, layer: str, cut: Slice = ALL) -> Weight:
        from h3dist.checkpoint import nvfp4

        ranges, cols = cut.row_ranges(self.shape[0]), nvfp4.legal_cols(cut, self.shape)
        packed = (cols[0] // PAIR, ceil_to(cols[1], BLOCK) // PAIR)
        codes = file.read_bytes(f"{layer}.weight", rows=ranges, cols=packed)
        row_bytes = scale_shape(self.shape)[1] // TILE_BLOCKS * TILE_BYTES
        across = tuple(column * TILE_BYTES for column in tile_cols(cols))
        tiles = file.read_bytes(f"{layer}.weight_scale", row_bytes=row_bytes, rows=tile_rows(ranges), cols=across)
        weight = nvfp4.Nvfp4Weight(
            codes=nvfp4.pad_codes(codes),
            scales=nvfp4.cut_scales(tiles, ranges, cols),
            global_scale=checked(file.read(f"{layer}.weight_scale_2").reshape(()), f"{layer}.weight_scale_2"),
            shape=cut.shape(self.shape),
            full_precision=self.full_precision,
            **self.extras.read(file, layer, cut, self.shape[1]),
        )
        nvfp4.check_scales(weight, layer)
        return weight


def checked(scale: Tensor, name: str, signed: bool = False) -> Tensor:
    """The scale. Raises CheckpointError where it is NaN, infinite, zero, or negative unless `signed`."""
    bad = ~scale.isfinite() | ((scale == 0) if signed else (scale <= 0))
    if bad.any():
        value = scale[bad].flatten()[0].item()
        raise CheckpointError(f"{name} holds {value}: a scale must be finite and not zero; the file is damaged")
    return scale


def _nvfp4(shape: tuple[int, int], config: Mapping[str, Any], parts: Mapping[str, TensorInfo]) -> Nvfp4:
    return Nvfp4(shape, config["full_precision_matrix_mult"], Extras.of(parts))


def _int8(shape: tuple[int, int], config: Mapping[str, Any], parts: Mapping[str, TensorInfo]) -> Int8:
    found = parts["weight_scale"].shape if "weight_scale" in parts else None
    legal = {(), (1,), (shape[0],), (shape[0], 1)}
    scale = found if found in legal else (shape[0], 1)
    return Int8(shape, scale, config["full_precision_matrix_mult"], Extras.of(parts))


# what a layer's `comfy_quant` marker calls its format -> how it lies in the file
FORMATS: dict[str, Callable[[tuple[int, int], Mapping[str, Any], Mapping[str, TensorInfo]], Storage]] = {
    "nvfp4": _nvfp4,
    "int8_tensorwise": _int8,
}


def storage_of(shape: tuple[int, int], config: Mapping[str, Any] | None, parts: Mapping[str, TensorInfo]) -> Storage:
    """How a layer of logical `shape` lies, from its marker (None: plain) and its tensors in the header."""
    if config is None:
        weight = parts.get("weight")
        return Plain(shape, weight.dtype if weight else FLOATS[0])
    return FORMATS[config["format"]](shape, config, parts)
