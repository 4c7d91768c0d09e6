"""The transport that NCCL's rules give for each machine, and what the environment changes."""

from dataclasses import replace

import pytest

from h3dist.topology import load_topology, predict_transport
from h3dist.topology.transport import read_level
from tests.topologies import FOLDER


def predicted(name, environ=None, visible=None):
    return predict_transport(load_topology(FOLDER / f"{name}.json").visible(visible), environ or {})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("h200-x8", "P2P/CUMEM for 28 pairs"),
        ("b200-x2", "P2P/CUMEM for 1 pair"),
        ("rtxpro6000-sys-x2", "P2P/CUMEM for 1 pair"),  # seen so on such a machine
        ("rtxpro6000-node-x2", "P2P/CUMEM for 1 pair"),
        ("rtxpro6000-node-x4", "SHM for 6 pairs"),  # more than two GPUs
        ("rtxpro6000-sys-x8", "SHM for 28 pairs"),
        ("rtx3090-pairs-x4", "SHM for 4 pairs, P2P/CUMEM for 2"),
        ("h200-x1", "none: there is no second GPU"),
        ("gb10-x1", "none: there is no second GPU"),
        ("no-gpu", "none: there is no second GPU"),
        ("h200-mig", "none: there is no second GPU"),
    ],
)
def test_without_an_environment(name, told):
    assert predicted(name).text() == told


@pytest.mark.parametrize(
    ("name", "environ", "told"),
    [
        ("h200-x8", {"NCCL_P2P_DISABLE": "1"}, "SHM for 28 pairs"),
        ("h200-x8", {"NCCL_P2P_DISABLE": "0"}, "P2P/CUMEM for 28 pairs"),
        ("h200-x8", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "NET for 28 pairs"),
        ("h200-x2", {"NCCL_CUMEM_ENABLE": "0"}, "P2P/IPC for 1 pair"),
        ("rtxpro6000-sys-x4", {"NCCL_P2P_LEVEL": "SYS"}, "P2P/CUMEM for 6 pairs"),
        ("rtxpro6000-sys-x4", {"NCCL_P2P_LEVEL": "5"}, "P2P/CUMEM for 6 pairs"),
        ("rtxpro6000-sys-x4", {"NCCL_P2P_LEVEL": "PHB"}, "SHM for 4 pairs, P2P/CUMEM for 2"),
        ("rtxpro6000-sys-x4", {"NCCL_P2P_LEVEL": "NODE"}, "SHM for 6 pairs"),  # NCCL ignores that
        ("rtxpro6000-sys-x2", {"NCCL_P2P_LEVEL": "PHB"}, "SHM for 1 pair"),
        ("rtx3090-pairs-x4", {"NCCL_P2P_LEVEL": "SYS"}, "SHM for 4 pairs, P2P/CUMEM for 2"),  # NVML forbids it
        ("h200-x2", {"NCCL_P2P_LEVEL": "LOC"}, "SHM for 1 pair"),
    ],
)
def test_with_an_environment(name, environ, told):
    assert predicted(name, environ).text() == told


def test_two_visible_gpus_of_many_are_two():
    assert predicted("rtxpro6000-sys-x8", visible="0,7").pairs == {(0, 7): "P2P/CUMEM"}


def test_an_intel_host_keeps_two_gpus_apart():
    machine = replace(load_topology(FOLDER / "rtxpro6000-sys-x2.json"), cpu="GenuineIntel")
    assert predict_transport(machine, {}).text() == "SHM for 1 pair"


def test_an_old_driver_has_no_cumem():
    machine = replace(load_topology(FOLDER / "h200-x2.json"), cuda_driver=11080)
    assert predict_transport(machine, {}).text() == "P2P/IPC for 1 pair"


def test_levels():
    assert [read_level(text) for text in ("SYS", "0", "1", "99", "NODE", "sys", "", "-1")] == [
        *("SYS", "LOC", "PIX", "SYS"),
        *(None,) * 4,
    ]
    assert "AMD" in predicted("rtxpro6000-sys-x2").reason
