"""Variables that change what NCCL, CUDA and gloo do: what each means for a run. None is ever set here."""

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from h3dist.doctor.finding import Finding
from h3dist.topology.transport import PATHS, read_level

WATCHED = re.compile(r"(TORCH_)?NCCL_|GLOO_|CUDA_|NVIDIA_(VISIBLE|DRIVER)")
CONF_FILES = (Path("~/.nccl.conf"), Path("/etc/nccl.conf"))
UNSET = "unset it"


@dataclass(frozen=True)
class Advice:
    """What to say of a variable where `applies` holds for its value."""

    name: str
    applies: Callable[[str], bool]
    level: str
    meaning: str
    remedy: str = UNSET


def on(value: str) -> bool:
    return value not in ("", "0")


def one(value: str) -> bool:
    return value == "1"


def off(value: str) -> bool:
    return value == "0"


ADVICE = (
    Advice(
        "NCCL_P2P_DISABLE",
        one,
        "warning",
        "no GPU reaches another's memory, so all exchange goes through the host",
        "unset it where the copies below arrive whole",
    ),
    Advice(
        "NCCL_P2P_LEVEL",
        lambda value: read_level(value) is None,
        "warning",
        "NCCL knows no such level and ignores it",
        f"one of {', '.join(PATHS)}",
    ),
    Advice("NCCL_SHM_DISABLE", one, "warning", "GPUs without P2P talk over the network, inside one machine too"),
    Advice("NCCL_CUMEM_ENABLE", off, "note", "P2P goes by the older IPC handles instead of CUMEM"),
    Advice("NCCL_DEBUG", lambda value: value in ("INFO", "TRACE"), "note", "every rank prints much"),
    Advice("NCCL_ALGO", on, "warning", "NCCL may not choose its algorithm, and some collectives may fail"),
    Advice("NCCL_PROTO", on, "warning", "NCCL may not choose its protocol, which can cost most of the bandwidth"),
    Advice(
        "NCCL_ASYNC_ERROR_HANDLING",
        lambda _: True,
        "note",
        "an old name",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING is today's; torchrun sets it",
    ),
    Advice("NCCL_BLOCKING_WAIT", on, "note", "an old name of TORCH_NCCL_BLOCKING_WAIT"),
    Advice("TORCH_NCCL_ASYNC_ERROR_HANDLING", off, "warning", "torch does not end collectives that hang"),
    Advice("TORCH_NCCL_BLOCKING_WAIT", on, "warning", "the host waits for every single collective"),
    Advice("CUDA_LAUNCH_BLOCKING", on, "warning", "the host waits for every single kernel"),
    Advice("CUDA_MODULE_LOADING", lambda value: value == "EAGER", "note", "every kernel is loaded at the start"),
)


def check_environment(environ: Mapping[str, str], interfaces: Sequence[str] | None = None) -> Iterator[Finding]:
    """A finding for each setting that matters, and one that lists all that is set. `environ`: see `settings`.

    `interfaces` are the names of the network's; None: this machine's.
    """
    names = [name for _, name in socket.if_nameindex()] if interfaces is None else interfaces
    for advice in ADVICE:
        value = environ.get(advice.name)
        if value is not None and advice.applies(value):
            what = f"{advice.name}={value}: {advice.meaning}"
            yield Finding("environment", advice.level, what, advice.remedy)
    yield from _interfaces(environ, names)
    told = [f"{name}={value}" for name, value in sorted(environ.items()) if WATCHED.match(name)]
    yield Finding("environment", "ok", f"set: {', '.join(told)}" if told else "nothing is set for NCCL, gloo or CUDA")


def _interfaces(environ: Mapping[str, str], names: Sequence[str]) -> Iterator[Finding]:
    """NCCL takes beginnings, whole names after "=", exclusions after "^"; gloo takes whole names."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        exact = variable.startswith("GLOO") or value.startswith("=")
        asked = [part for part in value.removeprefix("=").split(",") if part]
        if value.startswith("^") or not asked:
            continue
        fits = [name for name in names if any(name == part if exact else name.startswith(part) for part in asked)]
        if not fits:
            what = f"{variable}={value} names no network interface; here are {', '.join(names)}"
            yield Finding("environment", "error", what, "name one of them, or unset it")


def settings(environ: Mapping[str, str], files: Sequence[Path] = CONF_FILES) -> dict[str, str]:
    """What counts: the environment, and what NCCL reads beside it, the user's file and then the system's."""
    merged: dict[str, str] = {}
    for path in reversed(files):
        merged |= _read_conf(path.expanduser())
    return merged | dict(environ)


def _read_conf(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}
