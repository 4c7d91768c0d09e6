"""`h3dist plan`: what a run would do, without doing it."""

from typing import Annotated

import typer

from h3dist.cli.shell import (
    Attention,
    Gpus,
    Mode,
    OutputPath,
    PromptFile,
    RequestFile,
    Untrained,
    Verbose,
    Words,
    say,
)

PROMPT = "A quiet shot of a woman by a rain-streaked window. She says, 'We should leave before dawn.'"


def plan(
    words: Words = None,
    request: RequestFile = None,
    prompt_file: PromptFile = None,
    output: OutputPath = None,
    gpus: Gpus = "auto",
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help='Plan for such GPUs, as in "RTX PRO 6000".')
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of each GPU, as in 96GiB.")
    ] = None,
    links: Annotated[
        str | None, typer.Option("--links", metavar="FILE", help="A machine's GPUs and links, from `doctor --record`.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Compare 1, 2, 4, 6 and 8 GPUs.")] = False,
    mode: Mode = None,
    attention: Attention = None,
    allow_untrained: Untrained = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Say who would hold and send what, how long a step would take, and why; takes what `generate` takes.

    Makes nothing, and needs neither weights nor GPUs. With --gpus auto and no --mode it may take fewer GPUs than
    there are, where more are predicted to gain nothing.
    """
    import json

    from h3dist import planner
    from h3dist.cli.typed import ask, byte_count, group_options, rank_count

    options = group_options(mode, attention, allow_untrained)
    asked = ask(words or [], options, request, prompt_file, stand_in=PROMPT)
    ahead = planner.Ahead(rank_count(gpus), gpu, byte_count(gpu_memory), links)
    foretell = planner.compare_ahead if table else planner.decide_ahead
    found = foretell(asked.config, asked.request, ahead)
    for note in found.notes:
        say(note)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else found.text())
