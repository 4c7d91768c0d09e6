"""`h3dist report`."""

from typing import Annotated

import typer

from h3dist.cli.shell import Verbose


def report(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Of `h3dist matrix`, or published figures.")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="Write report.md and pictures there.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Print measurements as Markdown, several side by side; with -o write that and pictures into a folder."""
    from pathlib import Path

    from h3dist.report.write import report_text, write_report

    paths = [Path(file) for file in files]
    typer.echo(write_report(paths, Path(output)) if output else report_text(paths), nl=output is not None)
