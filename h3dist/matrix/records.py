"""A cell as it stands in the JSON: before it has run, after it has, and when it could not."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from h3dist.errors import ConfigError, MissingDependency, PlanError
from h3dist.matrix.cells import Planned
from h3dist.matrix.scaling import FIGURES, spread
from h3dist.plan import Plan
from h3dist.planner import Decision
from h3dist.processes import Outcome
from h3dist.status import Cause

REFUSALS = tuple(kind.__name__ for kind in (ConfigError, PlanError, MissingDependency))
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def now() -> str:
    """The time, as in 2026-11-29T12:00:00+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def waiting(planned: Planned) -> dict[str, Any]:
    """The record of a cell that has not run, or is skipped for a reason."""
    cell, decision = planned.cell, planned.decision
    layout = decision.plan.layout if decision else None
    return {
        "key": cell.key,
        "name": cell.name,
        "state": "pending" if decision else "skipped",
        "reason": planned.reason,
        "cause": None,
        "shape": asdict(cell.shape),
        "asked": cell.asked,
        "ranks": cell.ranks,
        "layout": {"sp": layout.sp, "tp": layout.tp, "mode": layout.mode} if layout else None,
        "attention": cell.attention,
        "exchange": cell.exchange,
        "repeat": cell.repeat,
        "settings": dict(cell.settings),
        "plan": key_numbers(decision.plan) if decision else None,
        "predicted": predicted(decision) if decision else None,
    }


def predicted(decision: Decision) -> dict[str, Any]:
    """What the planner says of the time, or why it cannot; `gpus` by rank, in CUDA's order."""
    cost = decision.choice.taken.cost
    return {
        "gpus": list(decision.choice.taken.seats),
        "step_seconds": round(cost.seconds, FIGURES) if cost else None,
        "terms": {name: round(value, FIGURES) for name, value in cost.terms.items()} if cost else None,
        "unpriced": decision.choice.unpriced,
    }


def key_numbers(plan: Plan) -> dict[str, Any]:
    """Of a plan what a reader of figures wants: the split, the bytes, the memory. Lists go by rank."""
    return {
        "digest": plan.digest,
        "layout": str(plan.layout),
        "exchange": plan.exchange.brief,
        "rows": plan.rows,
        "text_rows": plan.text_rows,
        "evaluations": plan.steps,
        "rows_per_rank": [share.rows[1] - share.rows[0] for share in plan.shares],
        "heads_per_rank": [share.heads[1] - share.heads[0] for share in plan.shares],
        "ffn_per_rank": [share.ffn[1] - share.ffn[0] for share in plan.shares],
        "weight_bytes": [share.weight_bytes for share in plan.shares],
        "file_bytes": [share.file_bytes for share in plan.shares],
        "peak_memory": list(plan.peaks),
        "reasons": list(plan.reasons),
        "notes": list(plan.notes),
    }


def measured(plan: Plan, figures: Mapping[str, Any], wall: float, *, text_sent: bool) -> dict[str, Any]:
    """What a cell that is done adds to its record. `figures` are those of `random_run` or `clip_run`.

    Bytes are summed over ranks; stages spread over them. On random weights every rank draws the text rows
    itself, so that none of the planned ones are sent.
    """
    steps = [round(step, FIGURES) for step in figures["step_seconds"]]
    counted = [dict(sent) for sent in figures["sent"]]
    due = [dict(share.sent) if text_sent else share.sent | {"text": 0} for share in plan.shares]
    return {
        "state": "done",
        "devices": figures["devices"],
        "seconds": {
            "wall": round(wall, FIGURES),
            "load": None if figures["load_seconds"] is None else round(figures["load_seconds"], FIGURES),
            "first_step": steps[0],
            "steps": steps,
            "warm": spread(steps[1:]),
            "stages": {name: spread(values) for name, values in figures["stages"].items()},
        },
        "bytes": {
            "planned": _total(due),
            "counted": _total(counted),
            "as_planned": due == counted,
            "per_rank": counted,
        },
        "memory": {
            "planned": list(plan.peaks),
            "peak": list(figures["peak_memory"]),
            "resident": list(figures["resident"]),
        },
    }


def _total(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {label: sum(rank[label] for rank in ranks) for label in ranks[0]}


def ended(outcome: Outcome, logs: str) -> dict[str, Any]:
    """What a cell that did not get done adds to its record: which way it ended, and why."""
    cause = outcome.cause
    assert cause is not None
    state = _state(outcome, cause)
    return {
        "state": state,
        "reason": cause.message if state == "skipped" else None,
        "cause": asdict(cause),
        "logs": logs,
    }


def _state(outcome: Outcome, cause: Cause) -> str:
    if outcome.overdue:
        return "timeout"
    if cause.kind in REFUSALS:
        return "skipped"
    told = cause.message.lower()
    memory = cause.kind in OUT_OF_MEMORY or any(words in told for words in OUT_OF_MEMORY_WORDS)
    return "oom" if memory else "failed"
