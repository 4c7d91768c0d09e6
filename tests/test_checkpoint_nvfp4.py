"""NVFP4 and int8 weights: against arithmetic in plain Python, against comfy-kitchen, and every legal cut."""

import math
import struct
from pathlib import Path

import comfy_kitchen
import pytest
import torch
from safefiles import scalar, write

from h3dist.checkpoint import formats
from h3dist.checkpoint.file import TensorFile
from h3dist.checkpoint.formats import Int8Weight, PlainWeight, take
from h3dist.checkpoint.nvfp4 import WRITTEN, Nvfp4Weight, dense_by_kernel, swizzle, unswizzle
from h3dist.checkpoint.quantise import e2m1_codes, to_int8, to_nvfp4
from h3dist.checkpoint.slices import Slice
from h3dist.checkpoint.storage import Storage, storage_of
from h3dist.checkpoint.tiles import code_shape, scale_shape
from h3dist.errors import CheckpointError

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BYTES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
}


def random(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def stored(
    folder: Path, parts: dict[str, torch.Tensor], shape: tuple[int, int], **marker
) -> tuple[TensorFile, Storage]:
    """A file with one layer "w" of these parts, and how it lies."""
    tensors = {
        f"w.{name}": (
            BYTES[part.dtype],
            list(part.shape),
            part.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, part in parts.items()
    }
    file = TensorFile.open(write(folder / "w.safetensors", tensors))
    config = {"full_precision_matrix_mult": False} | marker
    return file, storage_of(shape, config, {name.removeprefix("w."): info for name, info in file.tensors.items()})


def nvfp4(folder: Path, rows: int, cols: int, seed: int = 0) -> tuple[TensorFile, Storage]:
    return stored(folder, to_nvfp4(random(rows, cols, seed)), (rows, cols), format="nvfp4")


# --- values


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = (-1) ** (byte >> 7), byte >> 3 & 15, byte & 7
    return sign * (mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def plain_dequantise(path: Path, rows: int, cols: int) -> list[list[float]]:
    """W from the file's bytes, by Python's own arithmetic, rounded to float32 after each product."""
    from safefiles import parse

    tensors, _ = parse(path)
    codes, scales = tensors["w.weight"][2], tensors["w.weight_scale"][2]
    (total,) = struct.unpack("<f", tensors["w.weight_scale_2"][2])
    packed = tensors["w.weight"][1][1]
    across = math.ceil(math.ceil(cols / 16) / 4)

    def value(row: int, col: int) -> float:
        byte = codes[row * packed + col // 2]
        code = byte >> 4 if col % 2 == 0 else byte & 15
        block = col // 16
        place = (row // 128 * across + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        size = f32(f32(e4m3(scales[place]) * total) * E2M1[code & 7])
        return -size if code & 8 else size

    return [[value(row, col) for col in range(cols)] for row in range(rows)]


@pytest.mark.parametrize("cols", [16, 48, 64, 80])
@pytest.mark.parametrize("rows", [1, 127, 128, 129])
def test_values_are_those_of_plain_python(tmp_path, rows, cols):
    file, storage = nvfp4(tmp_path, rows, cols, seed=rows * cols)
    weight = storage.read(file, "w")
    assert weight.shape == (rows, cols)
    assert weight.dense(torch.float32).tolist() == plain_dequantise(file.path, rows, cols)


@pytest.mark.parametrize(("rows", "cols"), [(128, 64), (100, 80), (33, 30), (384, 672), (1, 16), (300, 208), (16, 8)])
def test_values_are_comfy_kitchens(tmp_path, rows, cols):
    matrix = random(rows, cols, 3)
    qdata = comfy_kitchen.tensor.QuantizedTensor.from_float(matrix, "TensorCoreNVFP4Layout")
    codes, total, scales = qdata._qdata, qdata._params.scale, qdata._params.block_scale
    parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": total}
    file, storage = stored(tmp_path, parts, (rows, cols), format="nvfp4")
    with comfy_kitchen.use_backend("eager"):
        due = comfy_kitchen.dequantize_nvfp4(codes, total, scales, torch.float32)[:rows, :cols]
    weight = storage.read(file, "w")
    assert torch.equal(weight.dense(torch.float32), due)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(weight.dense(dtype), due.to(dtype)), "float32 first, one cast"
    mine = to_nvfp4(matrix)
    assert torch.equal(mine["weight"], codes)
    assert torch.equal(mine["weight_scale"].view(torch.uint8), scales.view(torch.uint8))
    assert mine["weight_scale_2"] == total


def test_ties_go_to_the_even_code():
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.25, -0.75, -5.0])
    assert e2m1_codes(edges).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 14]


def test_a_matrix_too_large_for_one_go_is_made_in_rows(tmp_path, monkeypatch):
    file, storage = nvfp4(tmp_path, 129, 80)
    weight = storage.read(file, "w")
    due = weight.dense(torch.bfloat16)
    asked = []
    monkeypatch.setattr(formats, "DENSE_ELEMENTS", 80 * 10)
    real = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: asked.append(self.shape) or real(self))
    assert torch.equal(weight.dense(torch.bfloat16), due)
    assert max(shape[0] for shape in asked) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "cols"), [(1344, 208), (33, 30), (256, 512)])
