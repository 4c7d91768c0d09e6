"""How fast devices and links are: the shipped table `rates.json`, of which every row says where it comes from.

A row is `{of, what, value, unit, kind, source}`, and `date` where the project measured it. `kind` is "measured" (by
this project), "published" (by whom `source` says), "fitted" (to published times of whole steps) or "estimated".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from h3dist.errors import ConfigError, nearest
from h3dist.topology import Link

TABLE = Path(__file__).with_name("rates.json")
GIB = 1 << 30
LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}  # B/s of a PCIe lane, by generation
USABLE = 0.86  # of a PCIe port: copies reach 54 of 63 GB/s (local-inference-lab/rtx6kpro)


@dataclass(frozen=True)
class DeviceRates:
    """One class of devices: FLOP/s of products by number format and of attention by backend, B/s of the rest.

    `launch` is what the host takes to start the work of one block, in seconds; `nvlink` B/s of one NVLink, one way;
    `units` how many tiles of attention it works on at a time, 0 where unknown; `link` the kind of link that a machine
    of them has if nothing else is known.
    """

    name: str
    memory: int | None
    capability: tuple[int, int] | None
    link: str
    product: Mapping[str, float]
    attention: Mapping[str, float]
    elementwise: float
    copy: float
    dequantise: float
    launch: float
    nvlink: float = 0.0
    units: float = 0.0

    def part(self, share: float) -> "DeviceRates":
        """A slice that has `share` of the device, as of a MIG slice's memory; the host is the same."""
        scaled = {"product": _times(self.product, share), "attention": _times(self.attention, share)}
        numbers = {name: getattr(self, name) * share for name in ("elementwise", "copy", "dequantise", "units")}
        return DeviceRates(**vars(self) | scaled | numbers)


@dataclass(frozen=True)
class LinkRates:
    """One class of links, one way: B/s of a port, seconds of a message, B/s of all that share a bridge (None: none).

    `beside` are the seconds by which attention takes longer for each second of groups of heads that come meanwhile;
    `hides` is the part of a gather of hidden rows that is hidden by the product of a rank's own.
    """

    bandwidth: float
    latency: float
    pool: float | None = None
    beside: float = 0.0
    hides: float = 0.0


@dataclass(frozen=True)
class Rates:
    """The table. Devices are found by name, links by what joins two devices."""

    classes: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]

    def device(self, name: str) -> DeviceRates | None:
        """The class of a device by the driver's name, or by words of it: "RTX PRO 6000"; None if there is none.

        Where several fit, the first in the table.
        """
        asked = _words(name)
        if not asked:
            return None
        for exact in (True, False):
            for entry in self.classes:
                known = [_words(each) for each in entry["names"]]
                if any(each <= asked or (not exact and asked <= each) for each in known):
                    return self._device(entry)
        return None

    def named(self, name: str) -> DeviceRates:
        """As `device`. Raises ConfigError where nothing fits, with the names that do."""
        found = self.device(name)
        if found is None:
            names = [entry["name"] for entry in self.classes if entry["name"] != "CPU"]
            raise ConfigError(f"--gpu {name}: no rates for it; known are {', '.join(names)}{nearest(name, names)}")
        return found

    def copies(self, link: Link, device: DeviceRates) -> LinkRates:
        """The rates of a link where the devices' copy engines move; measured over NVLink, elsewhere taken as NCCL's."""
        return self._nvlink(link, device, "NV copy") if link.nvlink else self.link(link, device)

    def _nvlink(self, link: Link, device: DeviceRates, of: str) -> LinkRates:
        count = link.nvlinks or int(device.link.removeprefix("NV") if device.link.startswith("NV") else 1)
        values = self._values(of)
        return LinkRates(count * device.nvlink * values.pop("efficiency"), **values)

    def link(self, link: Link, device: DeviceRates) -> LinkRates:
        """The rates of a link between two devices of a class. Without P2P the bytes go through the host's memory."""
        if link.nvlink:
            return self._nvlink(link, device, "NV")
        reachable = link.p2p_read and link.p2p_write
        made = self.link_class(link.kind if reachable or link.kind == "HOST" else "SHM")
        port = USABLE * LANE_RATES.get(link.pcie_gen or 5, LANE_RATES[5]) * (link.pcie_width or 16)
        return LinkRates(min(made.bandwidth, port), made.latency, made.pool)

    def link_class(self, kind: str) -> LinkRates:
        """The rates of a class of links other than NVLink."""
        return LinkRates(**self._values(kind))

    def _device(self, entry: Mapping[str, Any]) -> DeviceRates:
        values = self._values(entry["name"])
        groups = {
            group: {what.removeprefix(f"{group}."): values.pop(what) for what in list(values) if what.startswith(group)}
            for group in ("product", "attention")
        }
        capability = tuple(entry["capability"]) if entry["capability"] else None
        memory = int(entry["memory_gib"] * GIB) if entry["memory_gib"] else None
        return DeviceRates(entry["name"], memory, capability, entry["link"], **groups, **values)

    def _values(self, of: str) -> dict[str, float]:
        return {row["what"]: row["value"] for row in self.rows if row["of"] == of}


@cache
def load_rates() -> Rates:
    """The shipped table."""
    return read_rates(TABLE)


def read_rates(path: Path) -> Rates:
    """The table in a file."""
    table = json.loads(path.read_text(encoding="utf-8"))
    return Rates(table["classes"], table["rows"])


def _words(name: str) -> frozenset[str]:
    return frozenset(name.lower().replace("-", " ").split()) - {"nvidia"}


def _times(rates: Mapping[str, float], share: float) -> dict[str, float]:
    return {name: rate * share for name, rate in rates.items()}
