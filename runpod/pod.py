#!/usr/bin/env python3
"""Rent a RunPod machine, run h3dist on it, fetch the results, always give it back. README.md beside this."""

import os
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer

    from h3dist.cloud import offers as offering
    from h3dist.cloud import run, runpod, typed
    from h3dist.cloud.client import Client
    from h3dist.cloud.dialects import DEFAULT_API
    from h3dist.cloud.explain import explain
    from h3dist.cloud.keys import TOKEN_VARIABLE, Redactor
    from h3dist.cloud.pace import Pace
    from h3dist.cloud.quote import Quote
    from h3dist.cloud.rental import Rental
    from h3dist.cloud.signals import Gate
    from h3dist.cloud.ssh import quote
    from h3dist.cloud.transfer import fetch as fetch_files
    from h3dist.cloud.transfer import push as push_files
    from h3dist.cloud.transfer import writable_folder
    from h3dist.errors import ConfigError
except ImportError as missing:
    sys.exit(f"{missing}: install this checkout first, pip install -e '.[runpod]' (see runpod/README.md)")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=__doc__,
    epilog="Exit codes: those of h3dist for what ran on the pod; 9 cloud, pod or connection; 10 budget or "
    "deadline; 130 and 143 stopped by a signal. After every one of them the pod is gone, or it is said.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
redact = Redactor([os.environ.get(TOKEN_VARIABLE, "")])


def say(text: str) -> None:
    """One line for the user, without any secret."""
    print(redact(text), flush=True)


@app.callback()
def common(
    ctx: typer.Context,
    api: Annotated[str, typer.Option(envvar="H3_RUNPOD_API", help="Address of the REST API.")] = DEFAULT_API,
    key_file: Annotated[
        Path | None, typer.Option(envvar="H3_RUNPOD_KEY_FILE", help="File with the key, mode 0600.")
    ] = None,
    pace: Annotated[float, typer.Option(min=0.001, help="Multiplies every waiting time.")] = 1.0,
) -> None:
    ctx.obj = runpod.Office(say, redact, Pace().scaled(pace), api=api, key_file=key_file)


def settle(office: runpod.Office, yes: bool) -> None:
    """Offer to end what a killed client left, and watch again over what should run on."""
    if not office.has_key():
        return
    for lease in runpod.leftovers(office):
        say(f"left behind by a client that is gone: {lease.name} ({lease.what}), about ${lease.spent():.2f}")
        if yes or confirmed("destroy it?"):
            runpod.destroy(office, [lease.name], all_mine=False)
    runpod.watch_again(office)


def confirmed(question: str) -> bool:
    """Ask on the terminal. No answer at all is an error, so that a script does not rent by accident."""
    print(f"{question} [y/N] ", end="", flush=True)
    answer = sys.stdin.readline()
    if not answer:
        raise ConfigError("nobody is there to answer; say --yes")
    return answer.strip().lower() in ("y", "yes")


@app.command()
def offers(
    ctx: typer.Context,
    gpus: Annotated[list[int] | None, typer.Option("--gpus", help="Counts to show.")] = None,
    cloud: Annotated[str, typer.Option(help="SECURE or COMMUNITY.")] = "SECURE",
    width: int = 1344,
    height: int = 768,
    frames: int = 243,
    steps: int = 12,
    json: typed.Json = False,
) -> None:
    """GPU types that fit a plan, cheapest first. Needs no key; with one, prices and stock are live."""
    shape = offering.Shape(width, height, frames, steps)
    found = runpod.offers(ctx.obj, shape, gpus or [1, 2, 4, 6, 8], cloud)
    if json:
        print(runpod.as_json(found))
    else:
        say(f"for {width}x{height}, {frames} frames; ~ marks rough prices, with a key they are live")
        offering.table(found, say)


@app.command()
@typed.takes_wanted
def plan(ctx: typer.Context, pod: typed.Wanted) -> None:
    """What would be created, what it costs an hour and at most. Needs no key, rents nothing."""
    office: runpod.Office = ctx.obj
    client = office.client() if office.has_key() else None
    quoted = runpod.quoted(office, pod.ask, pod.recipe, pod.limits, client)
    say("\n".join(["in this order, the first that can be had:", *quoted.lines()]))


