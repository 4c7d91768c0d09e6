"""Where ranks may run: GPUs with their memory and links, real or imagined, or the processor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from h3dist.plan.rates import DeviceRates, Rates
from h3dist.plan.wires import Wires
from h3dist.topology import Device, Link, Topology

NAMELESS = "a GPU"  # of which only the memory was said


@dataclass(frozen=True)
class Machine:
    """GPUs in CUDA's order and a link for every pair, by index; without GPUs the processor.

    `host_free` is for ranks on the processor, in bytes. A machine of which nothing is known has neither.
    """

    gpus: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    host_free: int | None = None

    @classmethod
    def of(cls, topology: Topology) -> "Machine":
        """All GPUs of a topology."""
        return cls(topology.devices, topology.links)

    @classmethod
    def imagined(cls, count: int, device: DeviceRates | None, memory: int) -> "Machine":
        """`count` equal GPUs of `memory` bytes, all free; joined as such devices are, half of them to each socket."""
        name, capability = (device.name, device.capability or (0, 0)) if device else (NAMELESS, (0, 0))
        gpus = tuple(Device(i, name, memory, memory, capability, f"GPU-{i}") for i in range(count))
        links = tuple(_imagined_link(a, b, count, device.link) for a, b in combinations(range(count), 2) if device)
        return cls(gpus, links)

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], Link]:
        return {(link.a, link.b): link for link in self.links}

    def link(self, a: int, b: int) -> Link:
        """The link of two GPUs by their places, from the first to the second. Raises KeyError for a GPU with itself."""
        here, there = self.gpus[a].index, self.gpus[b].index
        link = self._by_pair[min(here, there), max(here, there)]
        return link if here < there else _turned(link)

    @property
    def device(self) -> str:
        """ "cpu" for ranks on the processor, else "cuda"."""
        return "cpu" if self.host_free is not None else "cuda"

    @property
    def known(self) -> bool:
        """Whether anything is known of it: memory above all."""
        return bool(self.gpus) or self.host_free is not None

    @property
    def capability(self) -> tuple[int, int] | None:
        """The lowest of its GPUs; None without one."""
        return min((gpu.capability for gpu in self.gpus), default=None)

    def seats(self, world: int) -> tuple[int, ...]:
        """GPUs, by their place, for ranks that take them in turn."""
        return tuple(rank % max(1, len(self.gpus)) for rank in range(world))

    def free(self, seats: Sequence[int]) -> tuple[int, ...]:
        """Free bytes of each rank; ranks on one GPU, or on the processor, share them."""
        if self.host_free is not None:
            return (self.host_free // max(1, len(seats)),) * len(seats)
        return tuple(self.gpus[seat].memory_free // seats.count(seat) for seat in seats)

    def rates(self, table: Rates) -> DeviceRates | None:
        """The rates of its slowest GPU, or of the processor; None where the table does not know a GPU."""
        if self.host_free is not None:
            return table.device("CPU")
        found = [_rates(gpu, table) for gpu in self.gpus]
        if not found or None in found:
            return None
        return min((each for each in found if each), key=lambda each: each.product["bfloat16"])

    def wires(self, seats: Sequence[int], device: DeviceRates, table: Rates) -> Wires:
        """The wires between ranks on these seats. Raises KeyError for a pair without a link."""
        pairs = combinations(range(len(seats)), 2)
        if self.host_free is not None:
            links = {(a, b): Link(a, b, "HOST", False, False) for a, b in pairs}
        else:
            links = {(a, b): self.link(seats[a], seats[b]) for a, b in pairs}
        return Wires.of(links, device, table)


def _rates(gpu: Device, table: Rates) -> DeviceRates | None:
    """A MIG slice has the share of the rates that it has of the memory."""
    found = table.device(gpu.name)
    if found is None or found.memory is None or "MIG" not in gpu.name.split():
        return found
    return found.part(min(1.0, gpu.memory_total / found.memory))


def _imagined_link(a: int, b: int, count: int, kind: str) -> Link:
    sockets = [2 * place // count for place in (a, b)]
    if kind == "SYS" and sockets[0] == sockets[1]:
        kind = "NODE"
    nvlinks = int(kind.removeprefix("NV")) if kind.startswith("NV") else 0
    return Link(a, b, kind, True, True, nvlinks, numa_a=sockets[0], numa_b=sockets[1])


def _turned(link: Link) -> Link:
    return replace(link, a=link.b, b=link.a, numa_a=link.numa_b, numa_b=link.numa_a)
