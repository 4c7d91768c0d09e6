"""The parts of a rental on their own: money, signals, leases, recipes, files, and what is typed."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
from fake_runpod import USER_KEY, FakeRunpod
from runpod_desk import PACE, POD, POD_MODULE, Desk

from h3dist.cloud.failures import CloudError, LimitReached, RunFailed, Stopped
from h3dist.cloud.gpus import gpu_type
from h3dist.cloud.lease import Lease, Owner, Store
from h3dist.cloud.money import Limits, Watchdog
from h3dist.cloud.pace import Pace, Stop
from h3dist.cloud.recipe import load_recipe
from h3dist.cloud.run import attentions_of, matrix_needs_checkpoints, matrix_words, with_inputs
from h3dist.cloud.signals import Gate
from h3dist.errors import ConfigError, OutputError


def test_cloud_needs_no_torch() -> None:
    code = "import sys, h3dist.cloud.typed, h3dist.cloud.run, h3dist.cloud.offers, h3dist.cloud.watch; "
    code += "from h3dist.cloud.offers import Shape, fits; fits(Shape(), (1, 2), {}, 'SECURE'); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gpu_names() -> None:
    assert gpu_type("5090").id == "NVIDIA GeForce RTX 5090"
    assert gpu_type("NVIDIA H200").id == "NVIDIA H200"
    assert gpu_type("NVIDIA B300 SXM6 AC").id == "NVIDIA B300 SXM6 AC"
    with pytest.raises(ConfigError, match="could be any of"):
        gpu_type("RTX PRO 6000")
    with pytest.raises(ConfigError, match="no such GPU type"):
        gpu_type("RTX 9999")


def test_limits() -> None:
    limits = Limits(20.0, 7200.0)
    assert limits.lifetime(None) == (7200.0, "the deadline of 120 min")
    assert limits.lifetime(40.0) == (1800.0, "the budget of $20.00")
    assert limits.lifetime(40.0, spent=19.0)[0] == pytest.approx(90.0)
    assert limits.lifetime(40.0, spent=25.0)[0] == 0.0
    assert limits.lifetime(1.0, elapsed=7000.0)[0] == 200.0
    assert limits.most(1.0) == 2.0 and limits.most(100.0) == 20.0
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="more than 0"):
            Limits(bad, 60.0)


def test_the_watchdog_acts_once_or_not_at_all() -> None:
    acted: list[str] = []
    dog = Watchdog(time.time() + 0.05, "why", acted.append)
    dog.start()
    dog.join(5)
    idle = Watchdog(time.time() + 0.3, "why", acted.append)
    idle.start()
    idle.cancel()
    idle.join(5)
    assert acted == ["why"]


def test_stop_ends_a_wait_at_once() -> None:
    stop = Stop()
    threading.Timer(0.05, stop.set, args=("budget",)).start()
    began = time.monotonic()
    with pytest.raises(LimitReached, match="budget"):
        stop.sleep(30)
    assert time.monotonic() - began < 5
    stop.set("another")
    assert stop.cause == "budget"


def test_a_signal_waits_while_held_and_then_raises() -> None:
    said: list[str] = []
    gate = Gate(said.append)
    before = signal.getsignal(signal.SIGINT)
    reached: list[bool] = []

    def hold() -> None:
        with gate.held("the reason"):
            signal.raise_signal(signal.SIGINT)
            reached.append(True)

    with gate.caught():
        with pytest.raises(Stopped) as stopped:
            hold()
        assert reached == [True] and stopped.value.exit_code == 130 and said == ["SIGINT noted: the reason"]
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_leases(tmp_path: Path) -> None:
    store = Store(tmp_path)
    name = store.new_name()
    assert name.startswith(f"h3dist-{store.client_id()}-") and name != store.new_name()
    lease = Lease(name=name, api="https://x/v2", price=3.6, created=time.time() - 1000)
    store.save(lease)
    assert store.load(name) == lease and not lease.left_behind() and lease.spent() == pytest.approx(1.0, rel=0.01)
    child = subprocess.Popen(["sleep", "60"])
    other = Owner.of(child.pid)
    assert other.alive()
    child.kill()
    child.wait()
    assert not other.alive()
    assert not Owner(host=other.host, pid=os.getpid(), started="1").alive()  # the number was used again
    assert Owner(host="elsewhere", pid=1).alive()
    lease.owner = other
    assert lease.left_behind()
    lease.kept = True
    assert not lease.left_behind()
    lease.ends = time.time() - 1
    assert lease.left_behind()
    store.close(lease, "test")
    assert list(store.leases()) == [] and store.ledger()[0]["cause"] == "test"


def test_a_lease_that_a_crash_cut_short_is_still_known_by_its_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = store.folder("h3dist-1-2-3")
    folder.mkdir()
    (folder / "lease.json").write_text('{"name": "h3d')
    found = next(store.leases())
    assert found.name == "h3dist-1-2-3" and found.left_behind()
    for bad in ("../x", "h3dist-../../x", "other"):
        with pytest.raises(ConfigError):
            store.folder(bad)


def test_a_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="H3_STATE_DIR"):
        Store(tmp_path / "file")


def test_recipes(tmp_path: Path) -> None:
    assert load_recipe(None, image="a/b:1").image == "a/b:1"
    path = tmp_path / "r.json"
    for text, why in (
        ('{"imge": "x"}', "did you mean 'image'"),
        ('{"image": 3}', "image"),
        ("[]", "JSON object"),
        ("{", "cannot read"),
        ('{"package": "h3dist"}', "pinned"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            load_recipe(path)
    pip = load_recipe(None, package="h3dist==1.2.3").install_command(["flash"])
    assert pip == "python3 -m venv venv && venv/bin/pip install --no-input -q 'h3dist[flash]==1.2.3'"
    assert load_recipe(None, package="image").install_command([]) == ""
    assert "-c src/constraints.txt ./src" in load_recipe(None).install_command([])


def test_local_files_in_a_command_are_sent(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.json").write_text("{}")
    words, inputs = with_inputs(["h3dist", "generate", "--request", "./r.json", "-o", "x.mp4"], [])
    assert words == ["h3dist", "generate", "--request", "../inputs/r.json", "-o", "x.mp4"]
    assert inputs == {"r.json": Path("r.json")}
    assert with_inputs(["h3dist", "generate", "--request=r.json"], [])[0][-1] == "--request=../inputs/r.json"
    assert with_inputs(["h3dist", "generate", "-o stands here, as a prompt"], [])[1] == {}
    for words in (["x", "--request", "none.json"], ["x", "-o", "/tmp/a.mp4"], ["x", "-o", "../a.mp4"]):
        with pytest.raises(ConfigError):
            with_inputs(words, [])


def test_what_a_command_needs_on_the_pod() -> None:
    assert attentions_of(matrix_words(["matrix=scaling"])) == ("sdpa",)
    assert attentions_of(matrix_words(["attentions=[sdpa, flash4]"])) == ("sdpa", "flash4")
    assert attentions_of(["h3dist", "generate", "--attention", "sage"]) == ("sage",)
    assert attentions_of(["h3dist", "generate", "attention=flash"]) == ("flash",)
    assert not matrix_needs_checkpoints(["matrix=scaling"])
    assert matrix_needs_checkpoints(["matrix=clip"]) and matrix_needs_checkpoints(["denoise_only=false"])


def test_a_stream_from_the_pod_cannot_leave_its_folder(tmp_path: Path) -> None:
    from h3dist.cloud import transfer

    with pytest.raises(CloudError, match="leaves its folder"):
        transfer._safe("../../etc/passwd")

    class Evil:
        """A shell whose tar answers a harmless question with a path outside and a link."""

        def pump(self, what, command, take, idle=None, stdin=None) -> None:
            data = io.BytesIO()
            with tarfile.open(fileobj=data, mode="w") as tar:
                for name in ("../outside", "/tmp/outside-absolute"):
                    info = tarfile.TarInfo(name)
                    info.size = 4
                    tar.addfile(info, io.BytesIO(b"evil"))
                link = tarfile.TarInfo("link")
                link.type, link.linkname = tarfile.SYMTYPE, "/etc"
                tar.addfile(link)
            take(data.getvalue())

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(tarfile.FilterError):
        transfer._unpack(Evil(), "x", ["a"], scratch)  # type: ignore[arg-type]
    assert not (tmp_path / "outside").exists() and not (scratch / "link").exists()


def test_plan_and_offers_need_no_key(tmp_path: Path) -> None:
    with FakeRunpod(tmp_path / "cloud") as cloud:
        desk = Desk(cloud, tmp_path)
        del desk.env["RUNPOD_API_KEY"]
        plan = desk.pod_py("plan", "--gpu", "5090", "--gpu", "B200", "--gpus", "8", "--fewer", "--budget", "20")
        assert plan.returncode == 0, plan.stderr
        lines = [line for line in plan.stdout.splitlines() if " x NVIDIA" in line]
        assert len(lines) == 10 and "8 x NVIDIA GeForce RTX 5090, SECURE: about $" in lines[0]
        assert "at most $20.00" in plan.stdout
        offers = desk.pod_py("offers", "--gpus", "1", "--gpus", "8", "--json")
        assert offers.returncode == 0, offers.stderr
        rows = json.loads(offers.stdout)
        pro = next(row for row in rows if "RTX PRO 6000 Blackwell Server" in row["gpu"] and row["count"] == 1)
        assert pro["fits"] and 12e9 < pro["peak"] < 96e9 and not pro["live"]
        assert cloud.requests == []
        refused = desk.pod_py("list")
        assert refused.returncode == 9 and "RUNPOD_API_KEY" in refused.stderr
        live = desk.pod_py("offers", "--gpus", "2", RUNPOD_API_KEY=USER_KEY)
        assert "4.00  HIGH" in live.stdout
        live_plan = desk.pod_py("plan", "--gpus", "2", RUNPOD_API_KEY=USER_KEY)
        assert "$4.00 an hour, at most $8.00" in live_plan.stdout
        assert cloud.posts() == 0


def test_what_is_typed_wrong_is_answered_in_words(tmp_path: Path) -> None:
    with FakeRunpod(tmp_path / "cloud") as cloud:
        desk = Desk(cloud, tmp_path)
        for words, why in (
            (["plan", "--budget", "0"], "--budget must be more than 0"),
            (["plan", "--gpus", "0"], "at least 1"),
            (["plan", "--cloud", "ALL"], "use SECURE or COMMUNITY"),
            (["plan", "--gpu", "RTX PRO 6000"], "could be any of"),
            (["generate", "--yes"], "what to run after --"),
            (["destroy"], "--all-mine"),
            (["exec", "--", "true"], "0 pods are leased here"),
            (["logs", "h3dist-none"], "no lease h3dist-none"),
            (["plan", "--interruptible"], "REST v2 has no interruptible pods"),
        ):
            done = desk.pod_py(*words)
            assert done.returncode == 2, (words, done.stdout, done.stderr)
            assert why in done.stderr and "Traceback" not in done.stderr
        assert desk.pod_py("--no-such").returncode == 2


def test_results_are_refused_where_they_cannot_be_written_before_money_is_spent(tmp_path: Path) -> None:
    with FakeRunpod(tmp_path / "cloud") as cloud:
        desk = Desk(cloud, tmp_path)
        (tmp_path / "file").write_text("")
        done = desk.pod_py("generate", "--yes", "--out", "file/sub", "--", "true")
        assert done.returncode == 5 and "cannot write to file/sub" in done.stderr and cloud.posts() == 0


def test_pace_is_what_the_docstring_says() -> None:

    assert Pace().scaled(PACE).poll == pytest.approx(0.1) and Pace().scaled(PACE).request == 60
    assert RunFailed("x", 300).exit_code == 1


def test_every_command_and_option_in_the_readme_exists() -> None:
    import typer

    root = typer.main.get_command(POD_MODULE.app)
    text = (POD.parent / "README.md").read_text()
    of_all = {option for param in root.params for option in param.opts}
    known = {option for command in root.commands.values() for param in command.params for option in param.opts} | of_all
    lines = [line.split(" -- ")[0].split("#")[0] for line in re.findall(r"runpod/pod\.py ([^\n`]+)", text)]
    assert len(lines) > 10
    for line in lines:
        words = [word for word in shlex.split(line.replace("...", "")) if word not in ("|",)]
        name = next((word for word in words if word in root.commands), None)
        options = [word for word in words if word.startswith("--")]
        if name is None:
            assert set(options) <= of_all, line
            continue
        mine = {option for param in root.commands[name].params for option in param.opts} | of_all
        assert set(options) <= mine, line
    elsewhere = {"--target", "--build-arg", "--gpus", "--ipc", "--no-deps", "--attention"}
    assert set(re.findall(r"(?<=[\s`(])--[a-z-]+", text)) <= known | elsewhere