@app.command()
@typed.takes_wanted
def create(ctx: typer.Context, pod: typed.Wanted, yes: typed.Yes = False) -> None:
    """Rent a pod and leave it running; it is ended when the budget or the deadline is used up."""
    office, gate = ctx.obj, Gate(say)
    with gate.caught():
        quoted, client = agreed(office, pod, yes)
        with Rental(runpod.desk(office, client, quoted, gate), quoted.wish, quoted.base, "by hand") as rental:
            rental.tighten(rental.ready())
            with gate.held("handing the pod over"):
                runpod.hand_over(office, rental.lease)
                rental.keep()
    say(f"{rental.lease.name} runs; end it with: runpod/pod.py destroy {rental.lease.name}")


@app.command()
@typed.takes_wanted
def matrix(
    ctx: typer.Context,
    pod: typed.Wanted,
    overrides: typed.Rest = None,
    out: typed.Out = None,
    pods: typed.Pods = 3,
    resume: typed.Resume = False,
    yes: typed.Yes = False,
) -> None:
    """The scaling matrix on a rented machine: `pod.py matrix --gpus 8 --budget 20 -- matrix=scaling`."""
    words = run.matrix_words(list(overrides or []))
    work = run.Work(
        command=[*pod.recipe.matrix, *words],
        target=out or run.results_folder("matrix"),
        attentions=run.attentions_of(words),
        checkpoints=run.matrix_needs_checkpoints(words),
        environment={name: os.environ[name] for name in ("H3_SAVE_LATENTS",) if name in os.environ},
        token=token(pod),
        pods=pods,
        resume=resume,
    )
    carry_out(ctx.obj, pod, work, yes)


@app.command()
@typed.takes_wanted
def generate(
    ctx: typer.Context,
    pod: typed.Wanted,
    command: typed.Rest = None,
    out: typed.Out = None,
    send: typed.Send = None,
    no_checkpoints: typed.Bare = False,
    yes: typed.Yes = False,
) -> None:
    """Any h3dist command on a rented machine: `pod.py generate --gpus 2 -- h3dist generate "..." -o a.mp4`."""
    if not command:
        raise ConfigError("say what to run after --, such as: -- h3dist generate 'A quiet shot ...' -o out.mp4")
    words, inputs = run.with_inputs(command, send or [])
    target = out or run.results_folder("generate")
    work = run.Work(words, target, inputs, run.attentions_of(words), not no_checkpoints, token=token(pod))
    carry_out(ctx.obj, pod, work, yes)


def carry_out(office: runpod.Office, pod: typed.Wanted, work: run.Work, yes: bool) -> None:
    """Agree on the price, run, and say where the results are."""
    gate = Gate(say)
    with gate.caught():
        writable_folder(work.target)
        quoted, client = agreed(office, pod, yes)
        run.carry_out(runpod.desk(office, client, quoted, gate), quoted, work)
    say(f"done: {work.target}")


def agreed(office: runpod.Office, pod: typed.Wanted, yes: bool) -> tuple[Quote, Client]:
    """What is rented and for how much, once the user said yes to it."""
    settle(office, yes)
    client = office.client()
    quoted = runpod.quoted(office, pod.ask, pod.recipe, pod.limits, client)
    say("\n".join(["renting the first of these that can be had:", *quoted.lines()]))
    if not yes and not confirmed("rent it?"):
        raise ConfigError("nothing was rented")
    return quoted, client


def token(pod: typed.Wanted) -> str | None:
    """The Hugging Face token to send along; none when a RunPod secret holds it."""
    return None if pod.ask.hf_secret else os.environ.get(TOKEN_VARIABLE) or None


@app.command()
def wait(ctx: typer.Context, name: typed.Name = None) -> None:
    """Wait until a pod answers over SSH, and say how to reach it."""
    office: runpod.Office = ctx.obj
    ssh = runpod.reach(office, name)
    say(quote(*ssh.argv("")[:-1]))


