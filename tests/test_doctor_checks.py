"""What the doctor makes of machines, settings, packages and probes: every trap is a finding with its remedy."""

import json
import re
from dataclasses import replace

import pytest
import torch

from h3dist.doctor.children import Ended
from h3dist.doctor.copies import TIMES
from h3dist.doctor.copies import check_copies as copied
from h3dist.doctor.environment import check_environment, settings
from h3dist.doctor.exchange import moved_wrong, probe_plan
from h3dist.doctor.finding import Finding, exit_code
from h3dist.doctor.machine import check_gpus, check_host, check_links
from h3dist.doctor.probes import check_copies, check_exchange, seen_ways
from h3dist.doctor.software import check_packages, check_torch, runs_on
from h3dist.doctor.table import matrix
from h3dist.model.exchange import Alone
from h3dist.topology import load_topology, replay
from tests.topologies import FOLDER, MIB, machines, recording

MACHINES = machines()


def fixture(name):
    return load_topology(FOLDER / f"{name}.json")


def told(findings, level=None):
    """One text of all findings of a level, or of all."""
    return "\n".join(f"{f.level} {f.check}: {f.what} | {f.remedy}" for f in findings if level in (None, f.level))


def test_exit_codes():
    of = [Finding("x", level, "what", "remedy") for level in ("ok", "note", "warning", "error")]
    assert [exit_code(of[:n]) for n in range(5)] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("level", ["warning", "error"])
def test_no_problem_without_a_remedy(level):
    with pytest.raises(AssertionError):
        Finding("x", level, "what")


# GPUs and what is visible of them.


@pytest.mark.parametrize(
    ("name", "setting", "device", "level", "words"),
    [
        ("h200-x4", None, "auto", "ok", "4 of 4 GPUs visible: NVIDIA H200; driver 580"),
        ("h200-x4", "3,1", "auto", "ok", "2 of 4 GPUs visible"),
        ("h200-x4", "GPU-", "auto", "warning", "hides every GPU"),
        ("h200-x4", "", "auto", "warning", "CUDA_VISIBLE_DEVICES= hides every GPU"),
        ("h200-x4", "-1", "auto", "warning", "hides every GPU"),
        ("h200-x4", "-1", "cuda", "error", "hides every GPU"),
        ("h200-x4", "0,0", "auto", "warning", "hides every GPU"),
        ("h200-x4", "0,9,1", "auto", "warning", "shows 1 of 4 GPUs: an entry that names none hides all after it"),
        ("h200-x4", "0", "cpu", "ok", "runtime.device=cpu"),
        ("h200-mig", None, "auto", "note", "a MIG slice: a process sees one"),
        ("gb10-x1", None, "auto", "note", "GPU and host share one memory"),
        ("no-gpu", None, "auto", "note", "NVML Shared Library Not Found; runs are on the processor"),
        ("no-gpu", None, "cuda", "error", "NVML Shared Library Not Found, and runtime.device=cuda"),
    ],
)
def test_visible_gpus(name, setting, device, level, words):
    assert words in told(check_gpus(fixture(name), setting, device), level)


def test_a_driver_that_does_not_start_is_a_warning():
    broken = replace(fixture("no-gpu"), absence="RM has detected an NVML/RM version mismatch.")
    assert "version mismatch" in told(check_gpus(broken, None, "auto"), "warning")


def changed(name, **devices):
    """The machine with fields of devices changed: gpu1={"name": ...}."""
    machine = fixture(name)
    made = tuple(replace(d, **devices.get(f"gpu{d.index}", {})) for d in machine.devices)
    return replace(machine, devices=made)


def test_gpus_that_differ():
    findings = told(check_gpus(changed("h200-x2", gpu1={"name": "NVIDIA H100"}), None, "auto"), "warning")
    assert "the GPUs differ (NVIDIA H100, NVIDIA H200)" in findings and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in findings


