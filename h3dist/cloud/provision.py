"""From a bare pod to one that can run: the package, what the doctor says, the checkpoints, their paths."""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from h3dist.cloud.checkpoints import RELEASED
from h3dist.cloud.failures import PodFailed
from h3dist.cloud.recipe import Checkpoint, Recipe
from h3dist.cloud.ssh import RemoteError, Ssh, quote
from h3dist.cloud.transfer import push
from h3dist.errors import CheckpointError, ConfigError, OutputError

SOURCE = Path(__file__).resolve().parents[2]
SENT = ("h3dist", "conf", "launch", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
EXTRAS = {"flash": "flash", "flash4": "flash4", "sage": "sage"}


def on_pod(name: str) -> str:
    """The text of a script that runs on the pod."""
    return (files("h3dist.cloud") / "onpod" / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Provision:
    """Sets up one pod, step by step. `token` is a Hugging Face token to send along, or None."""

    ssh: Ssh
    recipe: Recipe
    say: Callable[[str], None]
    token: str | None = None

    def tools(self) -> None:
        """The workspace, and tmux, which keeps the run when the connection goes."""
        recipe = self.recipe
        self._run("workspace", f"mkdir -p {quote(recipe.workspace, recipe.models)}")
        install = "(apt-get -qq update && apt-get -qq install -y tmux) >/dev/null"
        self._run("tmux", f"command -v tmux >/dev/null || {install}", timeout=600)

    def package(self, attentions: Sequence[str]) -> None:
        """h3dist with the extras that these backends need; the local checkout is sent as it is on disk."""
        if self.recipe.package == "checkout":
            count = push(self.ssh, checkout_files(SOURCE), f"{self.recipe.workspace}/src")
            self.say(f"  sent {count} files of the checkout")
        extras = sorted({EXTRAS[name] for name in attentions if name in EXTRAS})
        if command := self.recipe.install_command(extras):
            self._run("installing h3dist", f"cd {quote(self.recipe.workspace)} && {command}", timeout=3600)

    def doctor(self, may_fail: bool) -> dict[str, object]:
        """What `h3dist doctor --json` says. Raises PodFailed when it does not answer, or finds a fault (exit 2).

        `may_fail`: checkpoints are not there yet, so that only an answer is asked for.
        """
        command = self._in_environment(quote(*self.recipe.doctor))
        text = self._run("h3dist doctor", f'{command}; code=$?; echo; echo "code=$code"', timeout=600)
        report, _, code = text.rpartition("code=")
        try:
            answer = json.loads(report)
        except ValueError:
            raise PodFailed(f"h3dist doctor did not answer with JSON: {report.strip()[-300:]}") from None
        if not isinstance(answer, dict) or code.strip() not in ("0", "1", "2"):
            raise PodFailed(f"h3dist doctor ended with {code.strip()}: {report.strip()[-300:]}")
        if code.strip() == "2" and not may_fail:
            raise PodFailed(f"h3dist doctor found faults that stop a run: {report.strip()[-600:]}")
        return answer

    def checkpoints(self) -> None:
        """Every checkpoint in the models folder, each of the right size and with a whole header."""
        wanted = self.recipe.checkpoints if self.recipe.checkpoints is not None else list(RELEASED)
        missing = self._faults(wanted)
        for item in wanted:
            if item.witness in missing:
                self._download(item)
        if faults := self._faults(wanted):
            told = "; ".join(f"{name}: {why}" for name, why in faults.items())
            raise CheckpointError(f"after the download on the pod: {told}")
        self._environment(wanted)

    def environment(self) -> None:
        """The file that sets model paths, without any: for runs that need no checkpoint."""
        self._environment([])

    def _download(self, item: Checkpoint) -> None:
        self.say(f"  downloading {item.file} ({(item.size or 0) / 1e9:.1f} GB) from {item.repo}")
        what = ["--include", f"{item.file}/*"] if item.folder else [item.file]
        where = ["--revision", item.revision, "--local-dir", self.recipe.models]
        # the token comes in a file that only its owner can read, on the container's own disk
        command = self._in_environment(quote("hf", "download", item.repo, *what, *where))
        prefix = f"export HF_TOKEN_PATH={quote(self._token_file)}; " if self._place_token() else ""
        self._run(f"downloading {item.file}", f"{prefix}{command} >/dev/null", timeout=4 * 3600)

    @property
    def _token_file(self) -> str:
        return f"{self.recipe.state}/hf-token"

    def _place_token(self) -> bool:
        """Put the token where `hf` reads it; true when there is one, be it from the pod's own environment."""
        path = quote(self._token_file)
        if self.token:
            folder = quote(self.recipe.state)
            command = f"umask 077 && mkdir -p {folder} && cat > {path}"
            self.ssh.run("placing the Hugging Face token", command, self.token.encode())
            return True
        return self._run("looking for a token", f"test -s {path} && echo yes || true").strip() == "yes"

    def forget_token(self) -> None:
        """Remove the token from the pod once nothing is left to download."""
        self._run("removing the token", f"rm -f {quote(self._token_file)}")

    def _faults(self, wanted: list[Checkpoint]) -> dict[str, str]:
        pairs = [[f"{self.recipe.models}/{item.witness}", item.size] for item in wanted]
        script = f"{quote(self.recipe.python)} -c {quote(on_pod('check.py'))}"
        found = json.loads(self.ssh.run("checking checkpoints", script, json.dumps(pairs).encode()))
        return {path.removeprefix(f"{self.recipe.models}/"): why for path, why in found.items()}

    def _environment(self, items: list[Checkpoint]) -> None:
        lines = [f"export {item.variable}={quote(f'{self.recipe.models}/{item.file}')}" for item in items]
        if self.recipe.path:
            lines.append(f"export PATH={quote(self.recipe.path)}:$PATH")
        text = "\n".join(lines) + "\n"
        self.ssh.run("setting the paths", f"cat > {quote(self.recipe.workspace)}/env.sh", text.encode())

    def _in_environment(self, command: str) -> str:
        path = f"PATH={quote(self.recipe.path)}:$PATH " if self.recipe.path else ""
        return path + command

    def _run(self, what: str, command: str, timeout: float | None = 60) -> str:
        try:
            return self.ssh.run(what, command, timeout=timeout)
        except RemoteError as error:
            if error.disk_full:
                raise OutputError(f"the disk of the pod is full: {error}") from None
            raise PodFailed(str(error)) from None


def checkout_files(root: Path) -> list[tuple[Path, str]]:
    """What an installation needs of a git checkout, as it is on disk: no results, no weights, no private files."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SENT]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(f"{root} is no git checkout: use --package image or a pinned release") from None
    names = sorted({name for name in done.stdout.decode().split("\0") if name})
    return [(root / name, name) for name in names if (root / name).is_file() and not (root / name).is_symlink()]


def commit_of(root: Path) -> str | None:
    """The commit of a checkout, with "+" when files differ from it; None where git does not say."""
    words = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    try:
        head, changed = (
            subprocess.run(["git", "-C", str(root), *w], capture_output=True, text=True, check=True).stdout.strip()
            for w in words
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def guarded_start(recipe: Recipe, lifetime: float) -> tuple[str, ...]:
    """The container's first command: our guard, which starts what the image starts and ends it in time."""
    from base64 import b64encode

    packed = b64encode(on_pod("guard.sh").encode()).decode()
    script = f'mkdir -p -m 700 "$0" && echo {packed} | base64 -d > "$0/guard.sh" && exec bash "$0/guard.sh" "$@"'
    return ("bash", "-c", script, recipe.state, str(max(1, round(lifetime))), *recipe.start)