@app.command("exec")
def execute(ctx: typer.Context, command: typed.Rest = None, name: typed.PodName = None) -> None:
    """Run a command on a pod: `pod.py exec --pod NAME -- nvidia-smi`."""
    if not command:
        raise ConfigError("say what to run after --")
    runpod.execute(ctx.obj, name, command, lambda text: print(redact(text), end="", flush=True))


@app.command()
def push(
    ctx: typer.Context,
    files: list[Path],
    to: Annotated[str | None, typer.Option()] = None,
    name: typed.PodName = None,
) -> None:
    """Copy local files to a folder of a pod, checked."""
    ssh, lease = runpod.known(ctx.obj, name), runpod.lease_of(ctx.obj, name)
    folder = to or f"{lease.workspace}/inputs"
    say(f"sent {push_files(ssh, [(path, path.name) for path in files], folder)} files to {folder}")


@app.command()
def fetch(ctx: typer.Context, folder: str, to: Path, name: typed.PodName = None) -> None:
    """Copy a folder of a pod to a local one, checked."""
    writable_folder(to)
    say(f"fetched {len(fetch_files(runpod.known(ctx.obj, name), folder, to))} files to {to}")


@app.command()
def logs(ctx: typer.Context, name: typed.Name = None) -> None:
    """The log of the run on a pod, as far as it goes."""
    ssh, lease = runpod.known(ctx.obj, name), runpod.lease_of(ctx.obj, name)
    say(ssh.run("logs", f"cat {quote(lease.workspace)}/runs/*/log").rstrip("\n"))


@app.command("list")
def list_pods(ctx: typer.Context, json: typed.Json = False) -> None:
    """Every pod of h3dist in the account, and every lease of this machine. Nothing listed: nothing is left."""
    rows = runpod.overview(ctx.obj)
    if json:
        print(runpod.as_json(rows))
        return
    for row in rows:
        state = "" if row["looked_after"] else "  NOBODY LOOKS AFTER IT" if row["mine"] else "  another machine's"
        say(f"{row['name']}  {row['id']}  {row['status']}  {row['gpus']}  ${row['per_hour']:.2f}/h{state}")
    if not rows:
        say("nothing of h3dist is left in this account")
    settle(ctx.obj, yes=False) if sys.stdin.isatty() else None


@app.command()
def cost(ctx: typer.Context, json: typed.Json = False) -> None:
    """What runs now and what it cost so far, then what is over, by this machine's clock."""
    office: runpod.Office = ctx.obj
    rows, over = runpod.overview(office) if office.has_key() else [], office.store.ledger()
    if json:
        print(runpod.as_json({"running": rows, "over": over}))
        return
    for row in rows:
        say(f"{row['name']}  runs, ${row['per_hour']:.2f} an hour, about ${row['so_far']:.2f} so far")
    for entry in over:
        say(f"{entry['name']}  over, about ${entry['dollars']:.2f}  ({entry['what']}; {entry['cause']})")
    total = sum(float(row["so_far"]) for row in rows) + sum(float(entry["dollars"]) for entry in over)
    say(f"about ${total:.2f} together, storage not counted; the account's bill is in RunPod's console")


@app.command()
def destroy(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Names or ids.")] = None,
    all_mine: Annotated[bool, typer.Option("--all-mine", help="Every pod that this machine rented.")] = False,
) -> None:
    """End pods, and see that they are gone."""
    if not names and not all_mine:
        raise ConfigError("name the pods to end, or say --all-mine")
    with Gate(say).held("ending pods", raises=False):
        say(f"{runpod.destroy(ctx.obj, names or [], all_mine)} ended")


def run_command(words: list[str]) -> int:
    """Run a command; whatever goes wrong is one message, without a traceback or a secret. Returns the exit code."""
    try:
        code = app(words, prog_name="pod.py", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BaseException as error:
        return explain(error, redact)


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