def test_memory_that_others_hold_and_that_differs():
    total = fixture("h200-x2").devices[1].memory_total
    findings = told(check_gpus(changed("h200-x2", gpu1={"memory_free": total // 2}), None, "auto"), "warning")
    assert "GPU 1: 50% of its 140 GiB is held by other programs" in findings
    assert "free memory differs, in GiB: GPU 0 139.6, GPU 1 70.2" in findings
    assert told(check_gpus(fixture("h200-x2"), None, "auto"), "warning") == ""


def test_memory_that_one_pool_shares_is_not_held_by_others():
    low = changed("gb10-x1", gpu0={"memory_free": 1 << 30})
    assert told(check_gpus(low, None, "auto"), "warning") == ""


# Links and transport.


def test_nvlink_that_programs_may_not_use():
    values = recording(*MACHINES["h200-x2"])
    for pair in ("gpu0 gpu1 2", "gpu1 gpu0 2"):
        values["nvml"]["nvmlDeviceGetP2PStatus"][pair] = 5
    findings = told(check_links(replay(json.loads(json.dumps(values))), {}), "error")
    assert "18 NVLinks are up, but programs may not use them" in findings and "nvidia-fabricmanager" in findings
    assert told(check_links(fixture("h200-x2"), {}), "error") == ""


def test_narrow_slots():
    assert "GPU 1: PCIe generation 5 with 8 lanes" in told(
        check_links(changed("rtxpro6000-node-x2", gpu1={"pcie_width": 8}), {}), "note"
    )
    assert told(check_links(changed("h200-x2", gpu1={"pcie_width": 8}), {}), "note") == ""  # NVLink carries all


@pytest.mark.parametrize(
    ("name", "environ", "level", "words"),
    [
        ("h200-x8", {}, "ok", "predicted: P2P/CUMEM for 28 pairs"),
        ("rtxpro6000-sys-x2", {}, "ok", "predicted: P2P/CUMEM for 1 pair"),
        ("rtxpro6000-node-x4", {}, "note", "SHM for 6 pairs.*allows P2P for 6 of the pairs.*NCCL_P2P_LEVEL=SYS"),
        ("rtx3090-pairs-x4", {}, "note", "SHM for 4 pairs, P2P/CUMEM for 2"),
        ("h200-x2", {"NCCL_P2P_DISABLE": "1"}, "note", r"SHM for 1 pair \(NCCL_P2P_DISABLE=1\)"),
        ("h200-x2", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "warning", "NET for 1 pair"),
    ],
)
def test_transport(name, environ, level, words):
    assert re.search(words, told(check_links(fixture(name), environ), level))


def test_p2p_is_not_advised_where_the_driver_forbids_it():
    assert "NCCL_P2P_LEVEL=SYS" not in told(check_links(fixture("rtx3090-pairs-x4"), {}))


def test_one_gpu_has_no_links():
    assert list(check_links(fixture("h200-x1"), {})) == []


# The host.


@pytest.mark.parametrize(
    ("shm", "free", "gpus", "level", "words"),
    [
        (0, 0, 2, "error", "there is no /dev/shm: NCCL cannot start"),
        (64 * MIB, 64 * MIB, 2, "warning", "has 64 MiB, 64 free: the default of a container"),
        (64 * MIB, 64 * MIB, 1, "note", "one rank needs none"),
        (256 * MIB, 256 * MIB, 8, "warning", "8 GPUs without P2P take up to 560"),
        (1024 * MIB, 5 * MIB, 2, "warning", "has 1024 MiB, 5 free; 2 GPUs.*nccl-"),
        (1024 * MIB, 1024 * MIB, 8, "ok", "has 1024 MiB"),
    ],
)
def test_shared_memory(shm, free, gpus, level, words):
    machine = replace(fixture("h200-x8"), shm_bytes=shm, shm_free=free)
    assert re.search(words, told(check_host(machine, gpus), level))


def test_a_containers_memory():
    tight = replace(fixture("h200-x8"), container_memory_limit=8 << 30, host_memory_free=7 << 30)
    findings = told(check_host(tight, 8), "warning")
    assert "8.0 in this container, 7.0 free; 8 ranks take about 2 each" in findings and "--memory" in findings
    assert told(check_host(tight, 2), "warning") == ""


# Settings.


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "warning", "no GPU reaches another's memory"),
        ({"NCCL_P2P_DISABLE": "0"}, "warning", ""),
        ({"NCCL_P2P_LEVEL": "NODE"}, "warning", "NCCL knows no such level"),
        ({"NCCL_P2P_LEVEL": "SYS"}, "warning", ""),
        ({"NCCL_SHM_DISABLE": "1"}, "warning", "talk over the network"),
        ({"NCCL_CUMEM_ENABLE": "0"}, "note", "older IPC"),
        ({"NCCL_DEBUG": "INFO"}, "note", "prints much"),
        ({"NCCL_DEBUG": "WARN"}, "note", ""),
        ({"NCCL_ALGO": "Ring"}, "warning", "may not choose its algorithm"),
        ({"NCCL_PROTO": "LL"}, "warning", "may not choose its protocol"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "note", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warning", "does not end collectives that hang"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "warning", "waits for every single collective"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warning", "waits for every single kernel"),
        ({"CUDA_MODULE_LOADING": "EAGER"}, "note", "loaded at the start"),
        (
            {"GLOO_SOCKET_IFNAME": "eth9"},
            "error",
            "eth9 names no network interface; here are lo, eth0",
        ),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "error", "names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "error", ""),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "error", "names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "error", ""),
        ({"NCCL_SOCKET_IFNAME": "ib,eth"}, "error", ""),
        ({"OTHER": "1"}, "ok", "nothing is set"),
        ({"CUDA_VISIBLE_DEVICES": "0", "HOME": "/"}, "ok", "set: CUDA_VISIBLE_DEVICES=0 |"),
    ],
)
def test_environment(environ, level, words):
    found = told(check_environment(environ, ["lo", "eth0"]), level)
    assert words in found if words else found == ""


