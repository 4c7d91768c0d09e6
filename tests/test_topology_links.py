"""Links of every pair, recordings that replay through the code that asks NVML, and files that are refused."""

import ctypes
import json
from dataclasses import replace

import pytest

from h3dist.errors import ConfigError
from h3dist.topology import Topology, load_topology, read_topology, record, replay
from h3dist.topology.host import container_memory_limit, free_host_memory, numa_nodes, read_host, shared_memory
from h3dist.topology.links import READ
from h3dist.topology.machine import survey
from h3dist.topology.nvml import NOT_SUPPORTED, Driver, NvmlError
from tests.topologies import FOLDER, H200, HGX, PCIE, PRO6000, Made, NoDriver, buses, host, machines, recording, text

MACHINES = machines()
EVERY = sorted(MACHINES)


def fixture(name):
    return load_topology(FOLDER / f"{name}.json")


@pytest.mark.parametrize("name", EVERY)
def test_fixtures_are_what_their_script_writes(name):
    assert (FOLDER / f"{name}.json").read_text() == text(recording(*MACHINES[name]))


def test_there_is_no_fixture_without_a_machine():
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == EVERY


@pytest.mark.parametrize("name", EVERY)
def test_a_recording_and_its_topology_give_the_same_machine(name, tmp_path):
    topology = fixture(name)
    assert topology == survey(*MACHINES[name])
    (tmp_path / "t.json").write_text(json.dumps(topology.to_dict()))
    assert load_topology(tmp_path / "t.json") == topology
    assert len(topology.links) == len(topology.devices) * (len(topology.devices) - 1) // 2


def kinds(name):
    return "".join(f"{link.a}{link.b}:{link.kind} " for link in fixture(name).links).strip()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("h200-x2", "01:NV18"),
        ("b200-x2", "01:NV18"),
        ("rtxpro6000-node-x2", "01:NODE"),
        ("rtxpro6000-sys-x2", "01:SYS"),
        ("rtxpro6000-sys-x4", "01:NODE 02:SYS 03:SYS 12:SYS 13:SYS 23:NODE"),
        ("rtx3090-pairs-x4", "01:NV4 02:PHB 03:PHB 12:PHB 13:PHB 23:NV4"),
        ("gb10-x1", ""),
        ("no-gpu", ""),
    ],
)
def test_kinds_of_links(name, shown):
    assert kinds(name) == shown


def test_a_link_knows_pcie_numa_and_p2p():
    across = fixture("h200-x8").link(7, 2)
    assert (across.a, across.b, across.numa_a, across.numa_b) == (2, 7, 0, 1)
    assert (across.pcie_gen, across.pcie_width, across.nvlinks) == (5, 16, 18)
    assert across.nvlink and across.distance == 0 and across.p2p_read and across.p2p_write
    far = fixture("rtx3090-pairs-x4").link(1, 2)
    assert not (far.nvlink or far.p2p_read or far.p2p_write) and far.distance == 3 and far.nvlinks == 0
    with pytest.raises(KeyError):
        fixture("h200-x2").link(0, 2)


def answers(name="h200-x2"):
    return recording(*MACHINES[name])


def replayed(values):
    return replay(json.loads(json.dumps(values)))


def test_nvlinks_that_programs_may_not_use_are_counted_but_no_link():
    """As on a host whose fabric manager does not run."""
    values = answers()
    for pair in ("gpu0 gpu1 2", "gpu1 gpu0 2"):
        values["nvml"]["nvmlDeviceGetP2PStatus"][pair] = 5
    link = replayed(values).link(0, 1)
    assert (link.kind, link.nvlinks) == ("NODE", 18)


def test_one_way_p2p_is_none():
    values = answers()
    values["nvml"]["nvmlDeviceGetP2PStatus"]["gpu1 gpu0 0"] = 4
    link = replayed(values).link(0, 1)
    assert (link.p2p_read, link.p2p_write) == (False, True)


def test_nvlink_without_states_has_no_number():
    values = answers()
    states = values["nvml"]["nvmlDeviceGetNvLinkState"]
    states["gpu0 0"] = states["gpu1 0"] = {"error": NOT_SUPPORTED, "text": "Not Supported"}
    assert replayed(values).link(0, 1).kind == "NVL"


