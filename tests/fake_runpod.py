"""RunPod on loopback: a real HTTP server with the routes of REST v1 and v2, and a real sshd for every pod.

A pod's container is a process tree: the start command of the request, run for real, in an environment like the
real one (PUBLIC_KEY, RUNPOD_POD_ID, a key of the pod's own). Faults are switched on by tests.
"""

import getpass
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fake_runpod_http import Fault, Handler

USER_KEY = "rpa_TESTKEY7d1f3c9b5e8a4f0e2d6c1b9a8f7e"
HF_TOKEN = "hf_TESTTOKEN4a8c2e6f0b1d3957"
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
ROOT = Path(__file__).resolve().parent.parent
START = """#!/usr/bin/env bash
set -eu
printf '%s\\n' "$PUBLIC_KEY" >"$FAKE_HOME/authorized_keys"
exec {sshd} -D -e -f "$FAKE_HOME/sshd_config"
"""
SSHD_CONFIG = """Port {port}
ListenAddress 127.0.0.1
HostKey {home}/host_key
AuthorizedKeysFile {home}/authorized_keys
AllowUsers {user}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
MaxSessions 100
KexAlgorithms curve25519-sha256
LogLevel ERROR
SetEnv PATH={path} HOME={home}
"""
HF = """#!/bin/sh
# hf download REPO FILE --revision R --local-dir DIR: copies from the fake hub, and keeps what token it was given
[ -z "${{HF_TOKEN_PATH:-}}" ] || cat "$HF_TOKEN_PATH" > {home}/token-seen
repo=$2; shift 2
if [ "$1" = --include ]; then folder=${{2%/*}}; shift; else folder=; file=$1; fi
shift
[ "$1" = --revision ] && [ "$3" = --local-dir ] || exit 2
if [ -n "$folder" ]; then mkdir -p "$4/$folder" && cp {home}/hub/"$repo"/"$folder"/* "$4/$folder/"
else mkdir -p "$4/$(dirname "$file")" && cp {home}/hub/"$repo"/"$file" "$4/$file"; fi
"""


@dataclass
class FakePod:
    id: str
    name: str
    body: dict[str, Any]
    key: str
    home: Path
    port: int
    price: float
    gpu: str
    count: int
    place: str
    created: float = field(default_factory=time.time)
    container: subprocess.Popen[bytes] | None = None
    terminated: bool = False
    stopped: bool = False

    def state(self, provision: float) -> str:
        if self.terminated:
            return "TERMINATED"
        if self.stopped or (self.container and self.container.poll() is not None):
            return "EXITED"
        age = time.time() - self.created
        if not self.container:
            return "PROVISIONING" if age < provision / 2 else "STARTING"
        return "RUNNING"


