"""`h3dist extend`: a clip that goes on where an earlier one ends."""

from typing import Annotated

import typer

from h3dist.cli.shell import Attention, Gpus, Mode, NoClobber, OutputPath, PromptFile, Untrained, Verbose, Words


def extend(
    clip: Annotated[str, typer.Argument(metavar="CLIP", help="The film to go on from.")],
    words: Words = None,
    prompt_file: PromptFile = None,
    output: OutputPath = None,
    overlap: Annotated[int, typer.Option("--overlap", metavar="N", help="Frames that guide: 5, 22, 39, ...")] = 22,
    gpus: Gpus = "auto",
    mode: Mode = None,
    attention: Attention = None,
    no_clobber: NoClobber = False,
    allow_untrained: Untrained = False,
    verbose: Verbose = False,
) -> None:
    """Make a clip that goes on where CLIP ends, and join them.

    The new clip is guided by the last frames and the sound of CLIP. It goes to OUTPUT, and with CLIP before it to
    NAME.joined.mp4. Otherwise as `generate`.
    """
    from h3dist import launcher
    from h3dist.cli.typed import ask, group_options, output_options, rank_count
    from h3dist.extend import run_extend

    options = group_options(mode, attention, allow_untrained)
    asked = ask(words or [], options, None, prompt_file)
    chosen = output_options(asked.overrides, output, no_clobber)
    path = chosen["path"] or asked.config.output.path
    chosen |= {} if asked.config.output.clobber else {"clobber": False}
    inputs = (prompt_file,) if prompt_file else ()
    job = launcher.Job(asked.request, asked.overrides, rank_count(gpus), chosen, verbose, inputs)
    raise typer.Exit(run_extend(clip, job, path, overlap))