def test_cuda_gives_the_same_values(tmp_path, rows, cols, dtype):
    file, storage = nvfp4(tmp_path, rows, cols)
    weight = storage.read(file, "w")
    assert torch.equal(weight.to("cuda").dense(dtype).cpu(), weight.dense(dtype))


@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (208, 336), (112, 48), (113, 16), (250, 90), (32, 48), (128, 16)])
def test_a_kernel_that_writes_whole_blocks_of_threads_finds_room(tmp_path, rows, cols):
    file, storage = nvfp4(tmp_path, rows, cols)
    weight, given = storage.read(file, "w"), []

    def kernel(codes, global_scale, scales, dtype):
        given.append(codes)
        assert codes.numel() * 2 % WRITTEN == 0 and scales.shape[0] >= codes.shape[0]
        return comfy_kitchen.dequantize_nvfp4(codes, global_scale, scales, dtype)

    assert torch.equal(dense_by_kernel(weight, kernel, torch.float32), weight.dense(torch.float32))
    assert (given[0] is weight.codes) == (weight.codes.numel() * 2 % WRITTEN == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (208, 336), (112, 48)])
def test_on_a_gpu_what_lies_behind_a_dense_matrix_stays(tmp_path, rows, cols, dtype):
    """torch's allocator lays tensors side by side, and a matrix where one of its size has left."""
    file, storage = nvfp4(tmp_path, rows, cols)
    weight = storage.read(file, "w").to("cuda")
    size = weight.dense(dtype).untyped_storage().nbytes()
    torch.cuda.empty_cache()
    places = [torch.full((size,), 3, dtype=torch.uint8, device="cuda") for _ in range(8)]
    behind = places[1::2]
    del places
    made = [weight.dense(dtype) for _ in range(4)]
    assert all(bool((place == 3).all()) for place in behind)
    assert all(torch.equal(found, made[0]) for found in made)


def test_the_host_waits_for_copies_from_memory_that_torch_does_not_keep(tmp_path, monkeypatch):
    """Here torch pins nothing, so the codes are said to be; a CPU does not care how it copies."""
    file, storage = nvfp4(tmp_path, 33, 30)
    weight, copy, told = storage.read(file, "w"), torch.Tensor.to, {}

    def watched(part, device, non_blocking):
        told[part.data_ptr()] = non_blocking
        return copy(part, device)

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda part: part is weight.codes)
    monkeypatch.setattr(torch.Tensor, "to", watched)
    weight.to("cpu")
    assert told == {
        part.data_ptr(): part is weight.codes for part in (weight.codes, weight.scales, weight.global_scale)
    }


