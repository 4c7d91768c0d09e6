"""A rank's slices: together the whole, each for the bytes that the header foretells, in both row orders."""

from itertools import pairwise
from math import prod

import pytest
import torch
from safefiles import edited

from h3dist.checkpoint import tiny
from h3dist.checkpoint.comfy import DenoiserFile, open_denoiser
from h3dist.checkpoint.quantise import to_nvfp4
from h3dist.checkpoint.shard import (
    Slice,
    fc1_slice,
    fc2_slice,
    out_slice,
    qkv_slice,
    rank_file_bytes,
    read_linear,
    read_tensor,
    shared_tensors,
    slice_bytes,
    text_tensors,
)
from h3dist.checkpoint.slices import Range
from h3dist.checkpoint.storage import Extras, Nvfp4
from h3dist.checkpoint.tiles import code_shape, scale_shape

HIDDEN, HEADS, HEAD_DIM, FFN = 5376, 56, 128, 14336  # the released denoiser's


def shares(count: int, parts: int, unit: int = 1) -> list[Range]:
    """`count` units in `parts` ranges, the larger ones first, times `unit`."""
    small, more = divmod(count, parts)
    edges = [0]
    for part in range(parts):
        edges.append(edges[-1] + small + (part < more))
    return [(start * unit, stop * unit) for start, stop in pairwise(edges)]


@pytest.fixture(scope="module", params=["full", "curve"])
def state(request, tmp_path_factory) -> DenoiserFile:
    return open_denoiser(tiny.write_tiny(tmp_path_factory.mktemp(request.param), request.param)["denoiser"])


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory) -> tuple[DenoiserFile, DenoiserFile]:
    """A file, and the same model with the rows of its fused projections head by head."""
    folder = tmp_path_factory.mktemp("order")
    bands = open_denoiser(tiny.write_tiny(folder)["denoiser"])
    dims = bands.dims

    def edit(tensors):
        for layer in [layer for layer in bands.linears if layer.endswith("qkv_proj")]:
            rows = bands.linear(layer).dense(torch.float32).view(3, dims.heads, dims.head_dim, dims.hidden)
            rows = rows.transpose(0, 1).reshape(3 * dims.inner, dims.hidden)
            if layer in bands.formats:  # values of NVFP4 quantise to themselves, and no block crosses a row
                for part, value in to_nvfp4(rows).items():
                    dtype, shape, _ = tensors[f"{layer}.{part}"]
                    data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    tensors[f"{layer}.{part}"] = (dtype, shape, data)
            else:
                data = rows.bfloat16().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                tensors[f"{layer}.weight"] = ("BF16", list(rows.shape), data)

    path = edited(bands.file.path, folder / "interleaved.safetensors", edit)
    return bands, open_denoiser(path, "interleaved")


def pieces(state: DenoiserFile, layer: str, cuts: list[Slice]) -> list[torch.Tensor]:
    """The dense matrices of some cuts, each held to the bytes that the header foretells."""
    found = []
    for cut in cuts:
        before = state.file.bytes_read
        found.append(read_linear(state, layer, cut).dense(torch.float32))
        assert state.file.bytes_read - before == slice_bytes(state, layer, cut)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 14])
