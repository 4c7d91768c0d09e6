"""The HTTP side of the fake RunPod: routes, bodies and answers of REST v1 and v2, and what can go wrong with them."""

import json
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from fake_runpod import FakePod, FakeRunpod

V1_FIELDS = {
    "name", "imageName", "computeType", "cloudType", "gpuTypeIds", "gpuCount", "containerDiskInGb", "volumeInGb",
    "volumeMountPath", "ports", "env", "dockerStartCmd", "interruptible", "supportPublicIp", "allowedCudaVersions",
    "networkVolumeId", "dataCenterIds", "dataCenterPriority",
}  # fmt: skip
V2_FIELDS = {"name", "image", "cloud", "gpu", "disk", "ports", "env", "args", "mounts", "dataCenterIds"}
V2_GPU_FIELDS = {"id", "count", "minCudaVersion"}


@dataclass
class Fault:
    """What goes wrong with requests of a method whose path begins so; `times` counts down to 0."""

    method: str
    path: str
    kind: str  # 429 | 500 | 500-after | drop | drop-after | truncated | trickle | slow | 401
    times: int = 1


class Handler(BaseHTTPRequestHandler):
    fake: "FakeRunpod"
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        fake = self.fake
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        parts = urlsplit(self.path)
        path = parts.path.removeprefix(f"/{fake.version}")
        fake.requests.append((method, path, body))
        fault = next((f for f in fake.faults if f.times and f.method == method and path.startswith(f.path)), None)
        if fault:
            fault.times -= 1
        if fault and self._before(fault):
            return
        status, answer = self._answer(method, path, parse_qs(parts.query), body)
        if fault and fault.kind in ("500-after", "drop-after"):
            if fault.kind == "drop-after":
                self.close_connection = True
                return
            status, answer = 500, {"message": "internal error"}
        self._send(status, answer, fault.kind if fault else "")

    def _before(self, fault: Fault) -> bool:
        """Faults that answer before anything is done."""
        if fault.kind == "429":
            self._send(429, {"title": "Too Many Requests", "status": 429, "detail": "slow down"}, "")
        elif fault.kind == "500":
            self._send(500, {"message": "internal error"}, "")
        elif fault.kind == "401":
            self._send(401, {"title": "Unauthorized", "status": 401, "detail": "expired"}, "")
        elif fault.kind == "drop":
            self.close_connection = True
        else:
            return False
        return True

    def _send(self, status: int, answer: Any, kind: str) -> None:
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "1")
        if kind == "slow":
            time.sleep(1.0)
        if kind == "truncated":
            data = data[: len(data) // 2]
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data) + (kind == "trickle") * 50))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(data)
            for _ in range(50 if kind == "trickle" else 0):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)

    def _answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        fake = self.fake
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        pod = fake.pods.get(path.removeprefix("/pods/"))
        if key != fake.key and not (method == "DELETE" and pod and key == pod.key and fake.pod_keys_work):
            return 401, {"title": "Unauthorized", "status": 401, "detail": f"no such key: {key}"}
        if path == "/pods":
            return self._create(body) if method == "POST" else (200, self._list(query))
        if path.startswith("/pods/"):
            if pod is None or (pod.terminated and fake.version == "v2"):
                return 404, {"title": "Not Found", "status": 404, "detail": "pod not found"}
            if method == "DELETE":
                if not fake.ignore_delete:
                    fake.terminate(pod)
                return 204, None
            return 200, self._show(pod)
        if path == "/catalog/gpus" and fake.version == "v2":
            return 200, {"gpus": [_offer(gpu, fake.price) for gpu in ("NVIDIA H200", "NVIDIA B200", *BLACKWELL)]}
        volume = path.rpartition("/")[2]
        if path.startswith(("/networkvolumes/", "/network-volumes/")) and volume in fake.volume:
            where = "dataCenterId" if fake.version == "v1" else "dataCenter"
            return 200, {
                "id": volume,
                "name": "models",
                "size": 100,
                where: fake.volume[volume],
                "type": "STANDARD",
            }
        return 404, {"title": "Not Found", "status": 404, "detail": f"no route {method} {path}"}

    def _create(self, body: dict[str, Any]) -> tuple[int, Any]:
        fake, two = self.fake, self.fake.version == "v2"
        unknown = set(body) - (V2_FIELDS if two else V1_FIELDS)
        unknown |= set(body["gpu"]) - V2_GPU_FIELDS if two else set()
        if unknown:
            detail = f"additional properties {sorted(unknown)} not allowed"
            return (422 if two else 400), {"title": "Unprocessable Entity", "status": 422, "detail": detail}
        gpu, count = (body["gpu"]["id"], body["gpu"]["count"]) if two else (body["gpuTypeIds"][0], body["gpuCount"])
        place = (body.get("dataCenterIds") or ["US-TX-3"])[0]
        if not fake.stock(gpu, count, body["cloud" if two else "cloudType"], place):
            message = "There are no longer any instances available with the requested specifications."
            return fake.no_stock_status, {"title": "Bad Request", "status": 400, "detail": message}
        start = shlex.split(body["args"]) if two else body["dockerStartCmd"]
        return 201, self._show(fake.make(body, gpu, count, place, start))

    def _list(self, query: dict[str, list[str]]) -> Any:
        old = time.time() - self.fake.list_lag
        shown = [self._show(pod) for pod in self.fake.pods.values() if pod.created <= old and not pod.terminated]
        if self.fake.version == "v1":
            return [pod for pod in shown if pod["name"] in query.get("name", [pod["name"]])]
        at = int(query.get("cursor", ["0"])[0])  # two a page
        return {"pods": shown[at : at + 2], "nextCursor": str(at + 2) if at + 2 < len(shown) else None}

    def _show(self, pod: "FakePod") -> dict[str, Any]:
        fake = self.fake
        state = pod.state(fake.provision)
        open_ = state == "RUNNING" and not fake.no_address
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(pod.created))
        if fake.version == "v1":
            return {
                "id": pod.id, "name": pod.name, "image": pod.body["imageName"], "env": pod.body["env"],
                "desiredStatus": state if state in ("EXITED", "TERMINATED") else "RUNNING",
                "costPerHr": str(pod.price) if fake.tell_price else None, "gpu": {"count": pod.count, "id": pod.gpu},
                "publicIp": "127.0.0.1" if open_ else None, "portMappings": {"22": pod.port} if open_ else None,
                "machine": {"dataCenterId": pod.place}, "lastStartedAt": stamp,
            }  # fmt: skip
        ports = [{"private": 22, "public": pod.port, "type": "tcp", "ip": "127.0.0.1"}]
        return {
            "id": pod.id, "name": pod.name, "status": state, "image": pod.body["image"], "env": pod.body["env"],
            "cost": (pod.price if fake.tell_price else 0.0), "gpu": {"id": pod.gpu, "count": pod.count},
            "runtime": {"uptime": 1, "ports": ports} if open_ else None, "ssh": {"proxy": None, "direct": None},
            "dataCenterId": pod.place, "createdAt": stamp, "mounts": pod.body.get("mounts", {}),
        }  # fmt: skip


BLACKWELL = ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA GeForce RTX 5090")


def _offer(gpu: str, price: float) -> dict[str, Any]:
    return {
        "id": gpu, "name": gpu, "pool": None, "manufacturer": "NVIDIA", "memory": 96, "secure": True,
        "community": True, "price": {"secure": price, "community": price * 0.8},
        "maxCount": {"secure": 8, "community": 4}, "availability": "HIGH",
        "dataCenters": [{"id": "US-TX-3", "name": "Texas", "availability": "LOW"}],
    }  # fmt: skip