def test_a_link_that_is_down_is_not_counted():
    values = answers()
    values["nvml"]["nvmlDeviceGetNvLinkState"]["gpu0 3"] = 0
    assert replayed(values).link(0, 1).kind == "NV17"


def test_what_nvml_does_not_know_of_a_pair_is_far():
    values = answers("rtxpro6000-node-x2")
    refused = {"error": NOT_SUPPORTED, "text": "Not Supported"}
    values["nvml"]["nvmlDeviceGetTopologyCommonAncestor"]["gpu0 gpu1"] = refused
    values["nvml"]["nvmlDeviceGetP2PStatus"] = dict.fromkeys(values["nvml"]["nvmlDeviceGetP2PStatus"], refused)
    link = replayed(values).link(0, 1)
    assert (link.kind, link.p2p_read, link.p2p_write) == ("SYS", False, False)


def test_gb10_counts_the_hosts_memory():
    spark = fixture("gb10-x1")
    assert spark.unified and spark.devices[0].unified
    assert spark.devices[0].memory_total == spark.host_memory == 127600748 * 1024
    assert spark.devices[0].memory_free == spark.host_memory_free == 118566368 * 1024
    assert spark.devices[0].capability == (12, 1)
    assert not fixture("h200-x1").unified


def test_a_gpu_that_reports_no_memory_at_all_shares_the_hosts():
    values = answers("h200-x1")
    values["nvml"]["nvmlDeviceGetMemoryInfo"]["gpu0"] = {"total": 0, "free": 0}
    assert replayed(values).unified


def test_mig_slices_are_devices_of_their_own():
    gpu = fixture("h200-mig").devices[0]
    assert [part.memory_total >> 20 for part in gpu.slices] == [71424, 71424]
    shown = fixture("h200-mig").visible(gpu.slices[1].uuid)
    assert [device.uuid for device in shown.devices] == [gpu.slices[1].uuid]
    assert shown.devices[0].uuid.startswith("MIG-") and shown.links == ()


@pytest.mark.parametrize(
    ("setting", "order", "links"),
    [
        (None, [0, 1, 2, 3], 6),
        ("3,1", [3, 1], 1),
        ("2", [2], 0),
        ("", [], 0),
        ("0,0", [], 0),
        ("-1", [], 0),
        ("1,-1,2", [1], 0),
    ],
)
def test_what_is_visible_keeps_its_links(setting, order, links):
    shown = fixture("rtx3090-pairs-x4").visible(setting)
    assert [device.index for device in shown.devices] == order
    assert len(shown.links) == links
    if order == [3, 1]:
        assert shown.link(3, 1).kind == "PHB"


def test_uuids_show_devices():
    whole = fixture("h200-x4")
    uuids = [device.uuid for device in whole.devices]
    assert [d.index for d in whole.visible(f"{uuids[2]},{uuids[0][:12]}").devices] == [2, 0]


def test_free_memory_may_differ_between_devices():
    values = answers()
    values["nvml"]["nvmlDeviceGetMemoryInfo"]["gpu1"]["free"] = 1 << 30
    first, second = replayed(values).devices
    assert first.memory_free > second.memory_free == 1 << 30


def test_no_driver_is_a_machine_without_gpus():
    topology = fixture("no-gpu")
    assert topology.devices == topology.links == () and topology.absence == "NVML Shared Library Not Found"
    assert topology.shm_bytes == 64 << 20


def test_this_machine_replays():
    here, kept = read_topology(), replay(json.loads(json.dumps(record())))
    still = {"host_memory_free": None, "shm_free": None}
    free = {"memory_free": 0}
    assert replace(kept, devices=(), **still) == replace(here, devices=(), **still)
    assert [replace(d, **free) for d in kept.devices] == [replace(d, **free) for d in here.devices]


@pytest.mark.parametrize("code", [15, 999])
def test_a_lost_gpu_is_named(code):
    class Lost(Made):
        def DeviceGetMemoryInfo(self, name):
            if name == "gpu1":
                raise NvmlError(code, "GPU is lost")
            return super().DeviceGetMemoryInfo(name)

    with pytest.raises(ConfigError, match="GPU 1 does not answer: GPU is lost"):
        survey(Lost(H200, buses(HGX[:4]), (0,) * 4), host())


