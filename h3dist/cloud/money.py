"""Budget and deadline: what they allow, and the thread that ends the rental when they are used up."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from h3dist.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What the user allows: dollars for the whole job over all its pods, and seconds from its start."""

    budget: float
    deadline: float

    def __post_init__(self) -> None:
        for name, value in (("--budget", self.budget), ("--deadline", self.deadline)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be more than 0, not {value}")

    def lifetime(self, price: float | None, spent: float = 0.0, elapsed: float = 0.0) -> tuple[float, str]:
        """Seconds that a pod of this price may still live, and which of the two limits says so."""
        left = self.deadline - elapsed
        if price:
            by_money = (self.budget - spent) / price * 3600
            if by_money < left:
                return max(by_money, 0.0), f"the budget of ${self.budget:.2f}"
        return max(left, 0.0), f"the deadline of {self.deadline / 60:g} min"

    def most(self, price: float | None) -> float:
        """The most dollars that one pod of this price can cost."""
        return self.budget if price is None else min(self.budget, price * self.deadline / 3600)


class Watchdog(threading.Thread):
    """Calls `act(cause)` once when wall-clock time passes `at`.

    By the wall clock and in short waits: after a laptop slept, it acts at once. It runs beside the main
    thread, so a main thread that hangs does not keep the pod.
    """

    def __init__(self, at: float, cause: str, act: Callable[[str], None]) -> None:
        super().__init__(name="runpod-watchdog", daemon=True)
        self._at, self._cause, self._act = at, cause, act
        self._done = threading.Event()

    def run(self) -> None:
        while (left := self._at - time.time()) > 0:
            if self._done.wait(min(left, 1.0)):
                return
        if not self._done.is_set():
            self._act(self._cause)

    def cancel(self) -> None:
        """The rental is over; do nothing any more."""
        self._done.set()
