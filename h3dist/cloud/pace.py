"""Waiting: how long between two looks, and how every wait ends early when the rental must end."""

import threading
import time
from dataclasses import dataclass, fields

from h3dist.cloud.failures import LimitReached


@dataclass(frozen=True)
class Pace:
    """Every wait and patience of a rental, in seconds."""

    poll: float = 5.0  # between two looks at a starting pod
    ready: float = 900.0  # a pod that is not reachable by then is given back
    probe: float = 15.0  # one SSH connection attempt
    lost: float = 300.0  # without any SSH answer, while working, before the connection counts as lost
    missing: float = 45.0  # an API that lists with a lag may not show a new pod for this long
    sync: float = 60.0  # between two fetches of partial results
    retry: float = 1.0  # first pause between two API requests; doubles up to `retry_cap`
    retry_cap: float = 30.0
    request: float = 60.0  # one API request
    capacity: float = 60.0  # between two rounds over all that is allowed
    margin: float = 60.0  # the watchdog acts this long before the money or the time is used up
    grace: float = 600.0  # how much later than this side the pod ends itself
    scale: float = 1.0  # what all of these were multiplied by

    def scaled(self, factor: float) -> "Pace":
        """The same with every wait multiplied; the limit of one request and of one probe stays whole."""
        kept = ("request", "probe")
        return Pace(**{f.name: getattr(self, f.name) * (1 if f.name in kept else factor) for f in fields(self)})


class Stop:
    """Set once, with the cause, when the rental must end; every wait of the main thread looks at it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._cause = ""

    def set(self, cause: str) -> None:
        """Ask for the end; only the first cause is kept."""
        if not self._event.is_set():
            self._cause = cause
            self._event.set()

    @property
    def cause(self) -> str:
        """Why, or an empty string while there is no reason."""
        return self._cause

    def check(self) -> None:
        """Raises LimitReached when the end was asked for."""
        if self._event.is_set():
            raise LimitReached(self._cause)

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until the end is asked for; then raise LimitReached."""
        until = time.monotonic() + seconds
        # short waits, so that a signal handler in the main thread runs at once on every platform
        while (left := until - time.monotonic()) > 0:
            if self._event.wait(min(left, 0.5)):
                break
        self.check()
