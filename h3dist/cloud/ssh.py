"""SSH to a pod through the system's own client: a key made for it alone, its host key pinned on first use."""

import os
import selectors
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from h3dist.cloud.failures import CloudError, ConnectionLost
from h3dist.cloud.keys import clean_environment
from h3dist.cloud.pace import Stop
from h3dist.errors import MissingDependency, OutputError

SSH_FAILED = 255
MARK = b"\x1eh3dist\x1e"  # where a command's own output begins: a shell may greet before it
SAY_MARK = r"printf '\036h3dist\036'; "
FULL = ("No space left on device", "Disk quota exceeded", "Wrote only")  # the last is tar's


class RemoteError(CloudError):
    """A command ran on the pod and failed. `code` is its exit code, `tail` the end of its error output."""

    def __init__(self, what: str, code: int, tail: str) -> None:
        full = any(phrase in tail for phrase in FULL)
        super().__init__(f"{what}: {'the disk of the pod is full; ' if full else ''}exit code {code}: {tail}")
        self.code, self.tail, self.disk_full = code, tail, full


def make_key(folder: Path) -> str:
    """A new ed25519 pair in `folder` (mode 0700); returns the public half, one line."""
    if shutil.which("ssh-keygen") is None or shutil.which("ssh") is None:
        raise MissingDependency("ssh and ssh-keygen are needed: install the OpenSSH client")
    path = folder / "id_ed25519"
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", folder.name, "-f", str(path)]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True, check=False)
    if done.returncode:
        raise OutputError(f"cannot make an SSH key in {folder}: {done.stderr.strip()}")
    return path.with_suffix(".pub").read_text().strip()


@dataclass(frozen=True)
class Ssh:
    """One pod's shell. Calls share the connection that `open_line` keeps; without it, or when it is lost, each
    makes its own.
    """

    host: str
    port: int
    user: str
    folder: Path
    stop: Stop
    timeout: float = 15.0
    control: Path | None = None  # the socket of the shared connection

    def argv(self, command: str) -> list[str]:
        """The ssh command line; it holds no secret."""
        options = {
            "BatchMode": "yes",
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "accept-new",
            "UserKnownHostsFile": str(self.folder / "known_hosts"),
            "GlobalKnownHostsFile": "/dev/null",
            "ConnectTimeout": str(max(1, round(self.timeout))),
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
            "ForwardAgent": "no",
            "LogLevel": "ERROR",
        }
        flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        if self.control:
            flags += ["-S", str(self.control)]
        where = ["-p", str(self.port), "-i", str(self.folder / "id_ed25519"), f"{self.user}@{self.host}"]
        # -F none: the user's own configuration may forward agents or environment
        return ["ssh", "-F", "none", "-T", *flags, *where, command]

    def start(self, command: str, stdin: IO[bytes] | int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start `command` on the pod; the caller reads its output and waits for it."""
        return subprocess.Popen(
            self.argv(SAY_MARK + command),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(os.environ),
            start_new_session=True,  # the terminal's Ctrl-C is ours to handle, not ssh's
        )

    def run(self, what: str, command: str, stdin: bytes | None = None, timeout: float | None = None) -> str:
        """Run `command` and return its output.

        Raises RemoteError with its exit code, ConnectionLost when ssh itself failed or `timeout` seconds
        passed, LimitReached when the rental must end. `what` names the step in the message.
        """
        process = self.start(command, subprocess.PIPE if stdin is not None else subprocess.DEVNULL)
        try:
            output, errors = self.talk(process, stdin, what, timeout)
        finally:
            end(process)
        self.judge(what, process.returncode, errors)
        return output.partition(MARK)[2].decode("utf-8", "replace")

    def talk(
        self, process: subprocess.Popen[bytes], stdin: bytes | None, what: str, timeout: float | None
    ) -> tuple[bytes, bytes]:
        """Both outputs of a process that was started here, with the rental's limits kept meanwhile."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return process.communicate(stdin, timeout=0.2)
            except subprocess.TimeoutExpired:
                stdin = None  # it was taken over at the first call
                self.stop.check()
            if until is not None and time.monotonic() > until:
                raise ConnectionLost(f"{what}: no end after {timeout:g} s")

    def judge(self, what: str, code: int, errors: bytes) -> None:
        """Raise what an exit code of ssh means; nothing for 0. Once the rental must end, that is why."""
        if code:
            self.stop.check()
        tail = errors.decode("utf-8", "replace").strip()[-600:]
        if code == SSH_FAILED or code < 0:
            changed = "IDENTIFICATION HAS CHANGED" in tail or "Host key verification failed" in tail
            hint = "the pod's host key is not the one pinned at first contact: " if changed else ""
            raise ConnectionLost(f"{what}: {hint}{tail or f'ssh ended with {code}'}")
        if code:
            raise RemoteError(what, code, tail)

    def pump(
        self,
        what: str,
        command: str,
        take: Callable[[bytes], None],
        idle: Callable[[], None] = lambda: None,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
    ) -> None:
        """Hand every block of the output of `command` to `take` as it comes; and call `idle` several times a second.

        Raises as `run` does.
        """
        process = self.start(command, stdin)
        assert process.stdout and process.stderr
        errors, take = bytearray(), _after_mark(take)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                selector.register(process.stderr, selectors.EVENT_READ)
                while selector.get_map():
                    ready = selector.select(timeout=0.2)
                    self.stop.check()
                    for key, _ in ready:
                        block = os.read(key.fd, 1 << 16)
                        if not block:
                            selector.unregister(key.fileobj)
                        elif key.fileobj is process.stdout:
                            take(block)
                        else:
                            errors += block
                    idle()
            code = process.wait(timeout=10)
        finally:
            end(process)
        self.judge(what, code, bytes(errors))


def _after_mark(take: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """`take`, for what comes after the mark."""
    before: bytearray | None = bytearray()

    def pass_on(block: bytes) -> None:
        nonlocal before
        if before is None:
            take(block)
            return
        before += block
        _, mark, after = before.partition(MARK)
        if mark:
            before = None
            if after:
                take(bytes(after))

    return pass_on


class Line:
    """A connection that is kept open, so that the calls of `ssh` need no handshake each."""

    def __init__(self, ssh: Ssh) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="h3-"))  # a socket's path must be short
        self.ssh = replace(ssh, control=self._folder / "s")
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> Ssh:
        """The shell over the shared connection. Not being able to share one is no error: it is slower then."""
        argv = self.ssh.argv("")[:-1]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(
            [argv[0], "-M", "-N", *argv[1:]], env=clean_environment(os.environ), start_new_session=True, **quiet
        )  # fmt: skip
        until = time.monotonic() + self.ssh.timeout
        while not (self._folder / "s").exists() and self._process.poll() is None and time.monotonic() < until:
            self.ssh.stop.sleep(0.05)
        return self.ssh

    def close(self) -> None:
        """End the connection and remove its socket."""
        if self._process:
            end(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a child that still runs, and close its pipes."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe and not pipe.closed:
            try:
                pipe.close()
            except BrokenPipeError:
                continue


def quote(*parts: str) -> str:
    """A shell command from words."""
    return shlex.join(parts)
