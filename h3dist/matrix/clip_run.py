"""Cells that make whole clips from the configured checkpoints: `h3dist.generate`, its figures read from the sidecar."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from h3dist.config import Config, compose
from h3dist.job import make_job, write_job
from h3dist.matrix.cells import Cell, Planned
from h3dist.matrix.config import WAYS, MatrixConfig, exchange_of
from h3dist.matrix.start import Start, ranks_environ
from h3dist.plan import Layout
from h3dist.planner import Decision, decide_run
from h3dist.preflight import compute_dtype
from h3dist.request import gather_request
from h3dist.torchrun import torchrun

PROMPT = 'A quiet medium shot of a woman by a rain-streaked window. She says, "We should leave before dawn."'
TOLD = ("prompt", "steps", "seed", "width", "height", "frames", "duration")  # of a request, elsewhere in a record


def clip_settings(config: MatrixConfig, device: str) -> dict[str, Any]:
    """What all cells that make clips share."""
    fields = _fields(config)
    return {
        "denoise_only": False,
        "model": asdict(config.model),
        "sampler": asdict(config.sampler),
        "steps": fields["steps"],
        "seed": fields["seed"],
        "prompt_sha256": hashlib.sha256(str(fields["prompt"]).encode()).hexdigest(),
        "request": {name: value for name, value in fields.items() if name not in TOLD},
        "dtype": compute_dtype(config, device),
        "device": device,
        **_otherwise(config),
    }


def _otherwise(config: MatrixConfig) -> dict[str, str]:
    """What is not by default of how clips are computed, by its key: cells keep the keys that they had before."""
    asked, default = ({key: attrgetter(key)(of) for key in WAYS} for of in (config, Config()))
    return {key: value for key, value in asked.items() if value != default[key]}


def decide_clip(cell: Cell, layout: Layout, config: MatrixConfig, words: Sequence[str]) -> Decision:
    """The cell's plan, held against checkpoints and free memory. Raises `PlanError`, and what a bad request raises."""
    fields = _fields(config) | asdict(cell.shape)
    return decide_run(_config(cell, layout, words), fields, cell.ranks)


def start_clip(planned: Planned, config: MatrixConfig, words: Sequence[str], folder: Path) -> Start:
    """How to start the cell's ranks; the clip and its files stand in `folder`."""
    cell, plan = planned.cell, planned.plan
    output = {"path": str(folder / "clip.mp4"), "latents": str(folder / "latents.safetensors")}
    job = make_job(_config(cell, plan.layout, words), _fields(config) | asdict(cell.shape), output)
    job |= {"status_dir": str(folder / "status"), "layout": asdict(plan.layout), "exchange": asdict(plan.exchange)}
    job |= {"encode": plan.encode.text}
    write_job(job, folder / "job.json")
    arguments = [f"job={folder}/job.json", *_words(cell, plan.layout, words)]
    command = torchrun(folder, cell.ranks, "h3dist.generate", arguments, terminal=False)
    parts = list(job["output"]["parts"].values())
    return Start(command, config.cell_seconds, ranks_environ(config, planned, folder), parts)


def read_clip(folder: Path) -> dict[str, Any] | None:
    """The sidecar's figures, as a cell's; None before there is one. Stages are rank 0's, loading in "encode"."""
    if not (folder / "clip.json").is_file():
        return None
    told = json.loads((folder / "clip.json").read_text(encoding="utf-8"))
    return figures(told)


def figures(told: Mapping[str, Any]) -> dict[str, Any]:
    """A sidecar as a cell's figures."""
    return {
        "plan_digest": told["plan_digest"],
        "devices": [rank["device"] for rank in told["ranks"]],
        "step_seconds": told["step_seconds"],
        "stages": {name: [seconds] for name, seconds in told["seconds"].items()},
        "load_seconds": None,
        "sent": [rank["sent"]["counted"] for rank in told["ranks"]],
        "peak_memory": [rank["peak_memory"]["counted"] for rank in told["ranks"]],
        "resident": [None] * len(told["ranks"]),
    }


def _fields(config: MatrixConfig) -> dict[str, Any]:
    """The request of every cell but for its shape."""
    return {"prompt": PROMPT} | gather_request(vars(config.request))


def _words(cell: Cell, layout: Layout, words: Sequence[str]) -> list[str]:
    moved = [f"exchange.{name}={value}" for name, value in vars(exchange_of(cell.exchange)).items()]
    return [*words, *layout.overrides().split(), f"attention={cell.attention}", *moved]


def _config(cell: Cell, layout: Layout, words: Sequence[str]) -> Config:
    """The configuration that the cell's ranks will compose."""
    return compose(_words(cell, layout, words))
