"""Files of measurements read into rows: the JSON of a matrix, single points of ours, or published figures."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from h3dist.errors import RequestError
from h3dist.matrix.cells import PLAINLY
from h3dist.report.rows import Row, Source, with_gains

MATRIX, MEASURED, PUBLISHED = "h3dist.matrix", "h3dist.measured", "h3dist.published"
VERSION = 1


def load(path: Path) -> Source:
    """The measurements in a file. Raises `RequestError` for one that is not whole, of another kind or version."""
    document = _document(path)
    readers = {MATRIX: _matrix, MEASURED: _measured, PUBLISHED: _published}
    read = readers.get(str(document.get("schema")))
    if read is None:
        raise RequestError(f"{path} is no file of measurements: its schema is none of {', '.join(readers)}")
    if document.get("schema_version") != VERSION:
        found = document.get("schema_version")
        raise RequestError(f"{path} has schema version {found}; this version of h3dist reads {VERSION}")
    try:
        return read(path.stem, document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{path} does not hold what its schema says: {type(error).__name__} {error}") from error


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"{path} is no whole JSON file: {error}") from error
    return found if isinstance(found, dict) else {}


# Our own


def _matrix(name: str, document: Mapping[str, Any]) -> Source:
    rows = [_matrix_row(group, document) for group in document["summary"]]
    return Source(
        name=name,
        title=f"Matrix {document['matrix']['name']} on {_hardware(document)}",
        rows=tuple(sorted(with_gains(rows), key=lambda row: row.place)),
        facts=tuple(_facts(document)),
        faults=tuple(_faults(document["cells"])),
    )


def _hardware(document: Mapping[str, Any]) -> str:
    gpus = document["environment"]["gpus"]
    used = gpus and any(cell["settings"]["device"] == "cuda" for cell in document["cells"])
    kinds = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return kinds if used else f"{document['environment']['cores']} CPU cores"


def _matrix_row(group: Mapping[str, Any], document: Mapping[str, Any]) -> Row:
    steps, first, walls = (group[name] or {} for name in ("step_seconds", "first_step_seconds", "wall_seconds"))
    return Row(
        hardware=_hardware(document),
        layout=_moved(group),
        ranks=group["ranks"],
        shape="{width}x{height}x{frames}".format(**group["shape"]),
        attention=group["attention"],
        step=steps.get("median"),
        step_min=steps.get("min"),
        step_max=steps.get("max"),
        first_step=first.get("median"),
        predicted=group["predicted_step_seconds"],
        total=walls.get("median"),
        speedup=group["speedup"],
        efficiency=group["efficiency"],
        error=group["relative_error"],
        equal=group["relative_error"] == 0,
        peak_memory=group["peak_memory"],
        stages=_stages(group),
        planned=group["bytes_planned"],
        counted=group["bytes_counted"],
        note=_steps(group["settings"]),
    )


def _moved(group: Mapping[str, Any]) -> str:
    """The word for the layout, and for how heads moved in it unless plainly."""
    exchange = group.get("exchange", PLAINLY)
    return group["asked"] if exchange == PLAINLY else f"{group['asked']} {exchange}"


def _steps(settings: Mapping[str, Any]) -> str:
    kind = f"random weights, {settings['size']}" if settings["denoise_only"] else "whole clips"
    return f"{kind}, {settings['dtype']}, {settings['steps']} steps, seed {settings['seed']}"


def _stages(group: Mapping[str, Any]) -> dict[str, float]:
    """Medians of a run's stages; denoising is parted into the first step and the others, and the rest is named."""
    stages = {name: found["median"] for name, found in group["stage_seconds"].items() if found}
    if "denoise" in stages and group["first_step_seconds"]:
        first = min(group["first_step_seconds"]["median"], stages["denoise"])
        parted = {"first step": first, "other steps": stages["denoise"] - first}
        stages = {k: v for name, seconds in stages.items() for k, v in _parts(name, seconds, parted)}
    rest = (group["wall_seconds"] or {}).get("median", 0) - sum(stages.values())
    return stages | ({"launch and exit": rest} if rest > 0 else {})


