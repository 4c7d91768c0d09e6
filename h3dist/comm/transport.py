"""By what heads move between ranks: the group's collectives, or copies where they are asked for and all ranks can.

All ranks of a run take the same way. Each says what its GPU reaches; then they take memory, and then they meet in it,
and after each of these steps all go on, or all stay with the collectives because one could not.
"""

import json
from collections.abc import Callable
from dataclasses import asdict

import torch

from h3dist.comm.copies import Copying, CopyWire, Slots
from h3dist.comm.peers import PeerMemory, Reach, reach_of, why_not_copy
from h3dist.comm.wire import NcclWire, Wire, in_short
from h3dist.errors import ConfigError
from h3dist.plan import Layout, Plan
from h3dist.plan.slots import slots_of

LABEL = "transport"


class Transport:
    """One rank's part in it, and its memory: taken when it is first needed, and again only where a run needs more."""

    # What it is made of: other memory than GPUs' has a subclass of its own.
    reach: Callable[[torch.device], Reach] = staticmethod(reach_of)
    memory: Callable[[int, torch.device], PeerMemory] = PeerMemory
    wire: type[Copying] = CopyWire
    over: type[Wire] = NcclWire  # a group's own wire, where its ranks may be able to copy

    def __init__(self, collect: Callable[[str, str], list[str]], layout: Layout, device: torch.device) -> None:
        """`collect` gives every rank's text to all."""
        self._collect, self._layout, self._device = collect, layout, device
        self._memory: PeerMemory | None = None
        self.told = "collective"  # how heads move, and why not by copies where that was asked for

    @property
    def held(self) -> int:
        """Bytes of memory that peers reach, which torch's allocator does not count."""
        return self._memory.size if self._memory else 0

    def wire_for(self, sp: Wire, plan: Plan) -> Wire:
        """What moves the heads of `plan` in this rank's sequence group, whose own wire is `sp`. All ranks call it.

        Raises ConfigError on all of them where copies were asked for and some rank cannot make them.
        """
        asked, rings = plan.exchange.on(plan.layout).transport, slots_of(plan)
        self.told = "collective"
        if asked == "collective":
            return sp
        why = self._prepare(sp, max(ring.stop for ring in rings.values()))
        if why is None:
            self.told = "copy"
            return self.wire(sp.group, sp.counted, Slots(self._memory, sp.group.index, rings))
        if asked == "copy":
            raise ConfigError(f"exchange.transport=copy: {why}; use exchange.transport=auto or collective")
        self.told = f"collective: {why}"
        return sp

    def _prepare(self, sp: Wire, size: int) -> str | None:
        """Sees that every rank has `size` bytes that its peers reach, with nothing under way there; else why not."""
        if not isinstance(sp, self.over):
            return "copies are made between GPUs that have NCCL for all else, and these ranks have gloo"
        if self._memory is not None and self._memory.size >= size:
            return self._step(self._memory.rest)
        told = self._collect(LABEL, json.dumps(asdict(self.reach(self._device))))
        why = why_not_copy([Reach(**json.loads(text)) for text in told], self._layout.sp_groups())
        return why or self._step(lambda: self._take(size)) or self._step(lambda: self._meet(sp))

    def _take(self, size: int) -> None:
        self._memory = None  # what there was goes before more comes
        self._memory = self.memory(size, self._device)

    def _meet(self, sp: Wire) -> None:
        assert self._memory is not None
        self._memory.meet(sp.group)

    def _step(self, work: Callable[[], None]) -> str | None:
        """Does `work` on every rank. Gives why the first one of them could not; then none keeps its memory."""
        try:
            work()
            mine = None
        except RuntimeError as error:
            mine = in_short(error)
        said = [json.loads(text) for text in self._collect(LABEL, json.dumps(mine))]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
        if failed:
            self._memory = None
        return failed[0] if failed else None
