"""`h3dist doctor`."""

from typing import Annotated

import typer

from h3dist.cli.shell import Overrides, Verbose, say
from h3dist.errors import ConfigError


def doctor(
    words: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    record: Annotated[
        str | None, typer.Option("--record", metavar="FILE", help="Keep what the driver says, for `plan --links`.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Each probe may take.")] = 60.0,
    verbose: Verbose = False,
) -> None:
    """Look for what a run would stumble over: GPUs, links, memory, files, packages, copies, exchange.

    Exit code 0: no problem; 1: warnings; 2: errors. Nothing is changed or set.
    """
    import json

    from h3dist.doctor.examine import examine
    from h3dist.doctor.recording import write_recording
    from h3dist.processes import on_signals

    if not 1 <= timeout <= 3600:
        raise ConfigError(f"--timeout {timeout:g}: must be 1 to 3600 seconds")
    with on_signals(_leave):
        report = examine(words or [], limit=timeout)
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.text())
    if record is not None:
        write_recording(report.recording, record)
        say(f"recorded to {record}")
    raise typer.Exit(report.exit_code)


def _leave(number: int, frame: object) -> None:
    """A signal handler: the children are ended on the way out."""
    raise SystemExit(128 + number)
