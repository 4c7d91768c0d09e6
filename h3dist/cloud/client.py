"""The REST client: typed answers, patient retries, and never a second POST in the dark."""

import copy
import ipaddress
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError

from h3dist.cloud.dialects import dialect_of
from h3dist.cloud.failures import CloudError, KeyRefused, NotSent, Refused, Unclear
from h3dist.cloud.keys import Redactor
from h3dist.cloud.models import GpuOffer, Pod, PodSpec, Volume
from h3dist.cloud.pace import Pace, Stop
from h3dist.errors import ConfigError, MissingDependency

ATTEMPTS = 6
LARGEST = 64 << 20  # bytes of an answer; more is not ours
CAPACITY_PHRASES = (
    "no longer any instances",
    "not enough free gpu",
    "no instances",
    "no resources",
    "capacity",
)
CAPACITY_PHRASES += ("unavailable", "out of stock", "could not find any", "cannot be placed", "no available")


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, read whole."""

    status: int
    retry_after: str
    content: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Raises ValueError when it is no JSON, or was cut short."""
        return json.loads(self.content)


class Client:
    """One account's pods. `stop` ends every pause between two tries."""

    def __init__(self, url: str, key: SecretStr, redact: Redactor, pace: Pace, stop: Stop) -> None:
        try:
            import httpx
        except ImportError:
            raise MissingDependency("the RunPod client needs httpx: pip install 'h3dist[runpod]'") from None
        _refuse_plain_http(url)
        redact.add(key.get_secret_value())
        self.url = url.rstrip("/")
        self.dialect = dialect_of(url)
        self._redact, self._pace, self._stop = redact, pace, stop
        self._no_answer = httpx.RequestError
        self._too_slow = httpx.ReadTimeout
        self._never_sent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

        def sign(request: Any) -> Any:
            request.headers["Authorization"] = f"Bearer {key.get_secret_value()}"
            return request

        self._http = httpx.Client(auth=sign, timeout=pace.request, follow_redirects=False)

    def close(self) -> None:
        self._http.close()

    def without_stop(self) -> "Client":
        """The same client for cleaning up: its pauses do not end when the rental must."""
        twin = copy.copy(self)
        twin._stop = Stop()
        return twin

    # ---- what can be asked ----

    def create(self, spec: PodSpec) -> Pod:
        """Send one POST, once, and return the pod.

        Raises NotSent (try again when you like), Refused or KeyRefused (no pod was made), or Unclear: look
        the name up before trying again.
        """
        try:
            answer = self._send("POST", "pods", body=self.dialect.create_body(spec))
        except self._never_sent as error:
            raise NotSent(f"no connection to {self._host} ({type(error).__name__})") from None
        except self._no_answer as error:
            raise Unclear(f"creating {spec.name}: {type(error).__name__}, no answer") from None
        if answer.status == 429:
            raise NotSent("HTTP 429, too many requests", self._patience(answer, 0.0) or 0.0)
        return self._created(spec, answer)

    def find(self, name: str) -> list[Pod]:
        """Every pod of exactly this name that has not been terminated."""
        return [pod for pod in self.pods(name) if pod.name == name]

    def pods(self, name: str | None = None) -> list[Pod]:
        """Every pod of the account that has not been terminated; v1 filters by `name` on its side too."""
        query = {"includeMachine": "true"} | ({"name": name} if name else {}) if self.dialect.spot else {}
        found = [self._parse(self.dialect.pod, item) for item in self._pages("pods", "pods", query)]
        return [pod for pod in found if pod.status != "TERMINATED"]

    def pod(self, pod_id: str) -> Pod | None:
        """The pod as it is now; None when the API no longer knows it."""
        query = {"includeMachine": "true"} if self.dialect.spot else {}
        data = self._ask("GET", f"pods/{pod_id}", query=query, missing_ok=True)
        return self._parse(self.dialect.pod, data) if data is not None else None

    def delete(self, pod_id: str) -> None:
        """Terminate the pod; one that is already gone is no error."""
        try:
            self._ask("DELETE", f"pods/{pod_id}", missing_ok=True, empty_ok=True)
        except Refused as error:
            if error.status not in (409, 410):  # it is ending, or has ended
                raise

    def volume(self, volume_id: str) -> Volume:
        """A network volume. Raises ConfigError when there is none of this id."""
        data = self._ask("GET", f"{self.dialect.volumes}/{volume_id}", missing_ok=True)
        if data is None:
            raise ConfigError(f"no network volume {volume_id} in this account")
        return self._parse(self.dialect.volume, data)

    def offers(self, cloud: str, count: int) -> list[GpuOffer]:
        """GPU types with live prices and stock for pods of `count` GPUs; empty where the API has no catalogue."""
        if self.dialect.catalogue is None:
            return []
        query = {"include": "AVAILABILITY", "product": "POD", "count": str(count), "cloud": cloud}
        return [self._parse(self.dialect.offer, item) for item in self._pages(self.dialect.catalogue, "gpus", query)]

    # ---- how ----

    @property
    def _host(self) -> str:
        return urlsplit(self.url).netloc

    def _send(self, method: str, path: str, query: dict[str, str] | None = None, body: Any = None) -> Answer:
        """One request; `pace.request` bounds the whole of it, so that a trickle of bytes cannot hold us."""
        until, content = time.monotonic() + self._pace.request, bytearray()
        with self._http.stream(method, f"{self.url}/{path}", params=query or None, json=body) as answer:
            for chunk in answer.iter_bytes():
                content += chunk
                if time.monotonic() > until or len(content) > LARGEST:
                    raise self._too_slow("the answer does not end")
        return Answer(answer.status_code, answer.headers.get("Retry-After", ""), bytes(content))

    def _ask(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        missing_ok: bool = False,
        empty_ok: bool = False,
    ) -> Any:
        """An idempotent request, tried again on 429, 5xx, timeouts and broken JSON."""
        for pause in self.pauses():
            try:
                answer = self._send(method, path, query)
                if answer.status == 404 and missing_ok:
                    return None
                if answer.ok:
                    return None if empty_ok else answer.json()
                if answer.status != 429 and answer.status < 500:
                    raise self._refusal(answer, f"{method} /{path}")
                trouble = f"HTTP {answer.status}: {self._excerpt(answer)}"
                pause = self._patience(answer, pause)
            except self._no_answer as error:
                trouble = f"{type(error).__name__} at {self._host}"
            except ValueError:
                trouble = "the answer is not JSON (cut short?)"
            self._pause_or_raise(pause, f"{method} /{path}: {trouble}")
        raise AssertionError("the last pause raises")

    def _pages(self, path: str, key: str, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        """A list's items, over every page where the answer names a next one."""
        cursor: str | None = None
        while True:
            data = self._ask("GET", path, query | ({"cursor": cursor} if cursor else {}))
            items = data.get(key) if isinstance(data, dict) else data
            if not isinstance(items, list):
                raise CloudError(f"GET /{path}: expected a list of {key}, got {type(data).__name__}")
            yield from items
            page = data.get("pagination") or data if isinstance(data, dict) else {}
            last, cursor = cursor, page.get("nextCursor")
            if not cursor or cursor == last:
                return

    def _created(self, spec: PodSpec, answer: Answer) -> Pod:
        if answer.ok:
            try:
                return self.dialect.pod(answer.json())
            except (ValueError, KeyError, TypeError, AttributeError):
                raise Unclear(f"creating {spec.name}: HTTP {answer.status} without a readable pod") from None
        text = self._excerpt(answer)
        if answer.status >= 500:
            raise Unclear(f"creating {spec.name}: HTTP {answer.status}: {text}")
        raise self._refusal(answer, f"creating {spec.where()}")

    def _refusal(self, answer: Answer, doing: str) -> CloudError:
        text = self._excerpt(answer)
        if answer.status in (401, 403):
            return KeyRefused(f"{doing}: the API key was refused (HTTP {answer.status}): {text}")
        retired = self.dialect.spot and answer.status in (404, 410)
        hint = "; REST v1 was to be retired in November 2026: try --api https://api.runpod.io/v2" if retired else ""
        return Refused(f"{doing}: HTTP {answer.status}: {text}{hint}", answer.status, text)

    def _parse(self, read: Any, data: Any) -> Any:
        try:
            return read(data)
        except (ValidationError, KeyError, TypeError, AttributeError) as error:
            raise CloudError(f"the API's answer is not as documented: {type(error).__name__}") from None

    def _excerpt(self, answer: Answer) -> str:
        return self._redact(" ".join(answer.text.split())[:300]) or "(empty)"

    def pauses(self) -> Iterator[float | None]:
        """Exponential pauses with jitter, one after each try; None after the last."""
        for attempt in range(ATTEMPTS - 1):
            longest = min(self._pace.retry_cap, self._pace.retry * 2**attempt)
            yield longest * random.uniform(0.5, 1.0)
        yield None

    def _patience(self, answer: Answer, pause: float | None) -> float | None:
        """What the server asks us to wait (Retry-After in seconds), within our cap; else our own pause."""
        if pause is None or not answer.retry_after.isdigit():
            return pause
        return max(pause, min(float(answer.retry_after), self._pace.retry_cap))

    def _pause_or_raise(self, pause: float | None, trouble: str) -> None:
        if pause is None:
            raise CloudError(f"{trouble}; gave up after {ATTEMPTS} tries")
        self._stop.sleep(pause)


def is_capacity(text: str) -> bool:
    """Whether an answer's text says that there is no machine, rather than that the request is wrong."""
    return any(phrase in text.lower() for phrase in CAPACITY_PHRASES)


def _refuse_plain_http(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "https":
        return
    host = parts.hostname or ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if parts.scheme != "http" or not local:
        raise ConfigError(f"the API address {url} is not https: the key would travel readable by others")


def wait_gone(client: Client, pod_id: str, pace: Pace) -> bool:
    """Whether the API confirms, within its listing lag, that the pod is terminated."""
    until = time.monotonic() + pace.missing
    while True:
        pod = client.pod(pod_id)
        if pod is None or pod.status == "TERMINATED":
            return True
        if time.monotonic() > until:
            return False
        time.sleep(min(pace.poll, 1.0))
