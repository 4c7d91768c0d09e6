"""Machines that nobody here has, as recordings of NVML: `python -m tests.topologies` writes tests/fixtures/topology/.

Made by hand from what is public of each machine (names, sizes, links, what NVML refuses there), not recorded on one.
The questions are those that the package asks, so a file holds just what its reader needs.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from h3dist.topology.host import Host
from h3dist.topology.machine import RECORDING, survey
from h3dist.topology.nvml import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, NvmlError, Recorder

FOLDER = Path(__file__).parent / "fixtures" / "topology"
MADE = "by hand, by tests/topologies.py, from public descriptions; not recorded on a real machine"
MIB, GIB = 1 << 20, 1 << 30
NODE, SYS, PHB = 40, 50, 30
REFUSALS = {NOT_SUPPORTED: "Not Supported", INVALID_ARGUMENT: "Invalid Argument", NOT_FOUND: "Not Found"}
SWITCH = "00000000:07:00.0"  # an NVSwitch, in the place of a peer


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    name: str
    mib: int | None  # None: it shares the host's memory
    capability: tuple[int, int]
    pcie: tuple[int, int] | None = (5, 16)
    nvlinks: int = 0
    remote_told: bool = True  # whether NVML says where an NVLink leads
    mig: bool = True  # whether it knows of MIG at all


H200 = Card("NVIDIA H200", 143771, (9, 0), nvlinks=18)
B200 = Card("NVIDIA B200", 183359, (10, 0), nvlinks=18, remote_told=False)
PRO6000 = Card("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, (12, 0))
GB10 = Card("NVIDIA GB10", None, (12, 1), pcie=None, mig=False)
RTX3090 = Card("NVIDIA GeForce RTX 3090", 24576, (8, 6), pcie=(4, 16), nvlinks=4, mig=False)


@dataclass(frozen=True)
class Made:
    """Answers as NVML on a machine of equal cards would: an `Nvml`."""

    card: Card
    buses: tuple[str, ...]
    nodes: tuple[int, ...]
    near: int = NODE  # the common ancestor inside a NUMA node
    pairs: bool = False  # NVLink joins 0 to 1, 2 to 3; otherwise through switches, everyone
    slices: tuple[int | None, ...] = ()  # MiB of each MIG slice by place
    free: float = 0.994  # of the memory of an idle card
    driver: str = "580.159.04"
    cuda: int = 13000

    def ask(self, function, *arguments):
        return getattr(self, function.removeprefix("nvml"))(*arguments)

    def Init(self):
        return None

    def SystemGetDriverVersion(self):
        return self.driver

    def SystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def DeviceGetCount(self):
        return len(self.buses)

    def DeviceGetName(self, name):
        place = slice_of(name)
        return self.card.name if place is None else f"{self.card.name} MIG 3g.71gb"

    def DeviceGetUUID(self, name):
        place = slice_of(name)
        if place is not None and self.slices[place] is None:
            raise refusal(NOT_FOUND)
        kind = "GPU" if place is None else "MIG"
        return f"{kind}-{uuid5(NAMESPACE_URL, f'{self.card.name} {self.buses[index(name)]} {name}')}"

    def DeviceGetMemoryInfo(self, name):
        place = slice_of(name)
        mib = self.card.mib if place is None else self.slices[place]
        if mib is None:
            raise refusal(NOT_SUPPORTED)
        return {"total": mib * MIB, "free": int(mib * self.free) * MIB}

    def DeviceGetCudaComputeCapability(self, name):
        return list(self.card.capability)

    def DeviceGetPciInfo(self, name):
        return self.buses[index(name)]

    def DeviceGetMaxPcieLinkGeneration(self, name):
        return self._pcie(0)

    def DeviceGetMaxPcieLinkWidth(self, name):
        return self._pcie(1)

    def _pcie(self, which):
        if self.card.pcie is None:
            raise refusal(NOT_SUPPORTED)
        return self.card.pcie[which]

    def DeviceGetMemoryAffinity(self, name, words, scope):
        return [1 << self.nodes[index(name)]] + [0] * (words - 1)

    def DeviceGetMigMode(self, name):
        if not self.card.mig:
            raise refusal(NOT_SUPPORTED)
        return [int(bool(self.slices))] * 2

    def DeviceGetMaxMigDeviceCount(self, name):
        return len(self.slices)

    def DeviceGetNvLinkState(self, name, number):
        if not self.card.nvlinks or self.slices:
            raise refusal(NOT_SUPPORTED)
        if number >= self.card.nvlinks:
            raise refusal(INVALID_ARGUMENT)
        return 1

    def DeviceGetNvLinkRemotePciInfo(self, name, number):
        if not self.card.remote_told:
            raise refusal(NOT_SUPPORTED)
        return self.buses[index(name) ^ 1] if self.pairs else SWITCH

    def DeviceGetP2PStatus(self, a, b, which):
        joined = self.card.nvlinks and (not self.pairs or index(a) ^ 1 == index(b))
        if which == 2:
            return 0 if joined else 5
        geforce = "GeForce" in self.card.name
        return 1 if geforce and not joined else 0

    def DeviceGetTopologyCommonAncestor(self, a, b):
        return self.near if self.nodes[index(a)] == self.nodes[index(b)] else SYS


def index(name):
    return int(name.removeprefix("gpu").partition(".")[0])


def slice_of(name):
    place = name.partition(".")[2]
    return int(place) if place else None


def refusal(code):
    return NvmlError(code, REFUSALS[code])


class NoDriver:
    """The `Nvml` of a machine without a driver."""

    def ask(self, function, *arguments):
        raise NvmlError(12, "NVML Shared Library Not Found")


def host(gib=1511, cpu="AuthenticAMD", arch="x86_64", shm=None, **changes):
    """The host of a rented machine; half of its memory is /dev/shm unless said otherwise."""
    memory = gib * GIB
    shm = memory // 2 if shm is None else shm
    values = {"memory": memory, "memory_free": int(memory * 0.97), "container_memory_limit": None}
    values |= {"shm_bytes": shm, "shm_free": shm, "arch": arch, "cpu": cpu, "numa": {}}
    return Host(**values | changes)


HGX = ("1B", "43", "52", "61", "9D", "C3", "D1", "DF")
PCIE = ("01", "21", "41", "61", "81", "A1", "C1", "E1")


def buses(numbers):
    return tuple(f"00000000:{number}:00.0" for number in numbers)


def sockets(count):
    """The NUMA nodes of `count` GPUs, half on each of two."""
    return (0,) * (count - count // 2) + (1,) * (count // 2)


def machines():
    """Every machine by the name of its file: its NVML and its host."""
    intel, none = host(2015, "GenuineIntel"), host(62, "GenuineIntel", shm=64 * MIB)
    made = {"no-gpu": (NoDriver(), none)}
    for count in (1, 2, 4, 6, 8):
        made[f"h200-x{count}"] = (Made(H200, buses(HGX[:count]), ((0,) * 4 + (1,) * 4)[:count]), intel)
        node = Made(PRO6000, buses(PCIE[:count]), (0,) * count)
        made[f"rtxpro6000-node-x{count}"] = (node, host())
        made[f"rtxpro6000-sys-x{count}"] = (Made(PRO6000, buses(PCIE[:count]), sockets(count)), host())
    for count in (2, 8):
        made[f"b200-x{count}"] = (Made(B200, buses(HGX[:count]), ((0,) * 4 + (1,) * 4)[:count]), intel)
    spark = host(cpu="", arch="aarch64", memory=127600748 * 1024, memory_free=118566368 * 1024, shm=63800374 * 1024)
    made["gb10-x1"] = (Made(GB10, ("0000000F:01:00.0",), (0,), driver="580.126.09"), spark)
    pairs = Made(
        RTX3090, buses(("01", "21", "41", "61")), (0,) * 4, near=PHB, pairs=True, driver="575.64.03", cuda=12090
    )
    made["rtx3090-pairs-x4"] = (pairs, host(251))
    sliced = Made(H200, buses(HGX[:1]), (0,), slices=(71424, None, 71424))
    made["h200-mig"] = (sliced, intel)
    return made


def recording(nvml, host):
    """What `h3dist doctor --record` would write on that machine."""
    recorder = Recorder(nvml)
    survey(recorder, host)
    return {"recording": RECORDING, "made": MADE, "host": asdict(host), "nvml": recorder.answers}


def text(values):
    """A recording as JSON, one line for each function of NVML."""
    lines = [f"  {json.dumps(function)}: {json.dumps(answers)}" for function, answers in values["nvml"].items()]
    head = "".join(f" {json.dumps(key)}: {json.dumps(values[key])},\n" for key in ("recording", "made", "host"))
    return "{\n" + head + ' "nvml": {\n' + ",\n".join(lines) + "\n }\n}\n"


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (nvml, around) in machines().items():
        (FOLDER / f"{name}.json").write_text(text(recording(nvml, around)))


if __name__ == "__main__":
    main()