@pytest.mark.parametrize("block", ["blocks.1", "token_refiner.blocks.0"])
def test_slices_of_all_ranks_are_the_whole(state, ranks, block):
    dims = state.dims
    heads, ffn = shares(dims.heads, ranks), shares(dims.ffn // 16, ranks, 16)

    def whole(name):
        return read_linear(state, f"{block}.{name}").dense(torch.float32)

    qkv = pieces(state, f"{block}.attn.qkv_proj", [qkv_slice(dims, part) for part in heads])
    bands = [torch.cat([piece.chunk(3)[band] for piece in qkv]) for band in range(3)]
    assert torch.equal(torch.cat(bands), whole("attn.qkv_proj"))
    out = pieces(state, f"{block}.attn.out_proj", [out_slice(dims, part) for part in heads])
    assert torch.equal(torch.cat(out, dim=1), whole("attn.out_proj"))
    fc1 = pieces(state, f"{block}.mlp.fc1", [fc1_slice(dims, part) for part in ffn])
    halves = [torch.cat([piece.chunk(2)[half] for piece in fc1]) for half in range(2)]
    assert torch.equal(torch.cat(halves), whole("mlp.fc1"))
    fc2 = pieces(state, f"{block}.mlp.fc2", [fc2_slice(dims, part) for part in ffn])
    assert torch.equal(torch.cat(fc2, dim=1), whole("mlp.fc2"))


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("layer", ["blocks.2.attn.qkv_proj", "token_refiner.blocks.1.attn.qkv_proj"])
def test_interleaved_rows_come_out_in_bands(interleaved, layer, ranks):
    bands, mixed = interleaved
    assert not torch.equal(
        read_linear(mixed, layer).dense(torch.float32), read_linear(bands, layer).dense(torch.float32)
    )
    for heads in shares(bands.dims.heads, ranks):
        (due,) = pieces(bands, layer, [qkv_slice(bands.dims, heads)])
        (found,) = pieces(mixed, layer, [qkv_slice(mixed.dims, heads, mixed.qkv_order)])
        assert torch.equal(found, due)


@pytest.mark.parametrize("ranks", [1, 2, 6, 8])
def test_a_rank_asks_what_was_foretold(state, ranks):
    dims = state.dims
    heads, ffn = shares(dims.heads, ranks), shares(dims.ffn // 16, ranks, 16)
    for index in range(ranks):
        file = open_denoiser(state.file.path)
        cuts = {
            "attn.qkv_proj": qkv_slice(dims, heads[index]),
            "attn.out_proj": out_slice(dims, heads[index]),
            "mlp.fc1": fc1_slice(dims, ffn[index]),
            "mlp.fc2": fc2_slice(dims, ffn[index]),
        }
        for block in range(dims.layers):
            for name, cut in cuts.items():
                read_linear(file, f"blocks.{block}.{name}", cut)
        for name in shared_tensors(file) + (text_tensors(file) if index == 0 else ()):
            read_tensor(file, name)
        foretold = rank_file_bytes(file, heads[index], ffn[index], refiner=index == 0)
        assert file.file.bytes_read == foretold


def test_one_rank_asks_for_every_tensor_once(state):
    asked = rank_file_bytes(state, (0, state.dims.heads), (0, state.dims.ffn), refiner=True)
    markers = sum(info.nbytes for name, info in state.tensors.items() if name.endswith("comfy_quant"))
    assert asked == sum(info.nbytes for info in state.tensors.values()) - markers
    split = shared_tensors(state) + text_tensors(state)
    assert len(split) + 4 * state.dims.layers == len(state.table)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_at_the_released_size_a_rank_asks_for_what_it_keeps(ranks):
    """Its cuts fall on whole tiles: the bytes asked are the codes, scales and scalar that stay in memory."""
    heads, ffn = shares(HEADS, ranks), shares(FFN // 128, ranks, 128)
    inner = HEADS * HEAD_DIM
    for (h0, h1), (f0, f1) in zip(heads, ffn, strict=True):
        rows = tuple((band * inner + h0 * HEAD_DIM, band * inner + h1 * HEAD_DIM) for band in range(3))
        cuts = [
            ((3 * inner, HIDDEN), Slice(rows=rows)),
            ((HIDDEN, inner), Slice(cols=(h0 * HEAD_DIM, h1 * HEAD_DIM))),
            ((2 * FFN, HIDDEN), Slice(rows=((f0, f1), (FFN + f0, FFN + f1)))),
            ((HIDDEN, FFN), Slice(cols=(f0, f1))),
        ]
        for shape, cut in cuts:
            kept = prod(code_shape(cut.shape(shape))) + prod(scale_shape(cut.shape(shape))) + 4
            assert Nvfp4(shape, False, Extras(False, None)).nbytes(cut) == kept


def test_slices_of_heads_and_of_the_mlp():
    """The cuts that `qkv_slice` and its kin make are the ones that the arithmetic above takes for granted."""
    dims = tiny.FULL
    assert qkv_slice(dims, (3, 5)) == Slice(rows=((96, 160), (544, 608), (992, 1056)))
    assert qkv_slice(dims, (3, 5), "interleaved").rows == (
        (288, 320), (384, 416), (320, 352), (416, 448), (352, 384), (448, 480),
    )  # fmt: skip
    assert out_slice(dims, (3, 5)) == Slice(cols=(96, 160))
    assert fc1_slice(dims, (16, 48)) == Slice(rows=((16, 48), (352, 384)))
    assert fc2_slice(dims, (16, 48)) == Slice(cols=(16, 48))
