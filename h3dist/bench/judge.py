"""Every attention backend that is usable here, on q, k and v that a run saved: how far from exact, and where most."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from h3dist.attending import capability_of
from h3dist.attention.backend import Task
from h3dist.attention.capture import Captured, read
from h3dist.attention.check import compare
from h3dist.attention.registry import WHOLE

FORM, VERSION = "h3dist-attention-judged", 1


def judge(folder: Path, device: torch.device) -> dict[str, Any]:
    """A record with every finding: relative 2-norms against exact attention, or what is wrong."""
    found: dict[str, list[dict[str, Any]]] = {}
    rows = 0
    for captured in read(folder, device):
        rows = captured.q.shape[0]
        for name, finding in _findings(captured, device):
            found.setdefault(name, []).append(finding)
    exact = {backend.name: (backend.exact, backend.bound) for backend in WHOLE}
    backends = {
        name: {"exact": exact[name][0], "bound": exact[name][1], "findings": findings}
        for name, findings in found.items()
    }
    return {"form": FORM, "version": VERSION, "rows": rows, "backends": backends}


def _findings(captured: Captured, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    rows, heads, head_dim = captured.q.shape
    task = Task(rows, heads, head_dim, captured.q.dtype, device, capability_of(device), captured.lead)
    for backend in WHOLE:
        if backend.refuses(task) is None and backend.lacks(task) is None:
            attention = backend.build(task, None)
            _, finding = compare(attention, captured.q, captured.k, captured.v, backend.bound or float("inf"))
            place = {"evaluation": captured.evaluation, "layer": captured.layer}
            yield backend.name, place | {"error": finding.error, "tail": finding.tail, "wrong": finding.wrong}


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    lines = [f"{record['rows']} rows", "", "| attention | median error | largest | where | held to | wrong |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, told in record["backends"].items():
        findings = told["findings"]
        worst = max(findings, key=lambda each: each["error"])
        wrong = sum(each["wrong"] is not None for each in findings)
        where = f"evaluation {worst['evaluation']}, layer {worst['layer']}"
        middle, bound = median(each["error"] for each in findings), told["bound"]
        cells = [f"{middle:.2e}", f"{worst['error']:.2e}", where, "" if bound is None else f"{bound:g}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {wrong} of {len(findings)} |")
    return "\n".join(lines)


def write(record: dict[str, Any], path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
