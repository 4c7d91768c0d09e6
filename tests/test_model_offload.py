"""Blocks that live in the host's memory: the same to the bit, in any order, format and number."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fp4 import nvfp4

from h3dist.bench.spec import Spec
from h3dist.bench.steps import denoiser_of, random_weights, velocity
from h3dist.checkpoint.formats import PlainWeight
from h3dist.comm import Comm
from h3dist.model import offload
from h3dist.model.narrow import narrowed
from h3dist.model.offload import ALIGNED, LEAST, OffloadedBlocks, lengths, pack, tensors_of
from h3dist.model.weights import BlockWeights
from h3dist.plan import Layout
from h3dist.topology import Ranks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def blocks(count: int) -> list[BlockWeights]:
    """Of several formats, one with a scale for its input: their bytes differ."""
    made = []
    for index in range(count):
        norms = [torch.randn(size).to(torch.bfloat16) for size in (32, 32, 7, 7)]
        linears: list[Any] = [nvfp4(torch.randn(shape)) for shape in ((48, 32), (32, 16), (64, 32), (32, 32))]
        linears[1] = PlainWeight(torch.randn(32, 16)) if index % 2 else linears[1]
        linears[2] = narrowed(linears[2], "fp8", torch.float32) if index % 3 == 0 else linears[2]
        linears[3] = replace(linears[3], pre_quant_scale=torch.rand(32)) if index == 1 else linears[3]
        made.append(BlockWeights(*norms, *linears))
    return made


def same(found: BlockWeights, wanted: BlockWeights) -> None:
    there, here = dict(tensors_of(found)), dict(tensors_of(wanted))
    assert there.keys() == here.keys()
    for path, tensor in here.items():
        assert there[path].dtype == tensor.dtype
        found_bytes, bytes_ = (x.cpu().reshape(-1).view(torch.uint8) for x in (there[path], tensor))
        assert torch.equal(found_bytes, bytes_), path
    assert found.qkv.shape == wanted.qkv.shape and type(found.fc1) is type(wanted.fc1)
    torch.testing.assert_close(found.fc2.dense(torch.float32).cpu(), wanted.fc2.dense(torch.float32), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("least", [LEAST, ALIGNED])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_block_comes_as_it_was(device: str, count: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several steps, for an odd number of blocks too; in one run of bytes and in several; and out of order."""
    monkeypatch.setattr(offload, "LEAST", least)
    wanted = blocks(count)
    offloaded = OffloadedBlocks(iter(wanted), torch.device(device))
    assert len(offloaded) == count
    sizes = [pack(block, pinned=False).size for block in wanted]
    assert (offloaded.host_bytes, offloaded.device_bytes) == (sum(sizes), 2 * max(sizes))
    for index in [*range(count)] * 3 + [count - 1, 0, 0, count // 2]:
        same(offloaded[index], wanted[index])
    with pytest.raises(IndexError):
        offloaded[count]


def test_a_block_is_good_until_the_next_one_is_asked_for() -> None:
    wanted = blocks(3)
    offloaded = OffloadedBlocks(wanted, torch.device("cpu"))
    first, second = offloaded[0], offloaded[1]  # the second's copy brought the third in the first's place
    same(second, wanted[1])
    assert not torch.equal(first.norm1, wanted[0].norm1) and torch.equal(first.norm1, wanted[2].norm1)


def test_a_block_is_runs_of_powers_of_two_and_a_rest_so_that_little_pinned_memory_is_wasted() -> None:
    block = 216_760_320  # bytes of the released model's: torch would make 256 MiB of it
    assert lengths(block) == [128 << 20, 64 << 20, 8 << 20, block - (200 << 20)]
    assert sum(1 << (length - 1).bit_length() for length in lengths(block)) < 1.01 * block
    for size in (0, 1, LEAST, LEAST + 1, 3 * LEAST, 1 << 30):
        assert sum(lengths(size)) == size and all(length > 0 for length in lengths(size))


def test_a_block_is_its_bytes_alone_and_the_original_goes() -> None:
    block = blocks(1)[0]
    packed = pack(block, pinned=False)
    sizes = [tensor.nbytes for _, tensor in tensors_of(block)]
    assert packed.size == sum(-(-size // ALIGNED) * ALIGNED for size in sizes)
    assert all(tensor.is_meta for _, tensor in tensors_of(packed.block))


def test_a_denoiser_gives_the_same_from_there() -> None:
    spec = Spec(("64x64x5",), size="small", blocks=3, text_rows=7)
    with Comm.connect(Ranks(), Layout(), torch.device("cpu")) as comm:
        plan = spec.plan("64x64x5", Layout(), dtype="float32", capability=None, steps=1)
        weights = random_weights(plan, 0, torch.device("cpu"))
        away = replace(weights, blocks=OffloadedBlocks(weights.blocks, torch.device("cpu")))
        found = [velocity(denoiser_of(each, plan, comm), plan) for each in (weights, away)]
    assert torch.equal(*found)
