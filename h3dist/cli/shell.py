"""What all commands share: errors in one line, -v, --version, and the options that several take."""

import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from h3dist import __version__
from h3dist.errors import H3Error

VERBOSE = "h3dist.verbose"


class Commands(TyperGroup):
    """The commands, with a user's errors answered by one line and their exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed. Ends with the exit code of what went wrong, if anything did."""
        try:
            return super().invoke(ctx)
        except H3Error as error:
            if ctx.meta.get(VERBOSE):
                traceback.print_exc()
            say(f"error: {error}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def remember(ctx: typer.Context, value: bool) -> bool:
    """-v counts wherever it stands, before the command or after it."""
    ctx.meta[VERBOSE] = value or ctx.meta.get(VERBOSE, False)
    return ctx.meta[VERBOSE]


def print_version(value: bool) -> None:
    if value:
        typer.echo(f"h3dist {__version__}")
        raise typer.Exit


def say(text: str) -> None:
    """Tell the user `text`, on stderr."""
    print(f"h3dist: {text}", file=sys.stderr)


Words = Annotated[list[str] | None, typer.Argument(metavar="[PROMPT] [OVERRIDE]...", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[OVERRIDE]...", show_default=False)]
RequestFile = Annotated[str | None, typer.Option("--request", metavar="FILE", help="A request or sidecar.")]
PromptFile = Annotated[str | None, typer.Option("--prompt-file", metavar="FILE", help="A prompt in UTF-8.")]
OutputPath = Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="The MP4 to write.")]
Gpus = Annotated[str, typer.Option("--gpus", metavar="N|auto", help="Ranks; all visible GPUs by default.")]
Mode = Annotated[str | None, typer.Option("--mode", metavar="NAME", help="Layout: auto, ulysses, ...")]
Attention = Annotated[str | None, typer.Option("--attention", metavar="NAME", help="See `h3dist attention`.")]
NoClobber = Annotated[bool, typer.Option("--no-clobber", help="Refuse to replace an existing file.")]
Untrained = Annotated[
    bool, typer.Option("--allow-untrained", help="Admit clips over 362 frames, prompts over 7000 characters.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", callback=remember, help="Say more.")]
