"""Memory that GPUs of one machine reach in each other, through torch's symmetric memory, never by NVLink multicast.

Copies run on a stream of their own. Between GPUs the copy engines make them, which leaves all multiprocessors to what
computes; ranks meet in a kernel of one warp.
"""

import os
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from h3dist.comm.copies import Pair
from h3dist.comm.wire import Group

BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for each machine, whatever its containers are called
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
BACKEND = "TORCH_SYMMMEM"  # which of torch's kinds of symmetric memory
GRACE = 15.0  # seconds past a collective's limit until a device gives up waiting: by then ranks have told and left


@dataclass(frozen=True)
class Reach:
    """What one rank says of its GPU, for all to judge alike. `lacks`: why it cannot copy, whoever the others are."""

    machine: str
    gpu: str
    reaches: tuple[str, ...]  # GPUs whose memory it can use
    lacks: str | None = None


class PeerMemory:
    """A buffer in the memory of each GPU of a group, as `Memory`. All ranks make it at once, of one size in bytes."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Takes this rank's own. Raises RuntimeError where there is not so much, or the driver refuses."""
        from torch.distributed._symmetric_memory import _SymmetricMemory

        assert not multicast_asked(os.environ), "refused before"
        self.size, self.buffers, self._device = size, [], device
        # Not from torch's pool for such memory, which would keep what is given back.
        self._mine = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        self._stream = torch.cuda.Stream(device, priority=-1)  # the warp that meets waits for no wave of attention's

    def meet(self, group: Group) -> None:
        """Makes it known to the others, and theirs here. Raises RuntimeError where that fails or one does not come."""
        from torch.distributed._symmetric_memory import rendezvous

        self._handle = rendezvous(self._mine, group.handle.group_name)
        if self._handle is None or self._handle.multicast_ptr:
            raise RuntimeError("torch gives no symmetric memory, or gives it with multicast")
        self.buffers = [self._handle.get_buffer(rank, (self.size,), torch.uint8) for rank in range(group.size)]
        self._patience = int(1000 * (group.limit + GRACE))
        self.rest()

    def rest(self) -> None:
        """Returns once this device has done all that it was given."""
        torch.cuda.synchronize(self._device)

    def copy(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        """See `Memory`. A rank that does not come ends the waiting devices' work GRACE seconds past the limit."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._handle.barrier(channel=0, timeout_ms=self._patience)
            met = self._stream.record_event()

        def wait(_kept: Sequence[Pair] = pairs) -> None:
            torch.cuda.current_stream().wait_event(met)

        return wait


def forbid_multicast(environ: MutableMapping[str, str]) -> None:
    """Sets what keeps torch and NCCL from NVLink multicast, where nothing else is set. Before either begins."""
    for name, value in NO_MULTICAST.items():
        environ.setdefault(name, value)


def multicast_asked(environ: MutableMapping[str, str]) -> str | None:
    """Why symmetric memory might come with multicast, or be of another kind; None where it cannot."""
    for name, value in (*NO_MULTICAST.items(), (BACKEND, "CUDA")):
        found = environ.get(name, "CUDA" if name == BACKEND else "")
        if found != value:
            return f"{name}={found}, and copies are made with {name}={value} alone: NVLink multicast is never used"
    return None


def reach_of(device: torch.device) -> Reach:
    """What this rank's GPU reaches, of those that its process sees."""
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    near = [i for i in others if torch.cuda.can_device_access_peer(device.index, i)]
    machine = BOOT.read_text().strip() if BOOT.exists() else os.uname().nodename
    return Reach(machine, _uuid(device.index), tuple(map(_uuid, near)), multicast_asked(os.environ))


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def why_not_copy(told: Sequence[Reach], groups: Iterable[Sequence[int]]) -> str | None:
    """Why the ranks of some of `groups` cannot copy to each other, by what all `told`; None where all can."""
    for rank, reach in enumerate(told):
        if reach.lacks:
            return f"rank {rank}: {reach.lacks}"
    for ranks in groups:
        first, *others = ranks
        away = [rank for rank in others if told[rank].machine != told[first].machine]
        if away:
            return f"ranks {first} and {away[0]} are on different machines"
        for a in ranks:
            for b in (rank for rank in ranks if rank != a):
                if told[b].gpu not in told[a].reaches:
                    return f"the GPU of rank {a} cannot reach that of rank {b}"
    return None