def test_a_gpu_lost_while_links_are_read_is_no_missing_nvlink():
    values = answers()
    values["nvml"]["nvmlDeviceGetNvLinkState"]["gpu1 0"] = {"error": 15, "text": "GPU is lost"}
    with pytest.raises(ConfigError, match="links: GPU is lost"):
        replayed(values)


# The binding itself, over C functions that stand in the driver's place.


@pytest.fixture
def binding(monkeypatch):
    """pynvml with a library of our own functions: name -> (argument types, function)."""
    import pynvml

    def put(name, types, function):
        monkeypatch.setitem(
            pynvml._nvmlGetFunctionPointer_cache, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(function)
        )

    def handle(number, out):
        out[0] = ctypes.cast(100 + number, pynvml.c_nvmlDevice_t)
        return 0

    put("nvmlDeviceGetHandleByIndex_v2", (ctypes.c_uint, ctypes.POINTER(pynvml.c_nvmlDevice_t)), handle)
    return pynvml, put


def test_the_bindings_read_index_is_no_number_but_ours_is(binding):
    pynvml, put = binding
    asked = []

    def status(a, b, which, out):
        asked.append((*(ctypes.cast(device, ctypes.c_void_p).value for device in (a, b)), which))
        out[0] = 4
        return 0

    device, answer = pynvml.c_nvmlDevice_t, ctypes.POINTER(pynvml._nvmlGpuP2PStatus_t)
    put("nvmlDeviceGetP2PStatus", (device, device, ctypes.c_int, answer), status)
    assert pynvml.NVML_P2P_CAPS_INDEX_READ != 0  # where this fails, the trap is gone
    assert Driver(pynvml).ask("nvmlDeviceGetP2PStatus", "gpu0", "gpu3", READ) == 4
    assert asked == [(100, 103, 0)]


def test_the_bindings_structures_become_json(binding):
    pynvml, put = binding

    def memory(_, out):
        out[0].total, out[0].free = 5, 3
        return 0

    def pci(_, out):
        out[0].busId = b"0000000F:01:00.0"
        return 0

    put("nvmlDeviceGetMemoryInfo", (pynvml.c_nvmlDevice_t, ctypes.POINTER(pynvml.c_nvmlMemory_t)), memory)
    put("nvmlDeviceGetPciInfo_v3", (pynvml.c_nvmlDevice_t, ctypes.POINTER(pynvml.nvmlPciInfo_t)), pci)
    driver = Driver(pynvml)
    assert driver.ask("nvmlDeviceGetMemoryInfo", "gpu0") == {"total": 5, "free": 3}
    assert driver.ask("nvmlDeviceGetPciInfo", "gpu0") == "0000000F:01:00.0"


def test_the_bindings_refusals_carry_their_code(binding):
    pynvml, put = binding
    number = ctypes.POINTER(ctypes.c_uint)
    put("nvmlDeviceGetMigMode", (pynvml.c_nvmlDevice_t, number, number), lambda *_: NOT_SUPPORTED)
    with pytest.raises(NvmlError, match="Not Supported") as refused:
        Driver(pynvml).ask("nvmlDeviceGetMigMode", "gpu0")
    assert refused.value.code == NOT_SUPPORTED


# Files that are refused.


