"""How a run tells its user how far it is: a bar on a terminal, a line a step elsewhere. Only rank 0 has one."""

import sys
import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

STAGES = {
    "start": "reading the request and the checkpoints' headers",
    "encode": "encoding text, pictures and sound; reading the denoiser's weights",
    "denoise": "running the denoiser",
    "decode": "decoding frames and sound",
}


def announce(stage: str) -> None:
    """Say on stderr that a stage begins; one that is over at once is passed over."""
    if stage in STAGES:
        with suppress(OSError):
            print(f"h3dist: {stage}: {STAGES[stage]}", file=sys.stderr, flush=True)


class Steps:
    """Progress over `total` steps of one kind; `seconds` keeps the time of each. Silent where not `shown`.

    `spent`: seconds that the first step had taken before.
    """

    def __init__(
        self, total: int, *, shown: bool, stage: str = "denoise", step: str = "step", spent: float = 0.0
    ) -> None:
        self.total = total
        self._spent = spent
        self._step = step
        self.seconds: list[float] = []
        self._shown = shown
        self._last = time.perf_counter()
        console = Console(stderr=True)
        self._bar = _bar(console) if shown and console.is_terminal else None
        self._task = self._bar.add_task(stage, total=total, speed="") if self._bar else None

    def __enter__(self) -> "Steps":
        if self._bar:
            self._bar.start()
        self._last = time.perf_counter() - self._spent
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self) -> None:
        """One step is done."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        if self._bar:
            self._bar.update(self._task, advance=1, speed=self._speed())
        elif self._shown:
            with suppress(OSError):  # hours of work do not end because a log is full or its reader left
                print(f"h3dist: {self._told()}", file=sys.stderr, flush=True)

    def _told(self) -> str:
        return f"{self._step} {len(self.seconds)}/{self.total}, {self._speed()}"

    def _speed(self) -> str:
        """Seconds a step without the first, which warms up, and the time left at that rate."""
        steady = self.seconds[1:] or self.seconds
        mean = sum(steady) / len(steady)
        return f"{mean:.2f} s a {self._step}, {mean * (self.total - len(self.seconds)):.0f} s left"


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TextColumn("{task.fields[speed]}"), console=console)