def test_swizzling_is_the_published_index(tmp_path):
    grid = torch.randint(0, 256, (300, 9), dtype=torch.uint8)
    tiles = swizzle(grid)
    flat = tiles.flatten()
    assert tiles.shape == (384, 12)
    for row, block in [(0, 0), (31, 3), (32, 0), (127, 8), (128, 4), (299, 8)]:
        place = (row // 128 * 3 + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        assert flat[place] == grid[row, block]
    assert flat.count_nonzero() == grid.count_nonzero()
    assert torch.equal(unswizzle(tiles, (300, 9 * 16)), grid)


# --- cuts

ROWS = [
    None,
    ((0, 300),),
    ((128, 256),),
    ((128, 256), (0, 128), (128, 256)),
    ((0, 128), (256, 300)),
    ((0, 17),),
    ((5, 200),),
    ((250, 300), (0, 3), (130, 131)),
    ((10, 20), (20, 20), (20, 40)),
    ((7, 8), (8, 9), (3, 4)),
    (),
]


def all_cuts(cols: int) -> list[tuple[int, int] | None]:
    starts = range(0, cols, 16)
    return [None] + [(start, stop) for start in starts for stop in (*starts, cols) if start <= stop]


def check_cut(file: TensorFile, storage: Storage, whole: Nvfp4Weight, dense: torch.Tensor, cut: Slice) -> None:
    due = take(dense, cut)
    before = file.bytes_read
    part = storage.read(file, "w", cut)
    assert file.bytes_read - before == storage.nbytes(cut), cut
    assert part.shape == tuple(due.shape)
    assert torch.equal(part.dense(torch.float32), due), cut
    sliced = whole.slice(cut)
    assert sliced.shape == part.shape
    assert torch.equal(sliced.codes, part.codes)
    assert torch.equal(sliced.scales, part.scales)
    assert part.codes.shape == code_shape(part.shape)
    assert part.scales.shape == scale_shape(part.shape)
    rows, cols = part.shape
    assert part.codes[rows:].count_nonzero() == 0, "padding rows are zero"
    assert part.scales.numel() == 0 or swizzle(unswizzle(part.scales, (rows, cols))).equal(part.scales)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("cols", [80, 72, 144])
def test_every_legal_cut_is_the_cut_of_the_dense_matrix(tmp_path, rows, cols):
    file, storage = nvfp4(tmp_path, 300, cols)
    whole = storage.read(file, "w")
    dense = whole.dense(torch.float32)
    for span in all_cuts(cols):
        check_cut(file, storage, whole, dense, Slice(rows=rows, cols=span))


def test_a_cut_of_a_cut(tmp_path):
    file, storage = nvfp4(tmp_path, 300, 208)
    whole = storage.read(file, "w")
    first, second = (
        Slice(rows=((37, 250),), cols=(16, 192)),
        Slice(rows=((100, 101), (3, 90)), cols=(80, 144)),
    )
    due = take(take(whole.dense(torch.float32), first), second)
    assert torch.equal(whole.slice(first).slice(second).dense(torch.float32), due)


def test_aligned_cuts_keep_their_tiles_as_they_lie(tmp_path):
    file, storage = nvfp4(tmp_path, 384, 192)
    tiles = file.read_bytes("w.weight_scale", row_bytes=3 * 512)
    part = storage.read(file, "w", Slice(rows=((128, 384),), cols=(64, 192)))
    assert torch.equal(part.scales.flatten(), tiles[1:, 512:].flatten())


@pytest.mark.parametrize("cols", [(8, 32), (0, 24), (1, 17), (64, 72)])
def test_a_cut_within_sixteen_columns_is_refused(tmp_path, cols):
    file, storage = nvfp4(tmp_path, 16, 80)
    whole = storage.read(file, "w")
    for attempt in (lambda: storage.read(file, "w", Slice(cols=cols)), lambda: whole.slice(Slice(cols=cols))):
        with pytest.raises(CheckpointError, match="nearest legal edges"):
            attempt()


def test_helpers_of_the_activations_are_cut_and_counted(tmp_path):
    parts = to_nvfp4(random(40, 80)) | {
        "input_scale": torch.tensor(0.25),
        "pre_quant_scale": (1 + torch.rand(80)).bfloat16(),
    }
    file, storage = stored(tmp_path, parts, (40, 80), format="nvfp4", full_precision_matrix_mult=True)
    cut = Slice(rows=((3, 9),), cols=(16, 48))
    part = storage.read(file, "w", cut)
    assert part.full_precision
    assert part.input_scale == 0.25
    assert torch.equal(part.pre_quant_scale, parts["pre_quant_scale"][16:48])
    assert file.bytes_read == storage.nbytes(cut) == 6 * 16 + 512 + 4 + 4 + 64
    again = storage.read(file, "w").slice(cut)
    assert torch.equal(again.pre_quant_scale, part.pre_quant_scale)
    assert again.input_scale == 0.25


def test_memory_is_what_is_stored(tmp_path):
    file, storage = nvfp4(tmp_path, 256, 128)
    weight = storage.read(file, "w")
    assert weight.nbytes == 256 * 64 + 256 * 8 + 4 == storage.nbytes()
    assert weight.to("cpu").nbytes == weight.nbytes
    assert weight.to("meta").codes.device.type == "meta"


# --- scales that cannot be


def spoiled(folder: Path, part: str, change) -> tuple[TensorFile, Storage]:
    parts = to_nvfp4(random(130, 80))
    change(parts[part] if parts[part].dtype == torch.float32 else parts[part].view(torch.uint8))
    return stored(folder, parts, (130, 80), format="nvfp4")


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -1.0])
def test_a_global_scale_that_cannot_be_is_refused(tmp_path, value):
    file, storage = spoiled(tmp_path, "weight_scale_2", lambda scale: scale.fill_(value))
    with pytest.raises(CheckpointError, match=r"w\.weight_scale_2 holds"):
        storage.read(file, "w")


SPOILED = [(0x7F, "NaN"), (0xFF, "NaN"), (0, "zero for 1 blocks"), (0x80, "zero for 1 blocks")]


