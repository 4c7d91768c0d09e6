"""What the cloud's answers mean to us: a pod, a GPU type, a volume. One form, whatever the API version."""

from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

ENDED = ("EXITED", "ERROR", "TERMINATED")


def _amount(value: Any) -> float | None:
    """A number that may come as text, as null, or as an empty string; nonsense and infinity are None."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if isfinite(number) and number >= 0 else None


def _whole(value: Any) -> int | None:
    number = _amount(value)
    return int(number) if number is not None else None


def _time(value: Any) -> Any:
    """An ISO 8601 time; the older API writes Go's "2026-11-29 12:00:00.0 +0000 UTC" as well."""
    if not isinstance(value, str):
        return None
    text = value.removesuffix(" UTC").replace(" +0000", "+00:00")
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


Amount = Annotated[float | None, BeforeValidator(_amount)]
Whole = Annotated[int | None, BeforeValidator(_whole)]
Moment = Annotated[datetime | None, BeforeValidator(_time)]


class Pod(BaseModel):
    """A rented machine as the API last described it. `price` is dollars an hour for the whole pod."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str = ""
    status: str = "UNKNOWN"
    price: Amount = None
    ip: str | None = None
    port: Whole = None
    gpu: str | None = None
    gpu_count: Whole = None
    data_center: str | None = None
    created: Moment = None

    @property
    def ended(self) -> bool:
        """Whether its container runs no more."""
        return self.status in ENDED

    @property
    def address(self) -> tuple[str, int] | None:
        """Public IP and SSH port, or None while it is starting."""
        return (self.ip, self.port) if self.ip and self.port else None


class GpuOffer(BaseModel):
    """A GPU type: memory in GB a GPU, prices in dollars an hour for one GPU."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str = ""
    memory_gb: Whole = None
    secure: Amount = None
    community: Amount = None
    most: Whole = None
    stock: str | None = None
    data_centers: tuple[str, ...] = ()

    def price(self, cloud: str) -> float | None:
        """List price of one GPU in SECURE or COMMUNITY cloud."""
        return self.secure if cloud == "SECURE" else self.community


class Volume(BaseModel):
    """A network volume; it exists in one data centre, and so does every pod that mounts it."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str = ""
    size_gb: Whole = None
    data_center: str


@dataclass(frozen=True)
class PodSpec:
    """One pod to ask for: one GPU type, one count, one cloud. `start` is the container's first command."""

    name: str
    image: str
    gpu: str
    gpu_count: int
    cloud: str = "SECURE"
    data_centers: tuple[str, ...] = ()
    disk_gb: int = 60
    volume_id: str | None = None
    volume_gb: int = 0
    mount: str = "/workspace"
    env: dict[str, str] = field(default_factory=dict)
    start: tuple[str, ...] = ()
    interruptible: bool = False
    min_cuda: str = "13.0"

    def where(self) -> str:
        """This request in a few words, for progress and errors."""
        centers = f", {' or '.join(self.data_centers)}" if self.data_centers else ""
        spot = ", interruptible" if self.interruptible else ""
        return f"{self.gpu_count} x {self.gpu}, {self.cloud}{centers}{spot}"
