"""No secret in anything that is printed, stored, or visible in the list of processes."""

import json
import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from fake_runpod import HF_TOKEN, USER_KEY, FakeRunpod
from runpod_desk import Desk, needs_sshd, python

from h3dist.cloud.failures import KeyRefused
from h3dist.cloud.keys import Redactor, clean_environment, read_key


class Watch:
    """Looks at the command line of every new process, and at the environment of every ssh, until told to stop."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._old = _processes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.1):  # a look costs the machine something
            for name in _processes() - self._old:
                with suppress(OSError):
                    line = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
                    self.seen.add(line)
                    if line.startswith(("ssh\0", "tmux\0", "tail\0")):
                        self.seen.add(Path(f"/proc/{name}/environ").read_bytes().decode(errors="replace"))


def _processes() -> set[str]:
    return {name for name in os.listdir("/proc") if name.isdigit()}


@needs_sshd
@pytest.mark.parametrize("how", ["environment", "runpod secret"])
def test_no_secret_anywhere(tmp_path: Path, how: str) -> None:
    """A run with a download, a failure and a leftover; everything it leaves behind is searched."""
    with FakeRunpod(tmp_path / "cloud") as cloud:
        desk = Desk(cloud, tmp_path)
        hub = cloud.folder / "hub" / "some" / "repo"
        hub.mkdir(parents=True)
        (hub / "m.txt").write_text("weights")
        item = {
            "slot": "denoiser",
            "variable": "H3_MODEL_PATH",
            "repo": "some/repo",
            "revision": "r",
            "file": "m.txt",
        }
        recipe = str(cloud.recipe(checkpoints=[item | {"size": 7}]))
        options = ["--hf-secret", "hf"] if how == "runpod secret" else []
        env = {} if how == "runpod secret" else {"HF_TOKEN": HF_TOKEN}
        command = python("import os; print(dict(os.environ)); print('env dumped'); raise SystemExit(5)")
        with Watch() as watch:
            done = desk.process(
                "generate", "--yes", *options, "--recipe", recipe, "--out", "out", "--", *command, **env
            )
            cloud.fail("GET", "/pods", "401")
            refused = desk.process("list", **env)
        assert done.returncode == 5 and "env dumped" in done.stdout, done.stdout + done.stderr
        assert refused.returncode == 9
        # the token did arrive where it was needed, and only there
        assert (cloud.folder / "token-seen").read_text() == HF_TOKEN
        (cloud.folder / "token-seen").unlink()
        told = [done.stdout, done.stderr, refused.stdout, refused.stderr, *watch.seen]
        told += [json.dumps(request) for request in cloud.requests]
        told += [path.read_text(errors="replace") for path in _files(tmp_path)]
        for secret in (USER_KEY, HF_TOKEN):
            assert not any(secret in text for text in told), secret
        body = cloud.requests[next(i for i, r in enumerate(cloud.requests) if r[0] == "POST")][2]
        assert body["env"].get("HF_TOKEN") == ("{{ RUNPOD_SECRET_hf }}" if how == "runpod secret" else None)
        desk.given_back()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


@needs_sshd
def test_what_a_kept_pod_leaves_on_disk_is_private(tmp_path: Path) -> None:
    with FakeRunpod(tmp_path / "cloud") as cloud:
        desk = Desk(cloud, tmp_path)
        with Watch() as watch:
            assert desk.process("create", "--yes", "--recipe", str(cloud.recipe())).returncode == 0
            time.sleep(0.2)
        folder = desk.leases()[0]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((desk.state / "runpod").stat().st_mode) == 0o700
        for path in (folder / "lease.json", folder / "id_ed25519", desk.state / "runpod" / "client-id"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        watcher = json.loads((folder / "lease.json").read_text())["owner"]["pid"]
        environ = Path(f"/proc/{watcher}/environ").read_bytes().decode()
        told = [environ, *watch.seen, *(path.read_text(errors="replace") for path in _files(desk.state))]
        assert not any(USER_KEY in text for text in told)
        desk.pod_py("destroy", "--all-mine")
        desk.given_back()


def test_an_unexpected_error_shows_no_secret(tmp_path: Path, capsys) -> None:
    from h3dist.cloud.explain import explain

    assert explain(RuntimeError(f"Authorization: Bearer {USER_KEY}"), Redactor([USER_KEY])) == 1
    told = capsys.readouterr()
    assert USER_KEY not in told.err and "Bearer ***" in told.err and "Traceback" not in told.err


def test_the_key_comes_from_the_environment_or_a_private_file(tmp_path: Path) -> None:
    assert read_key({"RUNPOD_API_KEY": f" {USER_KEY}\n"}).get_secret_value() == USER_KEY
    path = tmp_path / "key"
    path.write_text(USER_KEY + "\n")
    path.chmod(0o644)
    with pytest.raises(KeyRefused, match="chmod 600"):
        read_key({}, path)
    path.chmod(0o600)
    assert read_key({"RUNPOD_API_KEY": "other"}, path).get_secret_value() == USER_KEY
    assert USER_KEY not in repr(read_key({}, path))
    for bad in ("", "  ", "two words", "línea", "line\nbreak"):
        with pytest.raises(KeyRefused) as failure:
            read_key({"RUNPOD_API_KEY": bad})
        assert bad.strip() == "" or bad not in str(failure.value)
    with pytest.raises(KeyRefused, match="FileNotFoundError"):
        read_key({}, tmp_path / "none")


def test_children_get_no_secret_and_redaction_prefers_the_longer() -> None:
    environment = clean_environment({"RUNPOD_API_KEY": "a", "HF_TOKEN": "b", "PATH": "/bin"})
    assert environment == {"PATH": "/bin"}
    assert Redactor(["secret", "secret-longer"])("x secret-longer secret") == "x *** ***"
    assert Redactor(["", "abc"])("abc") == "abc"
