"""The whole machine as a planner sees it: devices, the link of every pair, memory. Read, recorded, or from a file."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from h3dist import __version__
from h3dist.errors import ConfigError, nearest
from h3dist.topology.gpus import Device, absence, read_devices, select_visible
from h3dist.topology.host import Host, read_host
from h3dist.topology.links import KINDS, Link, read_links
from h3dist.topology.nvml import Nvml, Recorder, Recording, ask_maybe, driver

RECORDING = 1  # the version of the recordings' form


@dataclass(frozen=True)
class Topology:
    """Devices in PCI order, one link for every pair of them, and the host. Sizes in bytes.

    `shm_bytes` is 0 where there is no /dev/shm; `absence` says why there are no GPUs, None where there are;
    `unified` means that GPU and host share one memory.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    shm_bytes: int
    host_memory: int
    shm_free: int | None = None
    host_memory_free: int | None = None
    container_memory_limit: int | None = None
    unified: bool = False
    arch: str = ""  # of the processor, as in "x86_64"
    cpu: str = ""  # its maker, as in "AuthenticAMD"
    driver: str | None = None
    cuda_driver: int | None = None  # the newest CUDA that the driver runs, as in 13000 for 13.0
    absence: str | None = None

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], Link]:
        return {(link.a, link.b): link for link in self.links}

    def link(self, a: int, b: int) -> Link:
        """The link of two devices, named by their index in either order. Raises KeyError for a pair not here."""
        return self._by_pair[min(a, b), max(a, b)]

    def visible(self, setting: str | None) -> Self:
        """What a value of CUDA_VISIBLE_DEVICES (None: unset) shows, in CUDA's order; a GPU keeps its index."""
        shown = select_visible(self.devices, setting)
        kept = {device.index for device in shown}
        return replace(self, devices=shown, links=tuple(x for x in self.links if {x.a, x.b} <= kept))

    def to_dict(self) -> dict[str, Any]:
        """This topology as JSON values."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave. Raises ConfigError for values that are no topology."""
        from pydantic import TypeAdapter, ValidationError

        try:
            made = TypeAdapter(cls).validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            raise ConfigError(f"no topology: {_first_fault(error.errors()[0])}") from None
        _check(made)
        return made


def _first_fault(fault: Mapping[str, Any]) -> str:
    place = ".".join(map(str, fault["loc"]))
    known = [item.name for part in (Topology, Device, Link) for item in fields(part)]
    unknown = fault["type"] == "unexpected_keyword_argument"
    return f"{place}: {fault['msg']}{nearest(str(fault['loc'][-1]), known) if unknown else ''}"


def _check(made: Topology) -> None:
    """Raise ConfigError unless there is one link of a known kind for every pair of devices."""
    indices = [device.index for device in made.devices]
    if sorted(set(indices)) != indices:
        raise ConfigError(f"no topology: the devices' indices {indices} must rise")
    due, have = set(combinations(indices, 2)), [(link.a, link.b) for link in made.links]
    for pair in [*(due ^ set(have)), *(pair for pair in have if have.count(pair) > 1)]:
        raise ConfigError(f"no topology: exactly one link must join devices {pair[0]} and {pair[1]}, a before b")
    for link in made.links:
        if link.kind not in list(KINDS)[1:] and not re.fullmatch(r"NV(L|[1-9]\d?)", link.kind):
            legal = ", ".join(KINDS)
            raise ConfigError(f"no topology: link kind {link.kind!r} is none of {legal}{nearest(link.kind, KINDS)}")


def read_topology() -> Topology:
    """This machine. Raises ConfigError where the driver runs and a GPU does not answer."""
    with driver() as nvml:
        return survey(nvml, read_host())


def survey(nvml: Nvml, host: Host) -> Topology:
    """The machine that `nvml` answers for. Raises ConfigError as `read_topology`."""
    missing = absence(nvml)
    found = read_devices(nvml, host) if missing is None else ()
    return Topology(
        devices=found,
        links=read_links(nvml, found),
        shm_bytes=host.shm_bytes,
        shm_free=host.shm_free,
        host_memory=host.memory,
        host_memory_free=host.memory_free,
        container_memory_limit=host.container_memory_limit,
        unified=any(device.unified for device in found),
        arch=host.arch,
        cpu=host.cpu,
        driver=ask_maybe(nvml, "nvmlSystemGetDriverVersion") if missing is None else None,
        cuda_driver=ask_maybe(nvml, "nvmlSystemGetCudaDriverVersion_v2") if missing is None else None,
        absence=missing,
    )


def record() -> dict[str, Any]:
    """A recording of this machine, as JSON values: every answer that `read_topology` asks for.

    Kept too where a GPU does not answer, so that the fault can be looked at elsewhere.
    """
    host = read_host()
    with driver() as nvml:
        recorder = Recorder(nvml)
        with suppress(ConfigError):  # the refusal is among the answers
            survey(recorder, host)
    made = f"recorded by h3dist {__version__} at {datetime.now(UTC):%Y-%m-%dT%H:%MZ}"
    return {"recording": RECORDING, "made": made, "host": asdict(host), "nvml": recorder.answers}


def replay(recording: Mapping[str, Any]) -> Topology:
    """The machine of a recording. Raises ConfigError for what is none, and what reading that machine raised."""
    from pydantic import TypeAdapter, ValidationError

    if recording.get("recording") != RECORDING:
        raise ConfigError(f"a recording of form {recording.get('recording')!r}; this version reads {RECORDING}")
    try:
        host = TypeAdapter(Host).validate_json(json.dumps(recording.get("host")), strict=True)
    except ValidationError as error:
        raise ConfigError(f"no recording: host: {_first_fault(error.errors()[0])}") from None
    answers = recording.get("nvml")
    if not isinstance(answers, Mapping):
        raise ConfigError("no recording: nvml must hold the answers of NVML")
    return survey(Recording(answers), host)


def load_topology(path: str | Path) -> Topology:
    """The topology in a JSON file: one written by `Topology.to_dict`, or a recording (`h3dist doctor --record FILE`).

    Raises ConfigError naming the file and its fault.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the topology {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no whole JSON file: {error}") from None
    try:
        if isinstance(values, dict) and "recording" in values:
            return replay(values)
        if isinstance(values, dict) and "devices" in values:
            return Topology.from_dict(values)
        raise ConfigError("it has neither devices and links nor the answers of a recording")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
