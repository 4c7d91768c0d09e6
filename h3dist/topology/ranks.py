"""This process among all of a run: the only reader of the variables that torchrun sets."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from h3dist.errors import ConfigError
from h3dist.topology.host import cores


@dataclass(frozen=True)
class Ranks:
    """This process among all of a run: counts are at least 1, ranks start at 0."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    local_world: int = 1
    rendezvous: bool = False  # MASTER_ADDR and MASTER_PORT say where the ranks meet
    elastic: bool = False  # a torchrun agent started this process and waits for it


def read_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The rank variables as torchrun sets them; a process without them is rank 0 of 1.

    Raises `ConfigError` where they are no numbers, contradict each other, or name no place to meet.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, local_rank, world, local_world = (
        _count(name, environ.get(name, default)) for name, default in zip(names, "0011", strict=True)
    )
    if rank >= world or local_rank >= local_world or local_world > world:
        shown = ", ".join(f"{name}={environ.get(name, 'unset')}" for name in names)
        raise ConfigError(f"the rank variables contradict each other: {shown}")
    rendezvous = "MASTER_ADDR" in environ and "MASTER_PORT" in environ
    if world > 1 and not rendezvous:
        raise ConfigError(f"WORLD_SIZE={world} without MASTER_ADDR and MASTER_PORT; torchrun sets all")
    return Ranks(rank, local_rank, world, local_world, rendezvous, "TORCHELASTIC_RUN_ID" in environ)


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment is no number; torchrun sets it")
    return int(text)


def rank_environ(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables that make a process rank `rank` of `world` on this machine, meeting at `port`, without torchrun."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, (rank, rank, world, world, "127.0.0.1", port)), strict=True))


def threads_per_rank(setting: str, local_world: int) -> int:
    """CPU threads for each of `local_world` ranks: `runtime.threads`, where "auto" shares out the cores.

    Raises `ConfigError` for a setting that is neither "auto" nor a whole number of at least 1.
    """
    if setting == "auto":
        return max(1, cores() // local_world)
    if not setting.isdecimal() or int(setting) < 1:
        raise ConfigError(f"runtime.threads={setting}: must be auto or a whole number, 1 or more")
    return int(setting)
