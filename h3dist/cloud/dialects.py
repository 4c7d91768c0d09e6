"""The two versions of RunPod's REST API, each as what to send and how to read what comes back.

v1 (https://rest.runpod.io/v1) is documented as retired in November 2026; v2 (https://api.runpod.io/v2)
follows it. The version is the last part of the address. Field names as in their OpenAPI documents.
"""

import shlex
from typing import Any, Protocol

from h3dist.cloud.models import GpuOffer, Pod, PodSpec, Volume
from h3dist.errors import ConfigError

DEFAULT_API = "https://api.runpod.io/v2"
PORTS = ["22/tcp"]


class Dialect(Protocol):
    """How one version of the API says what we need."""

    spot: bool
    catalogue: str | None
    volumes: str

    def create_body(self, spec: PodSpec) -> dict[str, Any]: ...
    def pod(self, data: dict[str, Any]) -> Pod: ...
    def volume(self, data: dict[str, Any]) -> Volume: ...
    def offer(self, data: dict[str, Any]) -> GpuOffer: ...


class V1:
    """Flat bodies, bare lists, `publicIp` and `portMappings`; knows interruptible pods, has no catalogue."""

    spot = True
    catalogue = None
    volumes = "networkvolumes"

    def create_body(self, spec: PodSpec) -> dict[str, Any]:
        body: dict[str, Any] = {
            "name": spec.name,
            "imageName": spec.image,
            "computeType": "GPU",
            "cloudType": spec.cloud,
            "gpuTypeIds": [spec.gpu],
            "gpuCount": spec.gpu_count,
            "containerDiskInGb": spec.disk_gb,
            "volumeInGb": 0 if spec.volume_id else spec.volume_gb,
            "volumeMountPath": spec.mount,
            "ports": PORTS,
            "env": spec.env,
            "dockerStartCmd": list(spec.start),
            "interruptible": spec.interruptible,
            "supportPublicIp": True,
            "allowedCudaVersions": [spec.min_cuda],
        }
        if spec.volume_id:
            body["networkVolumeId"] = spec.volume_id
        if spec.data_centers:
            body |= {"dataCenterIds": list(spec.data_centers), "dataCenterPriority": "custom"}
        return body

    def pod(self, data: dict[str, Any]) -> Pod:
        gpu, machine = _dict(data.get("gpu")), _dict(data.get("machine"))
        return Pod(
            id=data["id"],
            name=data.get("name") or "",
            status=data.get("desiredStatus") or "UNKNOWN",
            price=data.get("costPerHr") or data.get("adjustedCostPerHr"),
            ip=data.get("publicIp") or None,
            port=_dict(data.get("portMappings")).get("22"),
            gpu=gpu.get("id") or machine.get("gpuTypeId"),
            gpu_count=gpu.get("count") or data.get("gpuCount"),
            data_center=machine.get("dataCenterId"),
            created=data.get("createdAt") or data.get("lastStartedAt"),
        )

    def volume(self, data: dict[str, Any]) -> Volume:
        return Volume(
            id=data["id"],
            name=data.get("name") or "",
            size_gb=data.get("size"),
            data_center=data["dataCenterId"],
        )

    def offer(self, data: dict[str, Any]) -> GpuOffer:
        raise AssertionError("v1 has no catalogue of GPU types")


class V2:
    """Nested bodies that refuse unknown fields, wrapped lists, `runtime.ports`; no interruptible pods."""

    spot = False
    catalogue = "catalog/gpus"
    volumes = "network-volumes"

    def create_body(self, spec: PodSpec) -> dict[str, Any]:
        body: dict[str, Any] = {
            "name": spec.name,
            "image": spec.image,
            "cloud": spec.cloud,
            "gpu": {"id": spec.gpu, "count": spec.gpu_count, "minCudaVersion": spec.min_cuda},
            "disk": spec.disk_gb,
            "ports": PORTS,
            "env": spec.env,
            "args": shlex.join(spec.start),
        }
        if spec.volume_id:
            body["mounts"] = {"network": [{"volumeId": spec.volume_id, "path": spec.mount}]}
        elif spec.volume_gb:
            body["mounts"] = {"persistent": {"size": spec.volume_gb, "path": spec.mount}}
        if spec.data_centers:
            body["dataCenterIds"] = list(spec.data_centers)
        return body

    def pod(self, data: dict[str, Any]) -> Pod:
        gpu = _dict(data.get("gpu"))
        ip, port = self._address(data)
        return Pod(
            id=data["id"],
            name=data.get("name") or "",
            status=data.get("status") or "UNKNOWN",
            price=data.get("cost"),
            ip=ip,
            port=port,
            gpu=gpu.get("id"),
            gpu_count=gpu.get("count"),
            data_center=data.get("dataCenterId"),
            created=data.get("createdAt"),
        )

    def _address(self, data: dict[str, Any]) -> tuple[Any, Any]:
        direct = _dict(_dict(data.get("ssh")).get("direct"))
        if direct.get("host") and direct.get("port"):
            return direct["host"], direct["port"]
        for port in _dict(data.get("runtime")).get("ports") or []:
            if port.get("private") == 22 and port.get("ip") and port.get("public"):
                return port["ip"], port["public"]
        return None, None

    def volume(self, data: dict[str, Any]) -> Volume:
        return Volume(
            id=data["id"],
            name=data.get("name") or "",
            size_gb=data.get("size"),
            data_center=data["dataCenter"],
        )

    def offer(self, data: dict[str, Any]) -> GpuOffer:
        price, most = _dict(data.get("price")), _dict(data.get("maxCount"))
        centers = data.get("dataCenters") or []
        return GpuOffer(
            id=data["id"],
            name=data.get("name") or "",
            memory_gb=data.get("memory"),
            secure=price.get("secure"),
            community=price.get("community"),
            most=max((n for n in most.values() if isinstance(n, int)), default=None),
            stock=data.get("availability"),
            data_centers=tuple(c["id"] for c in centers if c.get("availability") != "NONE"),
        )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def dialect_of(url: str) -> Dialect:
    """The API version that `url` ends in. Raises ConfigError for any other ending."""
    version = url.rstrip("/").rsplit("/", 1)[-1]
    if version == "v1":
        return V1()
    if version == "v2":
        return V2()
    raise ConfigError(f"the API address {url} must end in /v1 or /v2; the usual one is {DEFAULT_API}")