def test_nccls_own_files_count_below_the_environment(tmp_path):
    user, system = tmp_path / "user", tmp_path / "system"
    user.write_text("# NCCL_DEBUG=INFO\nNCCL_P2P_DISABLE = 1\nNCCL_ALGO=Ring\n")
    system.write_text("NCCL_ALGO=Tree\nNCCL_PROTO=LL\n")
    merged = settings({"NCCL_PROTO": "Simple"}, (user, system, tmp_path / "absent"))
    assert merged == {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


# Software.


def test_packages_as_installed_here():
    findings = list(check_packages())
    assert told(findings, "error") == "" and "torch 2." in told(findings, "ok")


def test_packages_that_are_missing_or_of_another_version():
    findings = told(check_packages(["torch>=99", "no-such-package-h3>=1", "numpy>=1", "x>=1; extra == 'more'"]))
    assert "warning packages: torch 2." in findings and "torch>=99 is required | pip install 'torch>=99'" in findings
    assert "error packages: no-such-package-h3 is not installed" in findings
    assert "1 of 3 packages as required" in findings and "not installed: more" in findings


TORCH = {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.29.3", "cudnn": 91900}
TORCH |= {"archs": ["sm_90", "sm_100", "sm_120"], "available": True, "devices": 2}
CPU_BUILD = {"torch": "2.13.0+cpu", "cuda": None, "nccl": None, "cudnn": None, "archs": []}
CPU_BUILD |= {"available": False, "devices": 0}


@pytest.mark.parametrize(
    ("name", "facts", "level", "words"),
    [
        ("h200-x2", TORCH, "ok", "CUDA 13.0, NCCL 2.29.3"),
        ("h200-x2", CPU_BUILD, "error", "built without CUDA, and there are GPUs"),
        ("no-gpu", CPU_BUILD, "ok", "built without CUDA"),
        ("h200-x2", TORCH | {"available": False}, "error", "fabricmanager"),
        ("h200-x4", TORCH, "warning", "finds 2 GPUs where 4 should be visible"),
        (
            "rtxpro6000-node-x2",
            TORCH | {"archs": ["sm_80", "sm_90"]},
            "error",
            "no kernels for compute capability 12.0",
        ),
    ],
)
def test_torch(name, facts, level, words):
    assert words in told(check_torch(facts, fixture(name), "auto"), level)


def test_a_driver_too_old_for_torch():
    old = replace(fixture("h200-x2"), cuda_driver=12040, driver="550.54")
    found = told(check_torch(TORCH | {"available": False}, old, "auto"), "error")
    assert "driver 550.54 is too old for CUDA 13.0" in found


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (["sm_90"], (9, 0), True),
        (["sm_120"], (12, 1), True),  # GB10 on RTX 50's kernels
        (["sm_100"], (12, 0), False),
        (["sm_86"], (8, 0), False),
        (["sm_80"], (8, 6), True),
        (["sm_90a"], (9, 0), True),
        (["sm_120a"], (12, 1), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["compute_90a"], (12, 0), False),
        ([], (9, 0), False),
    ],
)
def test_kernels_that_run(archs, capability, runs):
    assert runs_on(archs, capability) is runs


