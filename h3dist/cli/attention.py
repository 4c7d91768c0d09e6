"""`h3dist attention`: the ways to compute attention, exact or approximate, what each needs, and why not here."""

import typer

from h3dist.cli.shell import Verbose

ROWS, HEADS, HEAD_DIM = 38110, 56, 128  # of a clip of the default size, whose prompt has 400 tokens


def attention(verbose: Verbose = False) -> None:
    """List the attention backends, what each needs, and why it cannot be used here."""
    import torch

    from h3dist.attention.backend import Task
    from h3dist.attention.registry import WHOLE
    from h3dist.attention.sliced import HEADS as GROUP

    cuda = torch.cuda.is_available()
    task = Task(
        rows=ROWS,
        heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16 if cuda else torch.float32,
        device=torch.device("cuda" if cuda else "cpu"),
        capability=torch.cuda.get_device_capability() if cuda else None,
    )
    for backend in WHOLE:
        kind = "exact" if backend.exact else f"approximate, held to {backend.bound:.0%}"
        reason = backend.refuses(task) or backend.lacks(task)
        typer.echo(f"{backend.name:20} {kind}")
        typer.echo(f"{'':20} needs {backend.needs}")
        typer.echo(f"{'':20} {f'not here: {reason}' if reason else 'usable here'}")
    typer.echo(f"each also as NAME+sliced, {GROUP} heads at a time, which bounds its temporary memory")
