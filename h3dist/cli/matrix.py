"""`h3dist matrix`."""

import typer

from h3dist.cli.shell import Overrides, Verbose


def matrix(words: Overrides = None, verbose: Verbose = False) -> None:
    """Measure layouts against each other, one fresh run a cell; writes a JSON and prints its path.

    Takes overrides, as in matrix=smoke runtime.device=cpu worlds=[1,2] repeats=2 results=FILE. Done cells of the file
    are kept. Exit code 1: some cells failed, ran out of time or out of memory; the JSON says which and why.
    """
    from h3dist.matrix.config import compose_matrix
    from h3dist.matrix.run import run_matrix

    raise typer.Exit(run_matrix(*compose_matrix(words or [])))
