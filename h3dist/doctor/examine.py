"""All checks in one: children are started together, and what they and this process find becomes one report."""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from h3dist import __version__
from h3dist.config import Config, compose
from h3dist.doctor.children import Child, Ended, run_children
from h3dist.doctor.environment import check_environment, settings
from h3dist.doctor.finding import LEVELS, Finding, exit_code
from h3dist.doctor.machine import check_gpus, check_host, check_links
from h3dist.doctor.probes import check_copies, check_exchange, right, seen_ways
from h3dist.doctor.software import check_packages, check_torch
from h3dist.doctor.table import matrix
from h3dist.errors import ConfigError
from h3dist.topology import Topology, predict_transport, rank_environ, replay

LIMIT = 60.0  # seconds that each probe may take
CHILD = (sys.executable, "-m", "h3dist.doctor.child")
PATIENCE = 0.7  # of the limit: when ranks give each other up, so that they can say why
GLOO_RANKS = 2
MEETINGS, TAKEN = 3, "failed to listen"  # tries, and what torch says of a port that is another's
NCCL_TELLS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET"}  # for the probe alone


@dataclass(frozen=True)
class Report:
    """What was found. `topology` is the whole machine, None where it could not be read; `shown` what a run sees."""

    findings: tuple[Finding, ...]
    recording: dict[str, Any] | None = None
    topology: Topology | None = None
    shown: Topology | None = None
    transport: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0: no problem; 1: warnings; 2: errors."""
        return exit_code(self.findings)

    def as_dict(self) -> dict[str, Any]:
        """This report as JSON values."""
        return {
            "h3dist": __version__,
            "exit_code": self.exit_code,
            "findings": [asdict(finding) for finding in self.findings],
            "transport": self.transport,
            "topology": self.topology.to_dict() if self.topology else None,
            "visible": [gpu.uuid for gpu in self.shown.devices] if self.shown else [],
        }

    def text(self) -> str:
        """The matrix, then every finding with its remedy, then how many there are of each level."""
        lines = [] if self.topology is None else [matrix(self.topology), ""]
        for finding in self.findings:
            lines.append(f"{finding.level:8} {finding.check:12} {_indented(finding.what)}")
            if finding.remedy:
                lines.append(f"{'':21} remedy: {_indented(finding.remedy)}")
        counts = {level: sum(finding.level == level for finding in self.findings) for level in LEVELS}
        return "\n".join([*lines, "", ", ".join(f"{count} {level}" for level, count in counts.items())])


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + " " * 22)


def examine(
    overrides: Sequence[str], *, limit: float = LIMIT, tasks: Mapping[str, tuple[str, ...]] | None = None
) -> Report:
    """Examine this machine for runs of the configuration that `overrides` give.

    Each child ends within `limit` seconds, and the whole within a few times that. `tasks` puts another command in the
    place of a child's task. Raises ConfigError for a configuration that is none.
    """
    return Examination(compose(overrides), tuple(overrides), limit, tasks or {}, Event()).report()


@dataclass(frozen=True)
class Examination:
    """The children of one examination; all end once `stop` is set."""

    config: Config
    overrides: tuple[str, ...]
    limit: float
    tasks: Mapping[str, tuple[str, ...]]
    stop: Event

    def report(self) -> Report:
        """Start what needs no GPU at once; meanwhile look at the machine, and try copies and exchange in turn."""
        names = {"files": self.overrides, "torch": (), "encoders": ()}
        with ThreadPoolExecutor(len(names) + 1) as pool:
            try:
                waiting = {name: pool.submit(self.run, name, *arguments) for name, arguments in names.items()}
                return pool.submit(self._report, waiting).result()  # a signal here interrupts no start of a child
            finally:
                self.stop.set()  # after a signal the children end now

    def _report(self, waiting: Mapping[str, Future[Ended]]) -> Report:
        machine = self.run("machine")
        topology, found = self._topology(machine)
        merged, setting = settings(os.environ), os.environ.get("CUDA_VISIBLE_DEVICES")
        device = self.config.runtime.device
        shown = topology.visible(setting) if topology else None
        gpus = len(shown.devices) if shown and device != "cpu" else 0
        if topology and shown:
            found += [*check_gpus(topology, setting, device), *check_host(topology, gpus)]
            found += check_links(shown, merged) if gpus else ()
        found += [*check_environment(merged), *check_packages()]
        probed, ways = self._probe(gpus, merged)
        found += [*self._told(waiting, shown), *probed, check_port()]
        predicted = predict_transport(shown, merged).text() if shown and gpus else None
        transport = {"predicted": predicted, "seen": list(ways)}
        return Report(tuple(found), machine.value("recording"), topology, shown, transport)

    def run(self, task: str, *arguments: str) -> Ended:
        """One child alone."""
        return run_children([self._child(task, arguments)], self.limit, self.stop)[0]

    def _child(self, task: str, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Child:
        command = self.tasks.get(task, (*CHILD, str(self.limit), task))
        return Child((*command, *arguments), environ or {})

    def _topology(self, machine: Ended) -> tuple[Topology | None, list[Finding]]:
        """The machine, or a finding that says why it cannot be read."""
        recording = machine.value("recording")
        remedy = "nvidia-smi and dmesg say more; a driver that hangs needs a reboot"
        if recording is None:
            return None, [Finding("gpus", "error", f"the driver cannot be asked: {machine.why(self.limit)}", remedy)]
        try:
            return replay(recording), []
        except ConfigError as error:
            return None, [Finding("gpus", "error", str(error), remedy)]

    def _told(self, waiting: Mapping[str, Future[Ended]], shown: Topology | None) -> Iterator[Finding]:
        """What the files, torch and the encoders are, from their children."""
        ended = {name: future.result() for name, future in waiting.items()}
        why = {name: child.why(self.limit) for name, child in ended.items() if not child.fine}
        facts = ended["torch"].value("torch") and ended["torch"].said[-1]
        if facts and shown:
            yield from check_torch(facts, shown, self.config.runtime.device)
        elif not facts:
            yield Finding("torch", "error", f"torch cannot be used: {why.get('torch')}", "pip install torch")
        if "encoders" in why:
            yield Finding("encoders", "error", f"no film can be written: {why['encoders']}", "pip install av")
        else:
            av = ended["encoders"].value("av")
            yield Finding("encoders", "ok", f"libx264 and aac encode a frame and its sound (PyAV {av})")
        yield from (Finding(**said["finding"]) for said in ended["files"].said if "finding" in said)
        if "files" in why:
            what = f"the model files or folders cannot be looked at: {why['files']}"
            yield Finding("files", "error", what, "a network disk that is gone does this; look at `mount` and `df`")

    def _probe(self, gpus: int, merged: Mapping[str, str]) -> tuple[list[Finding], tuple[str, ...]]:
        """Copies and all-to-all, over NCCL where there are GPUs for it; and the transports that NCCL told."""
        found = [*check_copies(self.run("copies"), self.limit)] if gpus else []
        if gpus < 2:
            ended, _ = self._exchange("cpu", GLOO_RANKS)
            return [*found, check_exchange(ended, None, self.limit, "gloo", ())], ()
        ended, ways = self._exchange("cuda", gpus)
        again = None
        if not right(ended) and merged.get("NCCL_P2P_DISABLE") != "1":
            again, _ = self._exchange("cuda", gpus, {"NCCL_P2P_DISABLE": "1"})
        return [*found, check_exchange(ended, again, self.limit, "NCCL", ways)], ways

    def _exchange(
        self, kind: str, world: int, environ: Mapping[str, str] | None = None
    ) -> tuple[tuple[Ended, ...], tuple[str, ...]]:
        """All ranks of an all-to-all, and the transports that NCCL told in its logs.

        Between its choice and their meeting another process may take the port: they meet at another one then.
        """
        for _ in range(MEETINGS):
            ended, ways = self._meet(kind, world, free_port(), environ)
            if not any(TAKEN in child.words for child in ended):
                break
        return ended, ways

    def _meet(
        self, kind: str, world: int, port: int, environ: Mapping[str, str] | None
    ) -> tuple[tuple[Ended, ...], tuple[str, ...]]:
        patience = str(self.limit * PATIENCE)
        with tempfile.TemporaryDirectory(prefix="h3dist-doctor-") as folder:
            told = NCCL_TELLS | {"NCCL_DEBUG_FILE": f"{folder}/nccl.%p"}
            ranks = [
                self._child("exchange", (kind, patience), rank_environ(rank, world, port) | told | dict(environ or {}))
                for rank in range(world)
            ]
            return run_children(ranks, self.limit, self.stop), seen_ways(Path(folder))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def check_port() -> Finding:
    """Whether ranks can meet on this machine."""
    try:
        port = free_port()
    except OSError as error:
        remedy = "end what holds the ports; in a container, give it a network with a loopback"
        return Finding("port", "error", f"no port of 127.0.0.1 can be opened: {error.strerror}", remedy)
    return Finding("port", "ok", f"a port of 127.0.0.1 can be opened ({port})")