# Copies and exchange, as their children told them.


def of_copies(*said, code=0, stuck=False):
    return told(check_copies(Ended(code, said, "", stuck), 60))


def test_copies_that_arrive():
    rates = of_copies(
        {"device": 0, "right": True}, {"pair": [0, 1], "wrong": 0, "zero": False, "size": 9, "gb_s": 50.0}
    )
    assert rates == "ok copies: 1 ways between GPUs copied and compared: 50.0 to 50.0 GB/s | "
    assert "no second one" in of_copies({"device": 0, "right": True})


def test_a_gpu_that_computes_wrong_results():
    assert "error copies: GPU 3 computes wrong results" in of_copies({"device": 3, "right": False})


def test_copies_that_never_started_or_cannot_be_killed():
    assert "did not start" in of_copies(code=None)
    hung = of_copies({"begin": [2]}, code=None, stuck=True)
    assert "GPU 2: it hangs inside the driver and cannot even be killed" in hung and "reset the GPU" in hung


class Broken:
    """A copy that is right from 0 to 1, and broken in one way from 1 to 0."""

    def __init__(self, how):
        self.how, self.done = how, 0

    def __call__(self, source, into):
        self.done += 1
        good = self.done <= 1 + TIMES or self.how == "well"
        if not good and self.how == "raise":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        if not good and self.how == "full":
            raise torch.OutOfMemoryError("no memory")
        if good or self.how != "nothing":
            into.copy_(source)
        if not good and self.how == "flip":
            into[7] ^= 255
        if not good and self.how == "zeros":
            into.zero_()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("zeros", "error copies: from GPU 1 to GPU 0: zeros arrive, without any error"),
        ("nothing", "error copies: from GPU 1 to GPU 0: zeros arrive, without any error"),
        ("flip", "error copies: from GPU 1 to GPU 0: 1 of 1048576 bytes arrive wrong, without any error"),
        ("raise", "error copies: from GPU 1 to GPU 0: CUDA error: an illegal memory access was encountered |"),
        ("full", "warning copies: from GPU 1 to GPU 0: no memory left to try it"),
        ("well", "ok copies: 2 ways between GPUs copied and compared"),
    ],
)
def test_the_real_check_of_copies(how, words):
    """A copy that does nothing must not pass for one whose memory still holds what came before."""
    said = tuple(copied([torch.device("cpu")] * 2, Broken(how)))
    found = told(check_copies(Ended(0, said, ""), 60))
    assert words in found and "GPU 0 to GPU 1" not in found
    assert ("NCCL_P2P_DISABLE=1" in found) == (how in ("zeros", "nothing", "flip"))


def keep(saying, said):
    for line in saying:
        said.append(line)


def test_a_copy_is_announced_before_it_begins():
    def hang(source, into):
        raise KeyboardInterrupt

    saying, said = copied([torch.device("cpu")] * 2, hang), []
    with pytest.raises(KeyboardInterrupt):
        keep(saying, said)
    assert said[-1] == {"begin": [0, 1]}


