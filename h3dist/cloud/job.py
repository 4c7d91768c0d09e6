"""The command on the pod: started under tmux, followed through lost connections, its results brought home."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from h3dist.cloud.failures import ConnectionLost, PodFailed, RunFailed
from h3dist.cloud.pace import Pace
from h3dist.cloud.recipe import Recipe
from h3dist.cloud.ssh import FULL, RemoteError, Ssh, quote
from h3dist.cloud.transfer import fetch
from h3dist.errors import OutputError

LONGEST = 1 << 16  # bytes of a line that is shown as one
PARTIAL = "-name '*.json' -size -16M"  # what is brought home while the run goes on, as a find test


@dataclass
class Job:
    """One command on one pod. Its folder: `results` (where it runs), `log`, `pid`, `code`."""

    ssh: Ssh
    recipe: Recipe
    name: str
    pace: Pace
    show: Callable[[str], None]
    say: Callable[[str], None]
    received: int = field(default=0, init=False)
    _line: bytes = field(default=b"", init=False)

    @property
    def folder(self) -> str:
        return f"{self.recipe.workspace}/runs/{self.name}"

    @property
    def results(self) -> str:
        return f"{self.folder}/results"

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Write the run script and start it in a tmux session of its own."""
        lines = ["#!/usr/bin/env bash", f"cd {quote(self.results)} || exit 90"]
        lines.append(f". {quote(self.recipe.workspace)}/env.sh")
        lines += [f"export {name}={quote(value)}" for name, value in environment.items()]
        # the command's own pid: tmux may leave the script itself unreaped for a while after its end
        lines += [f"{quote(*command)} > ../log 2>&1 &", "echo $! > ../pid || kill $!", "wait $!"]
        lines += ["code=$?", "cp ../log run.log"]
        lines += ["echo $code > ../code.new && mv ../code.new ../code"]
        script = "\n".join(lines) + "\n"
        folder = quote(self.folder)
        write = f"mkdir -p {quote(self.results)} && : > {folder}/log && cat > {folder}/run.sh"
        session = ["tmux", "-S", f"{self.recipe.state}/tmux", "new-session", "-d", "-s", "h3"]
        tmux = quote(*session, f"bash {folder}/run.sh")
        wait = f"for i in $(seq 100); do [ -s {folder}/pid ] && exit 0; sleep 0.1; done; exit 92"
        self._remote("starting the run", f"mkdir -p {quote(self.recipe.state)} && {write}", script.encode())
        self._remote("starting the run", f"{tmux} && {wait}")

    def follow(self, alive: Callable[[], None], partial: Callable[[], None]) -> None:
        """Show the log until the command ends; a lost connection is taken up again where it broke.

        `alive` is called before each new connection and raises when the pod is gone; `partial` is called
        every `pace.sync` seconds. Raises RunFailed with the command's exit code, ConnectionLost when the pod
        does not answer for `pace.lost` seconds.
        """
        last, clock = time.monotonic(), _Every(self.pace.sync, partial)
        while True:
            heard = self.received
            try:
                self._stream(clock)
                code = self._ended()
                break
            except ConnectionLost as error:
                if self.received > heard:
                    last = time.monotonic()
                alive()
                if time.monotonic() - last > self.pace.lost:
                    raise ConnectionLost(f"no connection for {self.pace.lost:g} s: {error}") from None
                self.say(f"connection lost ({error}); the run goes on, connecting again")
                self.ssh.stop.sleep(self.pace.poll)
        self._judge(code)

    def _stream(self, clock: "_Every") -> None:
        folder = quote(self.folder)
        tail = f"tail -c +{self.received + 1} --pid=$(cat {folder}/pid) -s 0.2 -f {folder}/log"
        try:
            self.ssh.pump("following the run", tail, self._take, clock)
        except RemoteError as error:
            raise PodFailed(str(error)) from None

    def _take(self, block: bytes) -> None:
        """Show whole lines; a progress bar's carriage return ends one too, and so does a line without an end."""
        self.received += len(block)
        lines = (self._line + block).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._line = lines.pop()
        if len(self._line) > LONGEST:
            lines, self._line = [*lines, self._line], b""
        for line in lines:
            # what a pod prints must not steer the terminal it is shown on
            self.show("".join(c for c in line.decode("utf-8", "replace") if c.isprintable() or c == "\t"))

    def _ended(self) -> str:
        """Show what is left of the log; the command's exit code as it wrote it, empty when it could not."""
        folder = quote(self.folder)
        settle = f"for i in $(seq 50); do [ -s {folder}/code ] && break; sleep 0.1; done"
        command = f"{settle}; cat {folder}/code 2>/dev/null || echo; tail -c +{self.received + 1} {folder}/log"
        code, _, rest = self._remote("the end of the run", command).partition("\n")
        self._take(rest.encode() + (b"\n" if self._line or (rest and not rest.endswith("\n")) else b""))
        return code.strip()

    def _judge(self, code: str) -> None:
        if code == "0":
            return
        folder = quote(self.folder)
        disk = self._remote("disk", f"df -Pk {quote(self.recipe.workspace)} | tail -1; tail -c 2000 {folder}/log")
        if any(phrase in disk for phrase in FULL) or " 100% " in disk.splitlines()[0]:
            raise OutputError(
                f"the disk of the pod is full ({self.recipe.workspace}); the run ended with {code or '?'}"
            )
        if not code.isdigit():
            raise PodFailed("the run was ended from outside before it could leave an exit code")
        raise RunFailed(f"the command on the pod ended with exit code {code}", int(code))

    def fetch(self, target: Path, partial: bool = False) -> dict[str, str]:
        """Bring the results home, checked; with `partial` only small JSON files that are not being written."""
        return fetch(self.ssh, self.results, target, PARTIAL if partial else "", settled=not partial)

    def _remote(self, what: str, command: str, stdin: bytes | None = None) -> str:
        try:
            return self.ssh.run(what, command, stdin, timeout=120)
        except RemoteError as error:
            if error.disk_full or error.code in (90, 91):
                raise OutputError(f"the disk of the pod is full or read-only: {error}") from None
            raise PodFailed(str(error)) from None


class _Every:
    """Calls `act` when `seconds` have passed since it last did."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self._seconds, self._act, self._last = seconds, act, time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last >= self._seconds:
            self._act()
            self._last = time.monotonic()
