"""Rank variables, cores and GPUs: what the environment says, read once and checked."""

import os
import subprocess
import sys

import pytest

from h3dist.errors import ConfigError
from h3dist.topology import (
    Device,
    Ranks,
    auto_world,
    cores,
    devices,
    free_host_memory,
    read_ranks,
    select_visible,
    threads_per_rank,
)

GIB = 1 << 30
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def gpu(index, uuid, slices=()):
    return Device(index, "NVIDIA H200", 139 * GIB, 138 * GIB, (9, 0), uuid, slices)


FOUR = tuple(gpu(index, f"GPU-{name}00-1111") for index, name in enumerate(("aa", "ab", "bc", "cd")))
SPLIT = (
    gpu(0, "GPU-aa", (gpu(0, "MIG-11"), gpu(0, "MIG-12"))),
    gpu(1, "GPU-bb"),
)


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,3", [2, 3]),
        ("3, 1", [3, 1]),
        ("-1", []),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("0,0", []),
        ("1,0,1", []),
        ("GPU-bc00-1111,0", [2, 0]),
        ("GPU-cd", [3]),
        ("GPU-a", []),  # fits two
        ("GPU-ab,1", []),  # one device by two names
        ("none", []),
    ],
)
def test_visible_devices_follow_cuda(setting, shown):
    assert [device.index for device in select_visible(FOUR, setting)] == shown


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("MIG-12", ["MIG-12"]),
        ("MIG-12,MIG-11", ["MIG-12"]),  # a process sees one slice
        ("MIG-1", []),
        ("0", ["MIG-11"]),
        ("1,MIG-11", ["GPU-bb", "MIG-11"]),
        (None, ["MIG-11"]),
    ],
)
def test_visible_mig_slices(setting, shown):
    assert [device.uuid for device in select_visible(SPLIT, setting)] == shown


def test_no_driver_is_no_device_and_no_torch():
    code = "import sys, h3dist.topology as t; t.devices(); t.read_ranks({}); t.cores(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_devices_agree_with_each_other():
    found = devices()  # none on a machine without a driver
    assert [device.index for device in found] == list(range(len(found)))
    assert all(0 < device.memory_free <= device.memory_total for device in found)


def test_auto_world_counts_visible_gpus(monkeypatch):
    monkeypatch.setattr("h3dist.topology.gpus.devices", lambda: FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert (auto_world("cuda"), auto_world("auto"), auto_world("cpu")) == (2, 2, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert auto_world("auto") == 1


def test_ranks():
    assert read_ranks({}) == Ranks(0, 0, 1, 1, rendezvous=False, elastic=False)
    assert read_ranks(TORCHRUN) == Ranks(3, 1, 4, 2, rendezvous=True, elastic=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "x"}, "RANK='x'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"RANK": "4"}, "RANK=4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
    ],
)
def test_bad_rank_variables_are_refused(change, named):
    environ = {key: value for key, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        read_ranks(environ)


def test_cores_obey_the_containers_quota(tmp_path):
    quota = tmp_path / "cpu.max"
    everything = cores(tmp_path / "absent")
    assert everything >= 1
    quota.write_text("max 100000\n")
    assert cores(quota) == everything
    quota.write_text("100000 100000\n")
    assert cores(quota) == 1
    quota.write_text("50000 100000\n")
    assert cores(quota) == 1


def test_free_host_memory_obeys_the_containers_limit(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       4000 kB\nMemAvailable:   2000 kB\n")
    assert free_host_memory(meminfo, tmp_path) == 2000 * 1024
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 300000\n")
    for limit, free in (("max", 2000 * 1024), ("1000000", 400_000), ("10000000", 2000 * 1024), ("1", 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert free_host_memory(meminfo, tmp_path) == free
    assert 0 < free_host_memory() < 1 << 50


def test_threads_per_rank():
    assert threads_per_rank("auto", 10**6) == 1
    assert threads_per_rank("auto", 1) == cores()
    assert threads_per_rank("3", 8) == 3
    for wrong in ("0", "two", "-1", "1.5"):
        with pytest.raises(ConfigError, match=r"runtime\.threads"):
            threads_per_rank(wrong, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [None, "", "0", "-1", "0,0", "0,99", "99", "{uuid}", "{uuid:.12}", "none"])
def test_cuda_shows_the_devices_that_we_expect(setting):
    """What a fresh process with that CUDA_VISIBLE_DEVICES sees, by NVML and by torch."""
    code = (
        "import torch; from h3dist.topology import visible_devices; "
        "print([device.uuid for device in visible_devices()], "
        "['GPU-' + str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())])"
    )
    environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    if setting is not None:
        environ["CUDA_VISIBLE_DEVICES"] = setting.format(uuid=devices()[0].uuid)
    said = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True).stdout
    ours, cuda = said.strip().removesuffix("]").split("] [")
    assert ours.removeprefix("[") == cuda