@pytest.mark.parametrize(("byte", "words"), SPOILED)
def test_a_block_scale_that_cannot_be_is_refused(tmp_path, byte, words):
    def change(scales):
        scales.view(-1)[2 * 512 + 16] = byte  # row 129, block 0

    file, storage = spoiled(tmp_path, "weight_scale", change)
    with pytest.raises(CheckpointError, match=words):
        storage.read(file, "w")
    storage.read(file, "w", Slice(rows=((0, 129),)))  # a rank that does not keep it does not see it


def test_a_block_scale_may_be_negative(tmp_path):
    file, storage = spoiled(tmp_path, "weight_scale", lambda scales: scales.view(-1)[2 * 512 + 16].fill_(0xB8))
    assert storage.read(file, "w").dense(torch.float32).isfinite().all()


def test_blocks_of_zeros_may_have_a_scale_of_zero(tmp_path):
    matrix = random(130, 80)
    matrix[129, :16] = 0
    file, storage = stored(tmp_path, to_nvfp4(matrix), (130, 80), format="nvfp4")
    dense = storage.read(file, "w").dense(torch.float32)
    assert dense[129, :16].count_nonzero() == 0
    assert dense.isfinite().all()


def test_rubbish_in_the_padding_is_dropped(tmp_path):
    clean = to_nvfp4(random(130, 80))
    dirty = {name: part.clone() for name, part in clean.items()}
    dirty["weight_scale"].view(torch.uint8).view(-1)[-1] = 0x7F
    due = Nvfp4Weight(clean["weight"], clean["weight_scale"].view(torch.uint8), clean["weight_scale_2"], (130, 80))
    file, storage = stored(tmp_path, dirty, (130, 80), format="nvfp4")
    weight = storage.read(file, "w")
    assert torch.equal(weight.scales, due.scales)


# --- int8 and plain


@pytest.mark.parametrize("one", [True, False])
def test_int8_by_row_or_in_all(tmp_path, one):
    matrix = random(20, 24)
    parts = to_int8(matrix)
    if one:
        parts = {"weight": (matrix * 10).to(torch.int8), "weight_scale": torch.tensor(0.1)}
    file, storage = stored(tmp_path, parts, (20, 24), format="int8_tensorwise")
    weight = storage.read(file, "w")
    assert isinstance(weight, Int8Weight)
    due = parts["weight"].float() * parts["weight_scale"]
    assert torch.equal(weight.dense(torch.float32), due)
    assert torch.equal(weight.dense(torch.bfloat16), due.bfloat16())
    assert file.bytes_read == storage.nbytes()
    cut = Slice(rows=((13, 20), (2, 5)), cols=(3, 8))
    before = file.bytes_read
    assert torch.equal(storage.read(file, "w", cut).dense(torch.float32), take(due, cut))
    assert file.bytes_read - before == storage.nbytes(cut) == 50 + (4 if one else 40)
    assert torch.equal(weight.slice(cut).dense(torch.float32), take(due, cut))


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -2.0])
def test_an_int8_scale_that_cannot_be_is_refused(tmp_path, value):
    parts = to_int8(random(20, 24))
    parts["weight_scale"][7] = value
    file, storage = stored(tmp_path, parts, (20, 24), format="int8_tensorwise")
    with pytest.raises(CheckpointError, match=r"w\.weight_scale holds"):
        storage.read(file, "w")
    storage.read(file, "w", Slice(rows=((0, 7),)))


def test_plain_weights(tmp_path):
    matrix = random(20, 24).bfloat16()
    file, _ = stored(tmp_path, {"weight": matrix}, (20, 24), format="nvfp4")
    storage = storage_of((20, 24), None, {"weight": file.tensors["w.weight"]})
    cut = Slice(rows=((13, 20), (2, 5)), cols=(3, 8))
    part = storage.read(file, "w", cut)
    assert isinstance(part, PlainWeight)
    assert torch.equal(part.dense(torch.bfloat16), take(matrix, cut))
    assert torch.equal(storage.read(file, "w").slice(cut).tensor, part.tensor)
    assert file.bytes_read == storage.nbytes(cut) + storage.nbytes() == 100 + 960


def test_a_scalar_scale_may_be_a_vector_of_one(tmp_path):
    parts = to_nvfp4(random(16, 16))
    due, storage = stored(tmp_path, parts, (16, 16), format="nvfp4")
    dense = storage.read(due, "w").dense(torch.float32)
    parts["weight_scale_2"] = parts["weight_scale_2"].view(1)
    file, storage = stored(tmp_path, parts, (16, 16), format="nvfp4")
    assert storage.parts()["weight_scale_2"].fits(file.tensors["w.weight_scale_2"])
    assert torch.equal(storage.read(file, "w").dense(torch.float32), dense)
    assert scalar(1.0)[1] == []
