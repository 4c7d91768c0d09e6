"""The JSON of a matrix as a value: begun or gone on with, kept up as cells end. `schema.json` says what is in it."""

import sys
from typing import Any

from h3dist.errors import ConfigError
from h3dist.matrix import records, results
from h3dist.matrix.environment import difference, environment, topology_or_none
from h3dist.matrix.prepare import Matrix
from h3dist.matrix.scaling import add_gains, summarise
from h3dist.topology import visible_devices


def open_document(matrix: Matrix) -> dict[str, Any]:
    """The document to go on with: the one in the file where it can be trusted and is wanted, else a new one.

    Cells of the file that this matrix does not have are kept behind its own. Raises `ConfigError` where the
    file was measured on another machine.
    """
    topology, fault = topology_or_none()
    around = environment(topology, [device.name for device in visible_devices()])
    found = _trusted(matrix)
    different = difference(around, found["environment"]) if found else None
    if different:
        raise ConfigError(
            f"{matrix.path} was measured elsewhere: {different}; name another file with results=, or "
            "resume=false to set this one aside"
        )
    return {
        "schema": results.SCHEMA,
        "schema_version": results.SCHEMA_VERSION,
        "created": found["created"] if found else records.now(),
        "updated": records.now(),
        "finished": False,
        "matrix": axes(matrix),
        "environment": around,
        "topology": topology.to_dict() if topology else None,
        "topology_fault": fault,
        "cells": _cells(matrix, found["cells"] if found else []),
        "summary": [],
    }


def _cells(matrix: Matrix, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record for every cell: done ones as they were kept, the others waiting; then what else was kept."""
    own = {planned.cell.key: records.waiting(planned) for planned in matrix.cells}
    finished = {record["key"]: record for record in kept if record["state"] == "done"}
    return [finished.get(key, record) for key, record in own.items()] + [x for x in kept if x["key"] not in own]


def axes(matrix: Matrix) -> dict[str, Any]:
    """What was asked for."""
    config = matrix.config
    axes = ("layouts", "worlds", "shapes", "attentions", "exchanges")
    names = ("name", *axes, "repeats", "denoise_only", "cell_seconds")
    listed = {"cells": config.cells} if config.cells else {}
    return {name: getattr(config, name) for name in names} | listed | {"overrides": matrix.words}


def _trusted(matrix: Matrix) -> dict[str, Any] | None:
    """What the file holds, if it is to be gone on with; set aside what is not."""
    found, fault = results.load(matrix.path)
    if fault:
        aside = results.set_aside(matrix.path, "broken")
        print(f"h3dist: {matrix.path} is not trusted: {fault}; it is now {aside.name}", file=sys.stderr)
    elif found and not matrix.config.resume:
        aside = results.set_aside(matrix.path, "old")
        print(f"h3dist: {matrix.path} is now {aside.name}", file=sys.stderr)
    return found if matrix.config.resume else None


def keep(matrix: Matrix, document: dict[str, Any]) -> None:
    """Bring gains and summary up to date and write the file. Raises `OutputError`."""
    add_gains(document["cells"])
    document |= {"updated": records.now(), "summary": summarise(document["cells"])}
    results.save(matrix.path, document)