class FakeRunpod:
    """`with FakeRunpod(folder) as cloud:` serves until the block ends, and then ends every pod."""

    def __init__(self, folder: Path, version: str = "v2") -> None:
        self.folder, self.version = folder, version
        self.pods: dict[str, FakePod] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.key = USER_KEY
        self.secrets = {"hf": HF_TOKEN}
        self.stock: Callable[[str, int, str, str], bool] = lambda gpu, count, cloud, place: True
        self.no_stock_status = 400 if version == "v2" else 500
        self.price = 2.0  # dollars an hour for a GPU
        self.tell_price = True
        self.provision = 0.2
        self.list_lag = 0.0
        self.never_ready = False
        self.no_address = False
        self.ignore_delete = False
        self.pod_keys_work = True
        self.volume = {"vol1": "EU-RO-1"}
        self.bin = folder / "bin"
        self.workspace = folder / "workspace"
        self.state = folder / "state"
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "FakeRunpod":
        self.bin.mkdir(parents=True)
        self._script("h3dist", f'#!/bin/sh\nexec {sys.executable} -m h3dist "$@"\n')
        self._script("hf", HF.format(home=self.folder))
        self._script("start.sh", START.format(sshd=SSHD))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd run by root wants it
        cloud = self

        class Bound(Handler):
            fake = cloud

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/{self.version}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for pod in list(self.pods.values()):
            self.terminate(pod)
        self._server.shutdown()
        self._server.server_close()

    def _script(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def recipe(self, **changes: Any) -> Path:
        """A recipe file for this image; `changes` override."""
        fields = {
            "start": [str(self.bin / "start.sh")], "user": getpass.getuser(), "workspace": str(self.workspace),
            "mount": str(self.folder), "state": str(self.state), "python": sys.executable, "package": "image",
            "doctor": [sys.executable, "-c", "print('{\"devices\": []}')"], "checkpoints": [],
        }  # fmt: skip
        path = self.folder / f"recipe-{secrets.token_hex(2)}.json"
        path.write_text(json.dumps(fields | changes))
        return path

    def fail(self, method: str, path: str, kind: str, times: int = 1) -> None:
        self.faults.append(Fault(method, path, kind, times))

    @property
    def running(self) -> list[FakePod]:
        """Pods that cost money now."""
        return [pod for pod in self.pods.values() if not pod.terminated]

    def posts(self) -> int:
        return sum(method == "POST" for method, _, _ in self.requests)

    # ---- pods ----

    def make(self, body: dict[str, Any], gpu: str, count: int, place: str, start: list[str]) -> FakePod:
        with self._lock:
            pod_id = secrets.token_hex(6)
            home = self.folder / f"pod-{pod_id}"
            home.mkdir()
            pod = FakePod(
                pod_id, body["name"], body, f"rpa_pod_{secrets.token_hex(12)}", home, _free_port(),
                self.price * count, gpu, count, place,
            )  # fmt: skip
            self.pods[pod_id] = pod
            thread = threading.Thread(target=self._boot, args=(pod, start), daemon=True)
            thread.start()
            self._threads.append(thread)
            return pod

    def _boot(self, pod: FakePod, start: list[str]) -> None:
        time.sleep(self.provision)
        if self.never_ready or pod.terminated:
            return
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(pod.home / "host_key")]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        path = f"{self.bin}:{os.environ['PATH']}"
        config = SSHD_CONFIG.format(port=pod.port, home=pod.home, user=getpass.getuser(), path=path)
        (pod.home / "sshd_config").write_text(config)
        (pod.home / ".bashrc").write_text("cat <<END\n  Welcome to the pod!\nEND\n")  # images greet even scripts
        env = {"PATH": path, "HOME": str(pod.home), "FAKE_HOME": str(pod.home), "LANG": "C.UTF-8"}
        env |= {name: self._reveal(value) for name, value in pod.body.get("env", {}).items()}
        env["RUNPOD_POD_ID"] = pod.id
        if self.pod_keys_work:
            env["RUNPOD_API_KEY"] = pod.key
        with self._lock, open(pod.home / "container.log", "wb") as log:
            if not pod.terminated:
                pod.container = subprocess.Popen(
                    start, env=env, cwd=pod.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip

    def _reveal(self, value: str) -> str:
        return re.sub(r"\{\{ RUNPOD_SECRET_(\w+) \}\}", lambda m: self.secrets[m[1]], value)

    def terminate(self, pod: FakePod) -> None:
        """What the cloud does: the container and all in it end, and its disk is gone; a network volume stays."""
        with self._lock:
            if pod.terminated:
                return
            pod.terminated = True
            self.kill(pod)
            shutil.rmtree(self.state, ignore_errors=True)
            if not self._on_volume(pod) and not self.workspace.is_mount():
                shutil.rmtree(self.workspace, ignore_errors=True)

    def _on_volume(self, pod: FakePod) -> bool:
        return bool(pod.body.get("networkVolumeId") or pod.body.get("mounts", {}).get("network"))

    def kill(self, pod: FakePod) -> None:
        """End every process of a container."""
        socket_path = self.state / "tmux"
        if socket_path.exists():
            subprocess.run(["tmux", "-S", str(socket_path), "kill-server"], capture_output=True, check=False)
        if pod.container:
            for pid in [*descendants(pod.container.pid), pod.container.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pod.container.wait()

    def interrupt(self, pod: FakePod) -> None:
        """The owner takes an interruptible machine back: everything on it ends, the pod is EXITED."""
        with self._lock:
            pod.stopped = True
            self.kill(pod)
            shutil.rmtree(self.state, ignore_errors=True)
            if not self._on_volume(pod):
                shutil.rmtree(self.workspace, ignore_errors=True)

    def cut(self, pod: FakePod, for_good: bool = False) -> int:
        """Cut every SSH connection; the server itself goes too when it is for good. Returns how many."""
        assert pod.container
        cut = 0
        for pid in descendants(pod.container.pid):
            line = Path(f"/proc/{pid}/cmdline")
            text = line.read_bytes().decode(errors="replace") if line.exists() else ""
            if text.startswith("sshd:") and ("[priv]" in text or "@notty" in text or for_good):
                cut += 1
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return cut


def descendants(pid: int) -> list[int]:
    """Every process below this one, the deepest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    for child in children.get(pid, []):
        found += [*descendants(child), child]
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Serve by hand, for trying the command line: prints what to export."""
    import tempfile

    version = sys.argv[1] if len(sys.argv) > 1 else "v2"
    with (
        tempfile.TemporaryDirectory(prefix="fake-runpod-") as folder,
        FakeRunpod(Path(folder), version) as cloud,
    ):
        print(f"export RUNPOD_API_KEY={USER_KEY} H3_RUNPOD_API={cloud.url}")
        print(f"# --recipe {cloud.recipe()}", flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)


if __name__ == "__main__":
    main()