def changed(path, value, name="h200-x2"):
    """The JSON topology of a machine with one value changed; None takes it away."""
    values = fixture(name).to_dict()
    *way, last = path
    place = values
    for step in way:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("links", 0, "kind"), "NODES", "'NODES' is none of .*did you mean 'NODE'"),
        (("links", 0, "kind"), "NV0", "link kind 'NV0'"),
        (("links", 0, "kind"), "NV#", "link kind 'NV#'"),
        (("links", 0, "p2p_read"), "true", "links.0.p2p_read"),
        (("links", 0, "b"), 2, "join devices"),
        (("links", 0), None, "join devices 0 and 1"),
        (("links", 0), {"a": 1, "b": 0, "kind": "SYS", "p2p_read": True, "p2p_write": True}, "a before b"),
        (("devices", 0, "memory_total"), 1.5, "devices.0.memory_total"),
        (("devices", 0, "name"), None, "devices.0.name"),
        (("devices", 1, "index"), 0, "must rise"),
        (("shm_byte",), 1, "shm_byte: .*did you mean 'shm_bytes'"),
        (("links", 0, "nvlink"), 4, "did you mean 'nvlinks'"),
    ],
)
def test_malformed_topologies_are_refused(path, value, told):
    with pytest.raises(ConfigError, match=told):
        Topology.from_dict(changed(path, value))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no whole JSON"),
        (b"[]", "neither devices"),
        (b"{}", "neither devices"),
        (b"\xff\xfe", "no whole JSON"),
        (b'{"recording": 2}', "form 2; this version reads 1"),
        (b'{"recording": 1}', "host"),
        ((FOLDER / "h200-x2.json").read_bytes()[:900], "no whole JSON"),
        ((FOLDER / "h200-x2.json").read_bytes().replace(b'"nvml": {', b'"nvml": 0, "x": {'), "nvml must hold"),
        ((FOLDER / "h200-x2.json").read_bytes().replace(b"GetUUID", b"GetUuid"), "no answer of nvmlDeviceGetUUID"),
        (None, "No such file"),
    ],
)
def test_unreadable_files_are_named(content, told, tmp_path):
    path = tmp_path / "links.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as refused:
        load_topology(path)
    assert str(path) in str(refused.value)


def test_a_folder_is_no_topology(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load_topology(tmp_path)


# The host.


@pytest.fixture
def groups(tmp_path):
    """Write the memory files of a control group: (folder, version, limit, used, cache)."""

    def put(folder, version, limit, used=0, cache=0):
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
        names[2] = ("memory.max", "memory.current", "inactive_file")
        for name, value in zip(names[version], (limit, used, f"{names[version][2]} {cache}"), strict=True):
            (place / ("memory.stat" if "inactive" in name else name)).write_text(f"{value}\n")
        return tmp_path

    return put


@pytest.mark.parametrize(
    ("lines", "folder", "version"),
    [
        ("0::/\n", ".", 2),
        ("0::/a/b\n", "a/b", 2),
        ("0::/a/b\n", "a", 2),  # the limit of a group above
        ("5:cpu:/\n4:memory:/docker/x\n0::/\n", "memory", 1),  # the path is the host's, the root is ours
        ("4:cpu,memory:/x\n", "memory/x", 1),
    ],
)
def test_the_containers_limit_is_found(lines, folder, version, groups, tmp_path):
    root = groups(folder, version, 10_000, 6_000, 1_000)
    (tmp_path / "own").write_text(lines)
    (tmp_path / "meminfo").write_text("MemTotal: 90 kB\nMemAvailable: 80 kB\nHugePages_Total: 0\n")
    assert container_memory_limit(root, tmp_path / "own") == 10_000
    assert free_host_memory(tmp_path / "meminfo", root, tmp_path / "own") == 5_000


@pytest.mark.parametrize(("version", "limit"), [(1, 9223372036854771712), (2, "max")])
def test_no_limit_is_none(version, limit, groups, tmp_path):
    root = groups("memory" if version == 1 else ".", version, limit)
    (tmp_path / "own").write_text("4:memory:/\n0::/\n")
    assert container_memory_limit(root, tmp_path / "own") is None


def test_shared_memory(tmp_path):
    assert shared_memory(1, tmp_path / "absent") == (0, 0)
    size, free = shared_memory(1, tmp_path)
    assert size >= free > 0


def test_numa_nodes_of_nvidias_devices_alone(tmp_path):
    for address, vendor, node in (
        ("0000:17:00.0", "0x10de", 1),
        ("0000:18:00.0", "0x8086", 1),
        ("0000:19:00.0", "0x10de", -1),
    ):
        folder = tmp_path / address
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "numa_node").write_text(f"{node}\n")
    assert numa_nodes(tmp_path) == {"0000:17:00.0": 1}
    assert numa_nodes(tmp_path / "absent") == {}


def test_the_kernels_word_on_numa_comes_before_nvmls():
    gpu = Made(PRO6000, buses(PCIE[:1]), (0,))
    assert survey(gpu, host()).devices[0].numa == 0
    assert survey(gpu, host(numa={"0000:01:00.0": 3})).devices[0].numa == 3


def test_this_host_has_memory():
    here = read_host()
    assert 0 < here.memory_free <= here.memory and here.shm_free <= here.shm_bytes and here.arch
    assert survey(NoDriver(), here).host_memory == here.memory
