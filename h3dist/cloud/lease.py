"""What this machine has rented, on disk: so that a killed client's pods are found again, and the bill added up."""

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from h3dist.errors import ConfigError, OutputError

PREFIX = "h3dist"


class Owner(BaseModel):
    """The process that looks after a pod. `started` tells it from a later process of the same number."""

    host: str
    pid: int
    started: str = ""

    @classmethod
    def of(cls, pid: int) -> "Owner":
        """The process of this number on this machine."""
        return cls(host=socket.gethostname(), pid=pid, started=_start_time(pid))

    @classmethod
    def me(cls) -> "Owner":
        """This process."""
        return cls.of(os.getpid())

    def alive(self) -> bool:
        """Whether it still runs; one on another host is taken to be alive, for nobody here can tell."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return not self.started or _start_time(self.pid) == self.started


def _start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat, in clock ticks since boot; empty where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


class Lease(BaseModel):
    """One rental. Holds no secret. Times are Unix seconds, prices dollars an hour for the whole pod."""

    model_config = ConfigDict(extra="forbid")

    name: str
    api: str
    created: float = Field(default_factory=time.time)
    owner: Owner = Field(default_factory=Owner.me)
    kept: bool = False
    pod_id: str | None = None
    what: str = ""
    gpus: str = ""
    data_center: str | None = None
    price: float | None = None
    ends: float | None = None
    user: str = "root"
    host: str | None = None
    port: int | None = None
    workspace: str = "/workspace/h3dist"

    def spent(self, until: float | None = None) -> float:
        """Dollars so far by the clock; 0 while the price is unknown."""
        return (self.price or 0.0) * max((until or time.time()) - self.created, 0) / 3600

    def left_behind(self) -> bool:
        """Whether nobody looks after it any more: its process is gone, and it was not meant to outlive it."""
        over = self.ends is not None and time.time() > self.ends
        return not self.owner.alive() and (over or not self.kept)


class Store:
    """The folder with the leases: H3_STATE_DIR, else the user's state folder. Private to the user."""

    def __init__(self, root: Path) -> None:
        self.root = root / "runpod"
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise OutputError(f"cannot keep leases in {self.root}: {error.strerror}; set H3_STATE_DIR") from None

    @classmethod
    def default(cls, environ: Mapping[str, str]) -> "Store":
        """The store that the environment names."""
        if named := environ.get("H3_STATE_DIR"):
            return cls(Path(named))
        base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return cls(Path(base) / "h3dist")

    def client_id(self) -> str:
        """Eight hex digits, drawn once: the part of a pod's name that says it is ours."""
        path = self.root / "client-id"
        if not path.exists():
            write_private(path, secrets.token_hex(4))
        return path.read_text().strip()

    def new_name(self) -> str:
        """A name that no other pod has: whose, when, and a random part."""
        stamp = time.strftime("%m%d-%H%M%S", time.gmtime())
        return f"{PREFIX}-{self.client_id()}-{stamp}-{secrets.token_hex(3)}"

    def folder(self, name: str) -> Path:
        """Where a rental's lease and SSH key are."""
        if not name.startswith(f"{PREFIX}-") or "/" in name:
            raise ConfigError(f"{name!r} is not a name of ours; they begin with {PREFIX}-")
        return self.root / name

    def save(self, lease: Lease) -> None:
        folder = self.folder(lease.name)
        folder.mkdir(mode=0o700, exist_ok=True)
        write_private(folder / "lease.json", lease.model_dump_json(indent=1))

    def load(self, name: str) -> Lease:
        """Raises ConfigError when there is no readable lease of this name."""
        try:
            return Lease.model_validate_json((self.folder(name) / "lease.json").read_bytes())
        except (OSError, ValidationError):
            known = ", ".join(lease.name for lease in self.leases()) or "none"
            raise ConfigError(f"no lease {name}; known here: {known}") from None

    def leases(self) -> Iterator[Lease]:
        """Every lease that can be read, oldest first."""
        for path in sorted(self.root.glob(f"{PREFIX}-*/lease.json")):
            try:
                yield Lease.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                # cut short by a crash: the folder's name is the pod's, and that is enough to end it
                yield Lease(name=path.parent.name, api="", owner=Owner(host=socket.gethostname(), pid=2**22 + 1))

    def close(self, lease: Lease, cause: str) -> None:
        """Forget a rental that is over, its SSH key too, and note it in the ledger, unless that was done."""
        if not self.folder(lease.name).exists():
            return
        entry = {"name": lease.name, "what": lease.what, "price": lease.price, "cause": cause}
        entry |= {"created": lease.created, "ended": time.time(), "dollars": round(lease.spent(), 4)}
        with open(self.root / "ledger.jsonl", "a", opener=_private, encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        shutil.rmtree(self.folder(lease.name), ignore_errors=True)

    def announce_end(self, lease: Lease) -> None:
        """Say to the process that looks after a pod that another command is about to end it."""
        write_private(self.folder(lease.name) / "ending", "")

    def ended_elsewhere(self, lease: Lease) -> bool:
        """Whether another command ends this pod, or has ended it."""
        folder = self.folder(lease.name)
        return not folder.exists() or (folder / "ending").exists()

    def ledger(self) -> list[dict[str, object]]:
        """Every rental that is over, oldest first."""
        try:
            lines = (self.root / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600, whole or not at all. Raises OutputError when the disk does not take it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", opener=_private, encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