def _parts(name: str, seconds: float, parted: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    yield from parted.items() if name == "denoise" else [(name, seconds)]


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    around, cells = document["environment"], document["cells"]
    yield "measured", f"{document['created'][:10]}, h3dist {around['h3dist']}, commit {_commits(cells)}"
    libraries = [f"torch {around['torch']}"]
    libraries += [f"{name} {around[key]}" for key, name in (("cuda", "CUDA"), ("nccl", "NCCL")) if around[key]]
    libraries += [f"driver {around['driver']}"] if around["driver"] else []
    yield "software", ", ".join(libraries)
    yield "settings", "; ".join(dict.fromkeys(_steps(cell["settings"]) for cell in cells))
    yield "links", _links(document["topology"])
    yield "transport", _transport(cells)
    if around["variables"]:
        yield "variables", ", ".join(f"{name}={value}" for name, value in around["variables"].items())
    planned = [cell["bytes"]["as_planned"] for cell in cells if cell["state"] == "done"]
    yield "bytes", f"as planned on every rank in {sum(planned)} of {len(planned)} cells"


def _commits(cells: list[Mapping[str, Any]]) -> str:
    found = dict.fromkeys(cell["commit"] or "unknown" for cell in cells if cell["state"] == "done")
    return ", ".join(commit[:12] + "+" * commit.endswith("+") for commit in found) or "none"


def _links(topology: Mapping[str, Any] | None) -> str:
    kinds = dict.fromkeys(link["kind"] for link in (topology or {}).get("links", ()))
    return ", ".join(kinds) or "none known"


def _transport(cells: list[Mapping[str, Any]]) -> str:
    ways = [cell["transport"] for cell in cells if cell["state"] == "done"]
    told = [f"{way['backend']} {', '.join(way['channels'])}".strip() for way in ways if way["backend"]]
    return "; ".join(dict.fromkeys(told)) or "one rank"


def _faults(cells: list[Mapping[str, Any]]) -> Iterator[str]:
    words = {"failed": "failed", "timeout": "ran out of time", "oom": "ran out of memory", "pending": "has not run"}
    for cell in cells:
        if cell["state"] in words:
            cause = cell["cause"]
            where = f" on rank {cause['rank']}" if cause and cause["rank"] is not None else ""
            yield f"{cell['name']} {words[cell['state']]}" + (f"{where}: {cause['message']}" if cause else "")
    skipped = dict.fromkeys(f"{cell['name'].partition(' #')[0]}: {cell['reason']}" for cell in cells if cell["reason"])
    yield from (f"skipped {reason}" for reason in skipped)


def _measured(name: str, document: Mapping[str, Any]) -> Source:
    """Points by themselves: another program beside ours, an exchange alone, a rank that was killed."""
    rows = tuple(_point_row(point) for point in document["points"])
    facts = tuple((key.replace("_", " "), str(value)) for key, value in document["facts"].items())
    return Source(name, document["title"], tuple(sorted(with_gains(rows), key=lambda row: row.place)), facts)


# Other people's


def _published(name: str, document: Mapping[str, Any]) -> Source:
    rows = tuple(_point_row(point) for point in document["points"])
    facts = [("published", f"by {document['published_by']}, {document['published'] or 'no date known'}")]
    facts += [("source", ": ".join(filter(None, (source["what"], source["url"])))) for source in document["sources"]]
    facts += [(key, str(value)) for key, value in document["settings"].items()]
    facts += [("note", note) for note in document["notes"]]
    facts += [("not known", ", ".join(document["unknown"]))]
    return Source(name, document["title"], tuple(sorted(with_gains(rows), key=lambda row: row.place)), tuple(facts))


def _point_row(point: Mapping[str, Any]) -> Row:
    return Row(
        hardware=point["hardware"],
        layout=point["layout"],
        ranks=point["ranks"],
        shape=point["shape"],
        attention=point.get("attention"),
        runner=point.get("runner"),
        step=point.get("step_seconds"),
        total=point.get("total_seconds"),
        speedup=point.get("speedup"),
        efficiency=point["speedup"] / point["ranks"] if point.get("speedup") else None,
        peak_memory=point.get("peak_memory"),
        stages=point.get("stage_seconds", {}),
        note=point.get("note"),
    )
