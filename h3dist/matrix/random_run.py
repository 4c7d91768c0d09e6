"""Cells that need no checkpoint: denoiser steps on random weights of a chosen size."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from h3dist.bench.spec import SMALL
from h3dist.checkpoint.denoiser_names import DenoiserDims
from h3dist.config import Config
from h3dist.matrix.cells import Cell, Planned
from h3dist.matrix.config import MatrixConfig, exchange_of
from h3dist.matrix.start import Start, ranks_environ
from h3dist.plan import ExchangePlan, Layout, Plan, check_memory, fp4_linears, make_plan, released_dims
from h3dist.plan.choose import Choice, Weigher
from h3dist.plan.exchange import open_exchanges
from h3dist.plan.machine import Machine
from h3dist.plan.rates import load_rates
from h3dist.planner import Decision
from h3dist.preflight import HOST_RESERVE, compute_dtype
from h3dist.request import parse_request, resolve
from h3dist.torchrun import torchrun


@dataclass(frozen=True)
class Spec:
    """What a rank must know to make the plan of a cell on random weights."""

    width: int
    height: int
    frames: int
    steps: int
    seed: int
    text_rows: int
    size: str
    dtype: str
    device: str
    attention: str
    sp: int
    tp: int
    allow_untrained: bool
    capability: tuple[int, int] | None  # the lowest of the devices, None on a CPU
    exchange: Mapping[str, Any]  # the fields of an `ExchangePlan`

    @classmethod
    def of(
        cls, cell: Cell, layout: Layout, exchange: ExchangePlan, config: Config, capability: tuple[int, int] | None
    ) -> "Spec":
        """The spec of a cell whose layout and exchange are known."""
        settings = cell.settings
        common = {name: settings[name] for name in ("steps", "seed", "text_rows", "size", "dtype", "device")}
        return cls(
            **asdict(cell.shape),
            **common,
            attention=cell.attention,
            sp=layout.sp,
            tp=layout.tp,
            allow_untrained=config.runtime.allow_untrained,
            capability=capability,
            exchange=asdict(exchange),
        )


def dims_of(size: str) -> DenoiserDims:
    """The sizes of a random model: "released", or "small" with every oddity that a split can meet."""
    return released_dims() if size == "released" else replace(released_dims(), **SMALL)


def plan_of(spec: Spec) -> Plan:
    """The plan, the same on the parent and on every rank. Raises `RequestError`, `PlanError` and `ConfigError`."""
    fields = {"prompt": "-", "width": spec.width, "height": spec.height, "frames": spec.frames}
    asked = parse_request(fields | {"steps": spec.steps, "seed": spec.seed})
    dims, capability = dims_of(spec.size), tuple(spec.capability) if spec.capability else None
    fp4, amax = fp4_linears(dims, None, capability, spec.dtype)
    return make_plan(
        resolve(asked, allow_untrained=spec.allow_untrained, schedule="simple"),
        dims,
        spec.text_rows,
        Layout(sp=spec.sp, tp=spec.tp),
        dtype=spec.dtype,
        attention=spec.attention,
        steps=spec.steps,
        fp4=fp4,
        amax=amax,
        exchange=ExchangePlan(**spec.exchange),
        **({} if spec.device == "cuda" else {"reserve": HOST_RESERVE}),
    )


def random_settings(config: MatrixConfig, device: str) -> dict[str, Any]:
    """What all cells on random weights share."""
    return {
        "denoise_only": True,
        "size": config.size,
        "text_rows": config.text_rows,
        "steps": config.request.steps,
        "seed": config.request.seed,
        "dtype": compute_dtype(config, device),
        "device": device,
        **({} if config.runtime.fused == "auto" else {"runtime.fused": config.runtime.fused}),
    }


def decide_random(cell: Cell, layout: Layout, config: MatrixConfig, machine: Machine) -> Decision:
    """The cell's plan, its GPUs and predicted time, held against the memory that is free. Raises `PlanError`."""
    exchanges = open_exchanges(**vars(exchange_of(cell.exchange)))
    weigher = Weigher(
        plan_of(Spec.of(cell, layout, exchanges[0], config, machine.capability)), machine, load_rates(), exchanges
    )
    taken = weigher.option(layout)
    plan = plan_of(Spec.of(cell, layout, taken.plan.exchange, config, machine.capability))
    choice = Choice(
        taken=taken,
        rivals=(),
        counts=(),
        machine=machine,
        rates=weigher.rates,
        unpriced=weigher.unpriced,
        given=True,
        free_count=False,
    )
    check_memory(plan, machine.free(choice.taken.seats))
    return Decision(plan, choice, ())


def start_random(batch: Sequence[Planned], config: MatrixConfig, folder: Path, until: float | None = None) -> Start:
    """How to start the ranks of cells of one layout; what they are told is written to `folder`.

    `until` is the time, as of `time.time()`, after which no cell begins.
    """
    first = batch[0]
    told = {
        "cells": [_told(planned, config, folder) for planned in batch],
        "runtime": asdict(config.runtime),
        "status_dir": str(folder / "status"),
        "until": until,
    }
    (folder / "cell.json").write_text(json.dumps(told), encoding="ascii")
    command = torchrun(folder, first.cell.ranks, "h3dist.matrix.cell", [str(folder / "cell.json")], terminal=False)
    return Start(command, config.cell_seconds * len(batch), ranks_environ(config, first, folder))


def _told(planned: Planned, config: MatrixConfig, folder: Path) -> dict[str, Any]:
    """What ranks must know of one cell, whose home is made here; `expected` seconds are None where none are known."""
    assert planned.decision is not None
    capability, cost = planned.decision.choice.machine.capability, planned.decision.choice.taken.cost
    home(planned, folder).mkdir()
    return {
        "spec": asdict(Spec.of(planned.cell, planned.plan.layout, planned.plan.exchange, config, capability)),
        "home": str(home(planned, folder)),
        "expected": cost.seconds * planned.plan.steps if cost else None,
    }


def home(planned: Planned, folder: Path) -> Path:
    """Where the ranks leave a cell's result.json, and its latents before that."""
    return folder / planned.cell.key


def read_random(home: Path) -> dict[str, Any] | None:
    """What the ranks of a cell reported, see `cell.report`; None before they have."""
    if not (home / "result.json").is_file():
        return None
    return figures(json.loads((home / "result.json").read_text(encoding="ascii")))


def figures(told: Mapping[str, Any]) -> dict[str, Any]:
    """The ranks' reports as a cell's figures. A step takes as long as its slowest rank."""
    reports = told["ranks"]
    steps = [max(times) for times in zip(*(report["step_seconds"] for report in reports), strict=True)]
    stages = {name: [report["stages"][name] for report in reports] for name in reports[0]["stages"]}
    return {
        "plan_digest": told["plan_digest"],
        "devices": [report["device"] for report in reports],
        "step_seconds": steps,
        "stages": stages,
        "load_seconds": max(stages["load"]),
        "sent": [report["sent"] for report in reports],
        "peak_memory": [report["peak_memory"] for report in reports],
        "resident": [report["resident"] for report in reports],
    }
