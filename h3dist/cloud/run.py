"""The two commands that people want: rent, set up, run under tmux, follow, fetch, give back."""

import json
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten

from h3dist.cloud.failures import CloudError, PodLost, RunFailed
from h3dist.cloud.job import Job
from h3dist.cloud.provision import SOURCE, Provision, commit_of
from h3dist.cloud.quote import Quote
from h3dist.cloud.rental import Desk, Rental, cause_of
from h3dist.cloud.ssh import Ssh
from h3dist.cloud.transfer import push, sha256, writable_folder
from h3dist.errors import ConfigError, OutputError

FILE_OPTIONS = ("--request", "--prompt-file")
OUTPUT_OPTIONS = ("-o", "--output")


@dataclass(frozen=True)
class Work:
    """What runs on the pod, and where its results go on this side."""

    command: list[str]
    target: Path
    inputs: dict[str, Path] = field(default_factory=dict)  # name on the pod -> local file
    attentions: tuple[str, ...] = ("sdpa",)
    checkpoints: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    pods: int = 1  # how many pods one after another, when one is taken back
    resume: bool = False  # send the JSON files that are in `target` along first
    brought: set[str] = field(default_factory=set)  # files of `target` that this run has fetched


def with_inputs(command: list[str], extra: list[Path]) -> tuple[list[str], dict[str, Path]]:
    """The command with every local file that it names replaced by its place on the pod, and those files.

    Raises ConfigError for an output that would land outside the folder that is fetched.
    """
    inputs = {path.name: path for path in extra}
    changed = list(command)
    for i, word in enumerate(command):
        option, _, joined = word.partition("=")
        value = joined if joined else command[i + 1] if i + 1 < len(command) else ""
        if option in FILE_OPTIONS and value:
            path = Path(value)
            inputs[path.name] = path
            changed[i if joined else i + 1] = f"{option}=../inputs/{path.name}" if joined else f"../inputs/{path.name}"
        leaves = option in OUTPUT_OPTIONS and (value.startswith("/") or ".." in Path(value).parts)
        if leaves or (word.startswith("output.path=") and joined.startswith("/")):
            raise ConfigError(f"the output {value!r} is not below the run's own folder, so it would not be fetched")
    for name, path in inputs.items():
        if not path.is_file():
            raise ConfigError(f"no file {path} to send along as {name}")
    return changed, inputs


def results_folder(what: str) -> Path:
    """A new folder below the current one."""
    return Path("runpod-results") / f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"


