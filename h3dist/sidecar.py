"""The JSON beside an MP4: what was asked, how it ran and what came out. It is itself a legal request file."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from h3dist import __version__
from h3dist.config import Config
from h3dist.errors import OutputError
from h3dist.plan import ExchangePlan, Plan
from h3dist.provenance import versions_of
from h3dist.request import Resolved
from h3dist.site import Site

PACKAGES = ("torch", "diffusers", "transformers", "safetensors", "comfy-kitchen", "av")


@dataclass(frozen=True)
class RankReport:
    """What one rank counted: bytes sent by collective, bytes asked of the files of denoiser and text encoder, its peak
    memory, and the seconds until its part of the decoding was done.

    rounding: where heads move as codes, sums of squares by kind: of the errors, and of the values. attention: the
    backend, rank 0's choice of kernel, and how far its first call was from exact attention, of any rank. transport:
    by what heads moved, and why not by copies where those were asked for.
    """

    device: str
    sent: dict[str, int]
    file_bytes: int
    peak_memory: int
    decode_seconds: float
    rounding: dict[str, tuple[float, float]] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    text_bytes: int = 0
    transport: str = "collective"


def report_of(site: Site, read: tuple[int, int], decode_seconds: float, attention: Mapping[str, Any]) -> str:
    """What this rank counted, and found out about the attention backend, as JSON.

    `read`: the bytes asked of the denoiser's file, and of the text encoder's.
    """
    name = torch.cuda.get_device_name(site.device) if site.device.type == "cuda" else "cpu"
    counted = dict(site.comm.counted), read[0], site.peak_memory(), decode_seconds
    found = site.comm.rounding.sums(), dict(attention), read[1], site.comm.transport.told
    return json.dumps(asdict(RankReport(name, *counted, *found)))


def describe_run(
    config: Config,
    resolved: Resolved,
    plan: Plan | None,
    ranks: Sequence[RankReport],
    *,
    seconds: Mapping[str, float],
    step_seconds: Sequence[float],
    chunk_seconds: Sequence[float],
    sha256: Mapping[str, str],
) -> dict[str, Any]:
    """Everything about a run as JSON values; `plan` and `ranks` are absent where only saved latents were decoded.

    So is then the configuration of what was not done: this run's sampler did not make those latents.
    """
    # the request stands at the top; output and job name this run's files
    left_out = {"request", "job", "output"} | (
        set() if plan else {"parallel", "attention", "exchange", "sampler", "encode"}
    )
    settings = {part: values for part, values in asdict(config).items() if part not in left_out}
    return {
        "h3dist": __version__,
        "request": resolved.as_request(),
        "notes": list(resolved.notes),
        "config": settings,
        "plan": plan.as_dict() if plan else None,
        "plan_digest": plan.digest if plan else None,
        "exchange": describe_exchange(plan.exchange.on(plan.layout), ranks) if plan else None,
        "attention": ranks[0].attention if ranks else None,
        "ranks": [_against_plan(plan, rank, report) for rank, report in enumerate(ranks)],
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "step_seconds": [round(value, 4) for value in step_seconds],
        "chunk_seconds": [round(value, 4) for value in chunk_seconds],
        "sha256": dict(sha256),
        "versions": {"python": platform.python_version(), **versions_of(PACKAGES)},
    }


def describe_exchange(exchange: ExchangePlan, ranks: Sequence[RankReport]) -> dict[str, Any]:
    """How heads moved, whether exactly, and by how much codes were off: relative, in the 2-norm over all ranks."""
    sums: dict[str, list[float]] = {}
    for kind, pair in (item for report in ranks for item in report.rounding.items()):
        sums[kind] = [a + b for a, b in zip(sums.get(kind, (0.0, 0.0)), pair, strict=True)]
    told = {"how": str(exchange)} | ({"transport": ranks[0].transport} if exchange.transport != "collective" else {})
    if not sums:
        return told | {"exact": True}
    return told | {
        "exact": False,
        "note": "this run is approximate: heads moved as codes; relative_error is that of its first attention",
        "relative_error": {kind: sqrt(error / value) if value else 0.0 for kind, (error, value) in sums.items()},
    }


def write_sidecar(path: Path | str, report: Mapping[str, Any]) -> None:
    """Write the report to `path`. Raises `OutputError`."""
    try:
        Path(path).write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except (OSError, UnicodeEncodeError) as error:
        raise OutputError(f"cannot write {path}: {error}") from error


def _against_plan(plan: Plan, rank: int, report: RankReport) -> dict[str, Any]:
    """A rank's counts beside what its share of the plan says."""
    share = plan.shares[rank]
    return {
        "device": report.device,
        "sent": {"planned": share.sent, "counted": report.sent},
        "file_bytes": {"planned": share.file_bytes, "counted": report.file_bytes},
        "text_bytes": {"planned": share.text_bytes, "counted": report.text_bytes},
        "peak_memory": {"planned": plan.peaks[rank], "counted": report.peak_memory},
        "decode_seconds": round(report.decode_seconds, 4),
    }
