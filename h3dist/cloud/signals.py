"""Signals while a pod is rented: each becomes an exception, except where stopping would leave a pod behind."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from h3dist.cloud.failures import Stopped

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Gate:
    """Turns the first signal into Stopped; while `held`, remembers it and raises when let go."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._held = 0
        self._why = ""
        self._pending: int | None = None

    @contextmanager
    def caught(self) -> Iterator["Gate"]:
        """Handle SIGINT, SIGTERM and SIGHUP in here; the handlers before are put back."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in CAUGHT}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self, why: str, raises: bool = True) -> Iterator[None]:
        """Let nothing interrupt what runs in here: `why` is said to who tries."""
        self._held += 1
        self._why = why
        try:
            yield
        finally:
            self._held -= 1
            if raises and not self._held and self._pending is not None:
                pending, self._pending = self._pending, None
                raise Stopped(pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._held:
            self._pending = number
            self._say(f"{name} noted: {self._why}")
            return
        raise Stopped(number)
