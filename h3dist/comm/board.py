"""Where ranks tell each other that a run has failed: keys of the rendezvous store, read by one thread of
each rank.

A collective cannot carry bad news, since it needs every rank to join it. So the first failure is written to
the store once (the first writer wins), each rank's thread sees it within POLL seconds, and whoever waits in
a collective leaves with that failure. Before a rank blames others for its own wait it calls the roll: every
thread answers with what its rank is at, so that the missing ranks can be named, and told from those that
are merely slow.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

from h3dist import errors
from h3dist.errors import H3Error, RankError

POLL = 0.2  # seconds between looks at the store
PATIENCE = 2.0  # seconds that a living rank may take to answer a roll call
CLOSING = 5.0  # seconds that the thread may take to end
FAREWELL = 1.0  # seconds that a failing rank stays for the others to read why: it may be the store's host
ROLL, FAULT, SEEN = "roll", "fault", "seen"


@dataclass(frozen=True)
class Fault:
    """The first failure of a run, as all ranks tell it."""

    rank: int
    stage: str
    kind: str  # class name of the error
    text: str

    def error(self) -> H3Error:
        """The failure as other ranks raise it: the same class, and so the same exit code, with rank and stage."""
        known = getattr(errors, self.kind, None)
        if not (isinstance(known, type) and issubclass(known, H3Error)):
            known, text = H3Error, f"rank {self.rank}, {self.stage}: {self.kind}: {self.text}"
        else:
            text = self.text if known is RankError else f"rank {self.rank}, {self.stage}: {self.text}"
        error = known(text)
        error.rank, error.stage = self.rank, self.stage
        return error


@dataclass(frozen=True)
class Due:
    """When a collective that a device carries out has to be done, and what to say if it is not."""

    time: float  # of time.monotonic()
    group: str
    ranks: Sequence[int]
    label: str
    cause: str


class Board:
    """One rank's view of the board. Where a run has one rank there is no board."""

    def __init__(self, store: dist.Store, rank: int, world: int, unblock: Callable[[], None] = lambda: None) -> None:
        """`unblock`, called by the thread once the run has failed, frees a host that waits for its device."""
        self._store, self._rank, self._world, self._unblock = store, rank, world, unblock
        self._stage, self._label = "start", "nothing"
        self._begun: dict[str, int] = {}  # collectives, by group
        self._due: Due | None = None
        self._answered = False
        self._fault: Fault | None = None
        self._raised: BaseException | None = None  # the failure as this rank raises it
        self._stop = Event()
        self._thread = Thread(target=self._watch, args=(store.clone(),), name="h3dist-board", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the run has failed, as far as this rank knows."""
        return self._fault is not None

    def stage(self, name: str) -> None:
        """Notes the stage that this rank is in."""
        self._stage = name

    def begin(self, group: str, label: str) -> None:
        """Notes that this rank begins a collective of `group`; raises the run's failure if there is one."""
        self.check()
        self._label = label
        self._begun[group] = self._begun.get(group, 0) + 1

    def expect(self, due: "Due | None") -> None:
        """Has the thread call the roll when `due` is past: for a host that a device may block. None: not any more."""
        self._due = due

    def check(self) -> None:
        """Raises the run's failure, if this rank has heard of one."""
        if self._fault is not None:
            raise self._raisable(self._fault, None)

    def fail(self, error: BaseException, stage: str | None = None) -> BaseException:
        """Writes `error` down as the run's failure unless one is there; gives what this rank has to raise.

        `stage` is where it happened, by default the stage that this rank is in.
        """
        if self._fault is None:
            self._fault = self._post(Fault(self._rank, stage or self._stage, type(error).__name__, str(error)))
        return self._raisable(self._fault, error)

    def lost(self, group: str, ranks: Sequence[int], label: str, cause: str) -> BaseException:
        """The failure of a collective that `ranks` did not finish: calls the roll, names who is missing."""
        answers = self._call_roll(ranks, PATIENCE)
        silent = [rank for rank in ranks if rank not in answers]
        begun = {rank: answer["begun"].get(group, 0) for rank, answer in answers.items()}
        behind = {r: answers[r]["at"] for r in begun if begun[r] < max(begun.values())}
        return self.fail(RankError(f"{self._stage}, {label}: {cause}; {_blame(silent, behind)}"))

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(CLOSING)

    def _raisable(self, fault: Fault, own: BaseException | None) -> BaseException:
        """The failure as this rank raises it, each time the same object; `own` if it is this rank's own error."""
        if self._raised is None:
            self._raised = own if own is not None and fault.rank == self._rank else fault.error()
        return self._raised

    def _post(self, mine: Fault) -> Fault:
        """The failure that the store holds: `mine`, or another rank's that came first."""
        try:
            first = Fault(**json.loads(self._store.compare_set(FAULT, "", json.dumps(asdict(mine)))))
        except dist.DistError:  # the store is gone: nobody is left to tell
            return mine
        self._call_roll(range(self._world), FAREWELL)
        return first

    def _call_roll(self, ranks: Sequence[int], patience: float) -> dict[int, dict[str, Any]]:
        """What each rank answers, as far as it does in time; nothing where the store is gone."""
        deadline = time.monotonic() + patience
        try:
            self._store.set(ROLL, "1")
            self._answer(self._store)
            while True:
                present = [rank for rank in ranks if self._store.check([f"{SEEN}/{rank}"])]
                if len(present) == len(ranks) or time.monotonic() > deadline:
                    return {rank: json.loads(self._store.get(f"{SEEN}/{rank}")) for rank in present}
                time.sleep(POLL / 10)
        except dist.DistError:
            return {}

    def _answer(self, store: dist.Store) -> None:
        """Answers a roll call, once: where this rank is, and how many collectives of each group it has begun."""
        if not self._answered:
            place = {"at": f"{self._stage}, after {self._label}", "begun": dict(self._begun)}
            store.set(f"{SEEN}/{self._rank}", json.dumps(place))
            self._answered = True

    def _watch(self, store: dist.Store) -> None:
        """The thread: answers a roll call, waits for the failure that follows it, keeps the time of `expect`."""
        try:
            while self._fault is None and not self._stop.wait(POLL):
                if store.check([ROLL]):
                    self._answer(store)
                    if store.check([FAULT]):
                        self._fault = Fault(**json.loads(store.get(FAULT)))
                due = self._due
                if due is not None and time.monotonic() > due.time:
                    self.lost(due.group, due.ranks, due.label, due.cause)
        except dist.DistError as error:  # the process that kept the store is gone
            text = f"{self._stage}: the run's rendezvous store is gone ({str(error).splitlines()[0]})"
            self._fault = self._fault or Fault(self._rank, self._stage, "RankError", text)
        if self._fault is not None:
            self._unblock()


def _blame(silent: list[int], behind: dict[int, str]) -> str:
    """In words: which ranks are missing from a collective."""
    parts = [f"no answer from rank {', '.join(map(str, silent))}"] if silent else []
    parts += [f"rank {rank} is missing (it is at {place})" for rank, place in behind.items()]
    return "; ".join(parts) or "no rank is behind the others, so a link between them hangs"