def attentions_of(words: list[str]) -> tuple[str, ...]:
    """The attention backends that a command names; their extras are installed on the pod."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "--attention":
            return (after,)
        if word.startswith(("--attention=", "attention=", "attentions=")):
            return tuple(name.strip() for name in word.partition("=")[2].strip("[]").split(","))
    return ("sdpa",)


def matrix_words(overrides: list[str]) -> list[str]:
    """The matrix's overrides, with PyTorch's own attention where none is named."""
    named = any(word.startswith("attentions=") for word in overrides)
    return overrides if named else [*overrides, "attentions=[sdpa]"]


def matrix_needs_checkpoints(overrides: list[str]) -> bool:
    """Whether whole clips are made: only they read checkpoints, the other cells run on random weights."""
    return "denoise_only=false" in overrides or ("matrix=clip" in overrides and "denoise_only=true" not in overrides)


def carry_out(desk: Desk, quote: Quote, work: Work) -> Path:
    """Do `work` on rented pods, one after another while they are taken back. Returns the results' folder.

    Whatever happens, no pod is left; the errors are those of the steps.
    """
    writable_folder(work.target)
    base = quote.base
    for left in reversed(range(work.pods)):
        try:
            with Rental(desk, quote.wish, base, shorten(" ".join(work.command), 60, placeholder=" ...")) as rental:
                _on_pod(desk, rental, work)
            return work.target
        except PodLost as error:
            if not left or not base.interruptible or rental.ended_elsewhere:
                raise
            desk.say(f"{error}; going on with another pod, {left} more allowed")
            base = replace(base, name=desk.store.new_name())
    raise AssertionError("the last pod raises or returns")


def _on_pod(desk: Desk, rental: Rental, work: Work) -> None:
    desk.say("stage: waiting for the pod")
    ssh = rental.ready()
    rental.tighten(ssh)
    desk.say("stage: setting up")
    _set_up(desk, ssh, work)
    job = Job(ssh, desk.recipe, "run", desk.pace, show=desk.say, say=desk.say)
    _send_inputs(desk, ssh, job, work)
    desk.say("stage: running")
    try:
        job.start(work.command, work.environment)
        job.follow(rental.alive, lambda: _partial(desk, job, work))
    except BaseException as error:
        _save_what_there_is(desk, job, work, error)
        raise
    desk.say("stage: fetching")
    sums = job.fetch(work.target) | {"pod.json": _write_provenance(rental, work)}
    _write_sums(work.target, sums)
    desk.say(f"fetched {len(sums)} files to {work.target}, each checked")


def _set_up(desk: Desk, ssh: Ssh, work: Work) -> None:
    setup = Provision(ssh, desk.recipe, desk.say, work.token)
    desk.say("  workspace and tools")
    setup.tools()
    setup.package(work.attentions)
    desk.say("  asking h3dist doctor")
    setup.doctor(may_fail=True)
    if work.checkpoints and desk.recipe.checkpoints != []:
        desk.say("  checkpoints")
        setup.checkpoints()
        setup.forget_token()
        setup.doctor(may_fail=False)
    else:
        setup.forget_token()
        setup.environment()


def _send_inputs(desk: Desk, ssh: Ssh, job: Job, work: Work) -> None:
    """The user's files, and what an earlier pod of this run had finished, so that the run resumes there."""
    if work.inputs:
        push(ssh, [(path, name) for name, path in work.inputs.items()], f"{job.folder}/inputs")
    earlier = {name: work.target / name for name in work.brought}
    if work.resume:
        earlier |= {str(path.relative_to(work.target)): path for path in work.target.rglob("*.json")}
    if earlier:
        desk.say(f"  sending {len(earlier)} files of earlier results along")
        push(ssh, [(path, name) for name, path in sorted(earlier.items())], job.results)


def _partial(desk: Desk, job: Job, work: Work) -> None:
    try:
        work.brought.update(job.fetch(work.target, partial=True))
    except CloudError as error:
        desk.say(f"partial results were not fetched: {error}")


def _save_what_there_is(desk: Desk, job: Job, work: Work, error: BaseException) -> None:
    """After the command failed: its results and log, while the pod still stands; the failure stays the story."""
    if not isinstance(error, RunFailed):
        return
    try:
        job.fetch(work.target)
        desk.say(f"the log and what results there are: {work.target}")
    except Exception as second:
        desk.say(f"nothing could be saved after the failure: {cause_of(second)}")


def _write_provenance(rental: Rental, work: Work) -> str:
    """`pod.json` beside the results: what machine it was, for how much, and which code. Returns its checksum."""
    lease, recipe = rental.lease, rental.desk.recipe
    facts = {
        "pod": {"id": lease.pod_id, "name": lease.name, "gpus": lease.gpus, "data_center": lease.data_center},
        "dollars_per_hour": lease.price,
        "image": recipe.image,
        "package": recipe.package,
        "commit": commit_of(SOURCE) if recipe.package == "checkout" else None,
        "command": work.command,
        "rented": datetime.fromtimestamp(lease.created, UTC).isoformat(timespec="seconds"),
        "fetched": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        (work.target / "pod.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {work.target}/pod.json: {error.strerror}") from None
    return sha256(work.target / "pod.json")


def _write_sums(target: Path, sums: dict[str, str]) -> None:
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    try:
        (target / "SHA256SUMS").write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {target}/SHA256SUMS: {error.strerror}") from None