class Corrupt(Alone):
    """An exchange that spoils one element on one of its ways."""

    def __init__(self, way):
        self.way = way

    def _spoil(self, way, x):
        x = x.clone()
        if way == self.way:
            x.view(-1)[-1] += 1
        return x

    def to_heads(self, q_gHD, k_gHD, v_gHD):
        return q_gHD, k_gHD, self._spoil("heads", v_gHD)

    def to_rows(self, o_ShD):
        return self._spoil("rows", o_ShD)

    def gather_outputs(self, out_sO):
        return self._spoil("outputs", out_sO)


@pytest.mark.parametrize(("way", "wrong"), [("none", 0), ("heads", 1), ("rows", 1), ("outputs", 1)])
def test_the_exchanges_check_sees_one_wrong_element(way, wrong):
    plan = probe_plan(1, "cpu")
    assert moved_wrong(Corrupt(way), plan, 0, torch.device("cpu"), first=3) == wrong


def test_the_gpu_plan_of_the_exchange_moves_megabytes():
    plan = probe_plan(8, "cuda")
    assert plan.layout.world == 8 and plan.dims.heads == 56
    assert all(share.sent["heads.to"] > 10 * MIB for share in plan.shares)


def rank(code=0, wrong=0, words=""):
    return Ended(code, ({"wrong": wrong, "seconds": 0.002},) if code == 0 else (), words)


@pytest.mark.parametrize(
    ("ended", "again", "backend", "level", "words"),
    [
        ([rank(), rank()], None, "NCCL", "ok", "every byte of an all-to-all right, in 2.0 ms, seen to go by P2P/CUMEM"),
        (
            [rank(), rank(wrong=7)],
            [rank(), rank()],
            "NCCL",
            "error",
            "7 elements .* wrong at rank 1.*without P2P it works",
        ),
        (
            [rank(None), rank(None)],
            [rank(), rank()],
            "NCCL",
            "error",
            "no answer .*60 s; without P2P.*P2P_DISABLE=1",
        ),
        (
            [rank(None), rank(1, words="NCCL error 3")],
            None,
            "NCCL",
            "error",
            "rank 1: failed: NCCL error 3.*DEBUG=INFO",
        ),
        ([rank(None)] * 2, [rank(None)] * 2, "NCCL", "error", "and without P2P too"),
        ([rank(None)] * 2, None, "gloo", "error", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_exchange(ended, again, backend, level, words):
    found = check_exchange(ended, again, 60, backend, ("P2P/CUMEM",))
    assert found.level == level and re.search(words, f"{found.what} {found.remedy}")


def test_the_transports_are_read_from_nccls_logs(tmp_path):
    line = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {}\n"
    (tmp_path / "nccl.1").write_text(line.format("P2P/CUMEM/read") * 2 + "NCCL INFO via nothing\n")
    (tmp_path / "nccl.2").write_text(line.format("SHM/direct/direct") + line.format("NET/Socket/0"))
    assert seen_ways(tmp_path) == ("NET/Socket", "P2P/CUMEM", "SHM")


# The matrix.


def test_the_matrix():
    lines = matrix(fixture("rtx3090-pairs-x4")).splitlines()
    assert lines[0].split() == ["GPU0", "GPU1", "GPU2", "GPU3", "NUMA", "PCIe", "free/total", "GiB", "sm", "name"]
    assert lines[2].split()[:8] == ["GPU1", "NV4", "X", "PHB", "PHB", "0", "4", "x16"]
    assert lines[2].endswith("23.9/24.0       86  NVIDIA GeForce RTX 3090")
    assert [line.split()[0] for line in lines[5:]] == ["NV#", "PHB"]


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_every_machine_has_a_matrix(name):
    lines = matrix(fixture(name)).splitlines()
    assert len(lines) >= len(fixture(name).devices) + 1 or name == "no-gpu"


def test_the_matrix_of_devices_that_cuda_reorders():
    lines = matrix(fixture("rtx3090-pairs-x4").visible("3,1")).splitlines()
    assert lines[0].split()[:2] == ["GPU3", "GPU1"] and lines[1].split()[:3] == ["GPU3", "X", "PHB"]
