"""The commands of `h3dist`. What one needs beyond the command line is imported when it runs."""

from typing import Annotated

import typer

from h3dist.cli.attention import attention
from h3dist.cli.bench import bench
from h3dist.cli.doctor import doctor
from h3dist.cli.extend import extend
from h3dist.cli.matrix import matrix
from h3dist.cli.plan import plan
from h3dist.cli.report import report
from h3dist.cli.shell import (
    Attention,
    Commands,
    Gpus,
    Mode,
    NoClobber,
    OutputPath,
    Overrides,
    PromptFile,
    RequestFile,
    Untrained,
    Verbose,
    Words,
    print_version,
)
from h3dist.errors import ConfigError, nearest

EPILOG = (
    "Exit codes: 0 done; 1 unexpected, files that differ, cells that failed; 2 request or configuration; 3 checkpoint; "
    "4 the plan is not legal or does not fit; 5 output; 6 NaN or infinity; 7 a rank died or timed out; "
    "8 a package is missing; 130 interrupted; 143 terminated."
)

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def common(
    verbose: Verbose = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version.")
    ] = False,
) -> None:
    """MiniMax H3: a prompt to video with sound, on 1 to 8 GPUs, from single-file checkpoints."""


@app.command()
def generate(
    words: Words = None,
    request: RequestFile = None,
    prompt_file: PromptFile = None,
    output: OutputPath = None,
    gpus: Gpus = "auto",
    mode: Mode = None,
    attention: Attention = None,
    no_clobber: NoClobber = False,
    allow_untrained: Untrained = False,
    verbose: Verbose = False,
) -> None:
    """Make one clip.

    The first word is the prompt, even if it holds `=`; the rest are Hydra overrides such as request.seed=7.
    With --request or --prompt-file every word is an override. A prompt that starts with `-` follows `--`.
    """
    from h3dist import launcher
    from h3dist.cli.typed import ask, group_options, output_options, rank_count

    options = group_options(mode, attention, allow_untrained)
    asked = ask(words or [], options, request, prompt_file)
    job = launcher.Job(
        request=asked.request,
        overrides=asked.overrides,
        gpus=rank_count(gpus),
        output=output_options(asked.overrides, output, no_clobber),
        verbose=verbose,
        inputs=tuple(filter(None, (request, prompt_file))),
    )
    raise typer.Exit(launcher.run_generate(job))


@app.command()
def decode(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Latents of a run that failed late.")],
    words: Overrides = None,
    output: OutputPath = None,
    no_clobber: NoClobber = False,
    verbose: Verbose = False,
) -> None:
    """Make the MP4 from saved latents."""
    from pathlib import Path

    from h3dist import deliver
    from h3dist.cli.typed import output_options
    from h3dist.config import compose
    from h3dist.processes import leave, on_signals

    overrides = words or []
    chosen = output_options(overrides, output, no_clobber)
    with on_signals(leave):  # so that no temporary file outlives a signal
        typer.echo(deliver.decode_file(compose(overrides), Path(file), chosen))


@app.command()
def inspect(file: Annotated[str, typer.Argument(metavar="FILE")], verbose: Verbose = False) -> None:
    """Say what a checkpoint file is: model, sizes, number formats."""
    from pathlib import Path

    from h3dist.checkpoint.inspect import describe

    typer.echo(describe(Path(file)))


@app.command()
def tiny(
    directory: Annotated[str, typer.Argument(metavar="DIR")],
    form: Annotated[str, typer.Option("--form", metavar="curve|full", help="Of its timesteps.")] = "curve",
    seed: Annotated[int, typer.Option("--seed", help="Of the random weights.")] = 0,
    verbose: Verbose = False,
) -> None:
    """Write a complete set of small random checkpoints, to try everything without the real ones."""
    from pathlib import Path

    if form not in ("curve", "full"):
        raise ConfigError(f"--form {form}: must be curve or full{nearest(form, ('curve', 'full'))}")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed {seed}: must be a whole number from 0 to 2^32 - 1")
    if not directory:
        raise ConfigError("DIR is empty; name a folder, or . for this one")
    from h3dist.checkpoint.tiny import write_tiny

    for path in write_tiny(Path(directory), form=form, seed=seed).values():
        typer.echo(path)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A")],
    second: Annotated[str, typer.Argument(metavar="B")],
    verbose: Verbose = False,
) -> None:
    """Say where two files of latents, intermediates or traces part; exit code 1 if they do."""
    from h3dist.compare import compare_files

    text, same = compare_files(first, second)
    typer.echo(text)
    raise typer.Exit(0 if same else 1)


@app.command()
def tasks(
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON Schema of a request file.")] = False,
    verbose: Verbose = False,
) -> None:
    """List the tasks, their fields and limits."""
    import json

    from h3dist.request import json_schema, task_table

    typer.echo(json.dumps(json_schema(), indent=2) if as_json else task_table())


app.command()(attention)
app.command()(extend)
app.command()(plan)
app.command()(bench)
app.command()(matrix)
app.command()(doctor)
app.command()(report)


def main() -> None:
    """The `h3dist` script."""
    app(prog_name="h3dist")
