"""Blocks are read by threads ahead of whoever takes them: in order, no more than few at once, an error in its turn."""

import json
import mmap
import os
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import load_gpu
from benchmarks.random_files import write_denoiser
from h3dist.checkpoint.comfy import open_denoiser
from h3dist.checkpoint.readers import ahead
from h3dist.checkpoint.tiny import CURVE
from h3dist.errors import CheckpointError
from h3dist.model.offload import tensors_of
from h3dist.model.weights import load_denoiser, read_block

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("random") / "denoiser.safetensors"
    write_denoiser(found, replace(CURVE, layers=5))
    return found


def test_results_come_in_order_and_no_more_are_begun_than_threads_beyond_the_one_given_out():
    begun, gates = [], [threading.Event() for _ in range(6)]

    def job(number: int) -> int:
        begun.append(number)
        assert gates[number].wait(20)
        return number

    results = ahead((partial(job, number) for number in range(6)), threads=2)
    for number in range(6):
        for gate in gates[number : number + 2]:  # the next one may be done before this one is asked for
            gate.set()
        assert next(results) == number
        assert len(begun) <= number + 3
    assert next(results, None) is None and sorted(begun) == list(range(6))


def test_an_error_is_raised_in_its_turn_and_ends_the_reading():
    begun = []

    def job(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise CheckpointError("the second")
        return number

    results = ahead((partial(job, number) for number in range(9)), threads=2)
    assert next(results) == 0
    with pytest.raises(CheckpointError, match="the second"):
        next(results)
    assert max(begun) <= 3
    assert next(results, None) is None


def test_loaded_blocks_are_those_read_one_after_the_other_and_every_byte_is_counted(path):
    alone, loaded = open_denoiser(path), open_denoiser(path)
    share = load_gpu.share_of(alone, 2)
    blocks = load_denoiser(loaded, share, device=CPU, dtype=torch.float32).blocks
    before = loaded.file.bytes_read
    assert len(blocks) == 5
    for index, block in enumerate(blocks):
        parts = share.tp_heads, share.ffn, share.projected_heads
        wanted = read_block(alone, f"blocks.{index}", *parts, device=CPU, dtype=torch.float32)
        for (name, found), (_, due) in zip(tensors_of(block), tensors_of(wanted), strict=True):
            assert torch.equal(found, due), (index, name)
    others = (loaded.tensor_bytes(f"{name}.{part}") for name in PROJECTIONS for part in ("weight", "bias"))
    rest = sum(others) + sum(map(loaded.tensor_bytes, ("final_layer.norm.weight", "rope.inv_freq")))
    assert before == alone.file.bytes_read + rest


PROJECTIONS = ("video_patch_proj", "audio_patch_proj", "final_layer.video_out", "final_layer.audio_out")


def test_a_damaged_scale_is_found_by_the_thread_that_reads_it(path, tmp_path):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes())
    info = open_denoiser(path).tensors["blocks.3.mlp.fc1.weight_scale"]
    with broken.open("r+b") as file:
        file.seek(info.start)
        file.write(b"\x7f")
    dfile = open_denoiser(broken)
    with pytest.raises(CheckpointError, match=r"blocks\.3\.mlp\.fc1\.weight_scale holds NaN"):
        load_denoiser(dfile, load_gpu.share_of(dfile, 1), device=CPU, dtype=torch.float32)


def test_the_benchmark_of_a_cold_start_runs(tmp_path, capsys):
    out = tmp_path / "load.json"
    words = ["--device", "cpu", "--tiny", "--blocks", "2", "--folder", str(tmp_path), "--json", str(out)]
    assert load_gpu.main(words) == 0
    rows = {(row["name"], row["cold"]): row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 11 and all(row["rate"] > 0 for row in rows.values())
    held = [max(row["cached"] or 0 for row in rows.values() if row["cold"] == cold) for cold in (True, False)]
    assert held in ([0, 1], [0, 0], [1, 1]), "[0, 0]: the kernel does not tell; [1, 1]: a file system of memory alone"
    whole, half = (rows[f"load_denoiser, {name}", True] for name in ("all", "one of two tensor ranks"))
    assert 0.5 < half["bytes"] / whole["bytes"] < 0.75  # the linears' half, and small layers whole
    disk = max(rows[name, True]["rate"] for name in ("bare read", f"bare read, {load_gpu.STREAMS} streams"))
    assert whole["ratio"] == pytest.approx(whole["rate"] / disk)
    assert list(tmp_path.iterdir()) == [out], "the file is taken away again"
    assert "| load_denoiser, all | warm |" in capsys.readouterr().out


def test_the_kernel_tells_what_it_holds_of_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    assert load_gpu.cached(path) in (1, None)
    if load_gpu.drop(path) == 1:
        pytest.skip("a file system of memory alone")
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        os.pread(file.fileno(), 1, 8 * mmap.PAGESIZE)
    assert load_gpu.cached(path) in (1 / 64, None)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_blocks_come_to_a_gpu_as_they_lie_in_the_file(path, offload):
    dfile = open_denoiser(path)
    share, kept = load_gpu.share_of(dfile, 2), {"dtype": torch.bfloat16}
    wanted = load_denoiser(open_denoiser(path), share, device=CPU, **kept)
    for _ in range(5):  # pinned memory is used again, and must not be written while it is still copied from
        found = load_denoiser(dfile, share, device="cuda", offload=offload, **kept)
        for index in range(5):
            pairs = zip(tensors_of(found.blocks[index]), tensors_of(wanted.blocks[index]), strict=True)
            assert all(torch.equal(mine.cpu(), due) for (_, mine), (_, due) in pairs)
        assert torch.equal(found.heads.weight.cpu(), wanted.heads.weight)
