"""Everything that can go wrong with a rented pod: each time the pod is gone in the end, and the cause is said."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fake_runpod import FakeRunpod
from h3dist.cloud.failures import (
    CloudError,
    ConnectionLost,
    KeyRefused,
    LimitReached,
    NoCapacity,
    PodFailed,
    PodLost,
    Refused,
    RunFailed,
)
from h3dist.cloud.money import Limits
from h3dist.errors import CheckpointError, ConfigError, OutputError
from runpod_desk import PACE, Desk, await_, needs_sshd, python

pytestmark = needs_sshd
QUICK = ["true"]
LONG = python("import time\nfor i in range(1200): print('tick', i, flush=True); time.sleep(0.05)")


@pytest.fixture
def cloud(tmp_path):
    with FakeRunpod(tmp_path / "cloud") as cloud:
        yield cloud


@pytest.fixture
def desk(cloud, tmp_path):
    return Desk(cloud, tmp_path)


# ---- finding a machine ----


def test_no_capacity_anywhere_says_all_that_was_tried(cloud: FakeRunpod, desk: Desk) -> None:
    cloud.stock = lambda *_: False
    gpus = ("RTX PRO 6000 Blackwell Server", "B200")
    with pytest.raises(NoCapacity) as failure:
        desk.rent(gpus=gpus, count=4, fewer=True, clouds=("SECURE", "COMMUNITY"))
    text = str(failure.value)
    for count in (4, 2, 1):
        for gpu in ("RTX PRO 6000 Blackwell Server Edition", "B200"):
            for where in ("SECURE", "COMMUNITY"):
                assert f"{count} x NVIDIA {gpu}, {where}: HTTP 400: " in text
    assert cloud.posts() == 12 and "no longer any instances" in text
    desk.given_back()


def test_capacity_comes_back_for_fewer_gpus_of_the_second_type(cloud: FakeRunpod, desk: Desk) -> None:
    calls: list[tuple[str, int]] = []

    def stock(gpu: str, count: int, where: str, place: str) -> bool:
        calls.append((gpu, count))
        return len(calls) > 6 and gpu == "NVIDIA B200" and count == 2

    cloud.stock = stock
    desk.rent(gpus=("H200 NVL", "B200"), count=4, fewer=True, patience=60.0)
    pod = next(iter(cloud.pods.values()))
    assert (pod.gpu, pod.count) == ("NVIDIA B200", 2) and len(calls) == 10
    desk.given_back()


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("kind", ["500-after", "drop-after", "truncated"])
def test_an_unclear_answer_that_made_a_pod_is_found_by_name(tmp_path: Path, version: str, kind: str) -> None:
    with FakeRunpod(tmp_path / "cloud", version) as cloud:
        desk = Desk(cloud, tmp_path)
        cloud.list_lag = 0.3
        cloud.fail("POST", "/pods", kind)
        desk.rent()
        assert cloud.posts() == 1 and len(cloud.pods) == 1
        desk.given_back()


def test_an_unclear_answer_without_a_pod_leads_to_the_next_choice(cloud: FakeRunpod, desk: Desk) -> None:
    cloud.fail("POST", "/pods", "500")
    desk.rent(gpus=("H200 NVL", "B200"))
    assert [pod.gpu for pod in cloud.pods.values()] == ["NVIDIA B200"] and cloud.posts() == 2
    desk.given_back()


def test_a_pod_that_appears_too_late_is_ended_all_the_same(cloud: FakeRunpod, desk: Desk) -> None:
    """Two unclear answers, both of which made a pod; the first shows only after the second was asked for."""
    cloud.list_lag = 1.4
    cloud.fail("POST", "/pods", "500-after")
    desk.rent(gpus=("H200 NVL", "B200"), during=lambda _: time.sleep(1.5))
    assert len(cloud.pods) == 2
    desk.given_back()


def test_429_is_waited_out(cloud: FakeRunpod, desk: Desk) -> None:
    cloud.fail("POST", "/pods", "429", 2)
    cloud.fail("GET", "/pods", "429")
    desk.rent()
    assert len(cloud.pods) == 1 and cloud.posts() == 3
    desk.given_back()


def test_a_request_that_the_api_does_not_understand_stops_at_once(cloud: FakeRunpod, desk: Desk, monkeypatch) -> None:
    import fake_runpod

    monkeypatch.setattr(fake_runpod, "V2_GPU_FIELDS", {"id", "count"})
    with pytest.raises(Refused, match="minCudaVersion"):
        desk.rent(gpus=("H200 NVL", "B200"))
    assert cloud.posts() == 1
    desk.given_back()


def test_a_wrong_key_is_said_and_never_shown(cloud: FakeRunpod, desk: Desk) -> None:
    cloud.key = "rpa_another"
    done = desk.pod_py("generate", "--yes", "--recipe", str(cloud.recipe()), "--", "true")
    assert done.returncode == 9 and "the API key was refused (HTTP 401)" in done.stderr
    assert "rpa_TESTKEY" not in done.stdout + done.stderr and cloud.posts() == 0
    with pytest.raises(KeyRefused, match="no API key"):
        Desk(cloud, desk.folder).office().__class__(print, print, None, environ={}).client()  # type: ignore[arg-type]
    desk.given_back()


def test_a_key_that_is_revoked_meanwhile_leaves_a_loud_message(cloud: FakeRunpod, desk: Desk) -> None:
    def revoke(_: object) -> None:
        cloud.key = "rpa_another"

    with pytest.raises(CloudError, match="IT MAY STILL COST MONEY") as failure:
        desk.rent(during=revoke)
    assert "refused (HTTP 401)" in str(failure.value) and "destroy h3dist-" in str(failure.value)
    assert len(desk.leases()) == 1  # the next start finds it
    cloud.key = desk.env["RUNPOD_API_KEY"]
    assert desk.pod_py("destroy", "--all-mine").returncode == 0
    desk.given_back()


# ---- getting there ----


def test_a_pod_that_never_gets_ready(cloud: FakeRunpod, desk: Desk) -> None:
    cloud.no_address = True
    with pytest.raises(PodFailed, match=r"never got ready.*RUNNING, address None.*no public address"):
        desk.do(QUICK, pace=desk.office().pace.__class__(ready=1.0, poll=0.1, missing=0.5, grace=5))
    desk.given_back()


def test_a_pod_whose_ssh_never_answers(cloud: FakeRunpod, desk: Desk) -> None:
    start = ["bash", "-c", "sleep 60"]
    with pytest.raises(PodFailed, match="refused|closed"):
        desk.do(QUICK, pace=desk.office().pace.__class__(ready=1.5, poll=0.1, grace=5), recipe={"start": start})
    desk.given_back()


def test_an_image_that_does_not_start(cloud: FakeRunpod, desk: Desk) -> None:
    with pytest.raises(PodFailed, match="EXITED"):
        desk.do(QUICK, recipe={"start": ["/no/such/start.sh"]})
    desk.given_back()


def test_a_doctor_that_gives_no_answer(cloud: FakeRunpod, desk: Desk) -> None:
    with pytest.raises(PodFailed, match="did not answer with JSON"):
        desk.do(QUICK, recipe={"doctor": ["echo", "segmentation fault"]})
    desk.given_back()


def test_a_host_key_that_changes_is_refused(cloud: FakeRunpod, desk: Desk) -> None:
    """Between first contact and the next connection the server has another key."""
    from h3dist.cloud.failures import ConnectionLost

    lease = _kept(cloud, desk)
    pod = cloud.running[0]
    assert desk.pod_py("exec", "--", "true").returncode == 0
    known = desk.state / "runpod" / lease / "known_hosts"
    host, kind, _ = known.read_text().splitlines()[0].split()
    other = desk.folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    known.write_text(f"{host} {kind} {other.with_suffix('.pub').read_text().split()[1]}\n")
    done = desk.pod_py("exec", "--", "true")
    assert done.returncode == ConnectionLost.exit_code and "not the one pinned at first contact" in done.stderr
    assert not pod.terminated
    desk.pod_py("destroy", lease)
    desk.given_back()


def _kept(cloud: FakeRunpod, desk: Desk, *more: str) -> str:
    done = desk.pod_py("create", "--yes", "--recipe", str(cloud.recipe()), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return desk.leases()[0].name


# ---- while it works ----


def test_a_lost_connection_loses_nothing(cloud: FakeRunpod, desk: Desk) -> None:
    code = "import time\nfor i in range(40): print('line', i, flush=True); time.sleep(0.05)"
    cutter = threading.Thread(target=_cut_when_running, args=(cloud, desk))
    cutter.start()
    desk.do(python(code))
    cutter.join()
    assert [line for line in desk.said if line.startswith("line ")] == [f"line {i}" for i in range(40)]
    assert any("connection lost" in line for line in desk.said)
    assert (desk.out / "run.log").read_text().count("line") == 40
    desk.given_back()


def _cut_when_running(cloud: FakeRunpod, desk: Desk) -> None:
    await_(lambda: "line 2" in desk.said or "tick 2" in desk.said)
    assert cloud.cut(cloud.running[0])


def test_a_connection_that_does_not_come_back(cloud: FakeRunpod, desk: Desk) -> None:
    def cut() -> None:
        await_(lambda: "tick 2" in desk.said)
        cloud.cut(cloud.running[0], for_good=True)

    killer = threading.Thread(target=cut)
    killer.start()
    # the container's first process is the guard; without its sshd it leaves, so the pod counts as gone
    with pytest.raises((ConnectionLost, PodLost)):
        desk.do(LONG, pace=desk.office().pace.__class__(poll=0.1, lost=1.0, missing=0.5, grace=5))
    killer.join()
    desk.given_back()


def test_an_interruptible_pod_is_replaced_and_the_matrix_resumes(tmp_path: Path) -> None:
    code = """
import json, pathlib, time
file = pathlib.Path('scaling.json')
done = json.loads(file.read_text()) if file.exists() else []
print('starting with', done, flush=True)
for cell in range(30):
    if cell in done: continue
    done.append(cell); file.with_suffix('.new').write_text(json.dumps(done)); file.with_suffix('.new').rename(file)
    print('cell', cell, flush=True); time.sleep(0.08)
"""
    with FakeRunpod(tmp_path / "cloud", "v1") as cloud:
        desk = Desk(cloud, tmp_path)

        def take_back() -> None:
            await_(lambda: "cell 3" in desk.said and (desk.out / "scaling.json").exists())
            cloud.interrupt(cloud.running[0])

        taker = threading.Thread(target=take_back)
        taker.start()
        pace = desk.office().pace.__class__(poll=0.1, sync=0.2, missing=0.5, lost=5.0, grace=5)
        desk.do(python(code), pace=pace, ask={"interruptible": True}, pods=2)
        taker.join()
        first, second = cloud.pods.values()
        assert first.body["interruptible"] is True and first.name != second.name
        assert json.loads((desk.out / "scaling.json").read_text()) == list(range(30))
        starts = [line for line in desk.said if line.startswith("starting with")]
        assert starts[0] == "starting with []" and starts[1].startswith("starting with [0, ")
        desk.given_back()


def test_disk_full_on_this_side(cloud: FakeRunpod, desk: Desk) -> None:
    with small_disk(desk.folder / "small", 2) as small, pytest.raises(OutputError, match="No space left"):
        desk.do(python("open('big.bin', 'wb').write(bytes(8 << 20))"), target=small)
    desk.given_back()


@pytest.mark.parametrize("when", ["setting up", "running"])
def test_disk_full_on_the_pod(cloud: FakeRunpod, desk: Desk, when: str) -> None:
    inputs = {}
    if when == "setting up":
        (desk.folder / "big.bin").write_bytes(os.urandom(4 << 20))
        inputs = {"big.bin": desk.folder / "big.bin"}
    command = python("print('writing', flush=True); open('big.bin', 'wb').write(bytes(8 << 20))")
    cloud.workspace.mkdir()
    with (
        small_disk(cloud.workspace, 2),
        pytest.raises((OutputError, CloudError), match="disk of the pod is full"),
    ):
        desk.do(command, inputs=inputs)
    desk.given_back()


class small_disk:
    """A real file system of `size` MiB mounted at `path`."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size

    def __enter__(self) -> Path:
        self.path.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self.size}m,mode=0777", "tmpfs", str(self.path)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs leave to mount a small file system")
        return self.path

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)


# ---- money ----


def test_the_budget_ends_it(cloud: FakeRunpod, desk: Desk) -> None:
    cloud.price = 3600.0  # a dollar a second
    began = time.time()
    with pytest.raises(LimitReached, match=r"the budget of \$4.00 is used up"):
        desk.do(LONG, limits=Limits(4.0, 3600.0))
    assert time.time() - began < 15
    desk.given_back()
    ledger = json.loads((desk.state / "runpod" / "ledger.jsonl").read_text())
    assert "budget" in ledger["cause"]


def test_the_deadline_ends_it_even_while_the_main_thread_hangs(cloud: FakeRunpod, desk: Desk) -> None:
    office = desk.office()
    said = office.say

    def hang(text: str) -> None:
        said(text)
        if text.startswith("stage: waiting"):
            await_(lambda: not cloud.running, 20)  # as a main thread that is stuck somewhere would

    office.say = hang
    with pytest.raises(LimitReached, match="the deadline of 0.03 min is used up"):
        desk.do(LONG, limits=Limits(20.0, 1.8), office=office)
    desk.given_back()


def test_the_watchdog_does_not_give_up_while_the_api_is_down(cloud: FakeRunpod, desk: Desk) -> None:
    threading.Timer(1.0, cloud.fail, args=("DELETE", "/pods", "500", 9)).start()
    with pytest.raises(LimitReached):
        desk.do(LONG, limits=Limits(20.0, 3.0))
    desk.given_back()


def test_a_pod_whose_price_nobody_tells_is_given_back(tmp_path: Path) -> None:
    with FakeRunpod(tmp_path / "cloud", "v1") as cloud:
        desk = Desk(cloud, tmp_path)
        cloud.tell_price = False
        with pytest.raises(CloudError, match="does not say what this pod costs"):
            desk.rent()
        desk.given_back()


def test_a_pod_that_the_cloud_does_not_end_is_said_out_loud(cloud: FakeRunpod, desk: Desk) -> None:
    cloud.ignore_delete = True
    with pytest.raises(CloudError, match="the API still lists it.*\nIT MAY STILL COST MONEY.*\n.*came after: done"):
        desk.rent()
    assert len(desk.leases()) == 1


# ---- this side ends ----

STAGES = ["asking for", "stage: waiting", "stage: setting up", "tick 1", "stage: fetching"]


@pytest.mark.parametrize("stage", STAGES)
def test_sigint_at_every_stage(cloud: FakeRunpod, desk: Desk, stage: str) -> None:
    doctor = {"doctor": python("import time; time.sleep(1.0); print('{}')")} if "setting up" in stage else {}
    command = LONG if stage.startswith("tick") else python("open('b', 'wb').write(bytes(30 << 20)); print('tick 1')")
    cloud.provision = 0.6 if "waiting" in stage else 0.1
    if stage == "asking for":
        cloud.fail("POST", "/pods", "slow")
    client = desk.start("generate", "--yes", "--recipe", str(cloud.recipe(**doctor)), "--out", "out", "--", *command)
    client.until(stage)
    client.process.send_signal(signal.SIGINT)
    if stage == "tick 1":
        time.sleep(0.05)
        client.process.send_signal(signal.SIGINT)  # an impatient user: the pod is given back all the same
    assert client.end() == 130, client.text
    assert "stopped by SIGINT" in client.text
    assert len(cloud.pods) == 1
    desk.given_back()


def test_sigterm_and_sighup_give_back_too(cloud: FakeRunpod, desk: Desk) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        client = desk.start("generate", "--yes", "--recipe", str(cloud.recipe()), "--", *LONG)
        client.until("stage: waiting")
        client.process.send_signal(number)
        assert client.end() == code, client.text
        desk.given_back()


def test_after_sigkill_the_next_start_offers_to_destroy(cloud: FakeRunpod, desk: Desk) -> None:
    client = desk.start("generate", "--yes", "--recipe", str(cloud.recipe()), "--", *LONG)
    client.until("tick 1")
    client.process.kill()
    client.end()
    assert len(cloud.running) == 1 and len(desk.leases()) == 1
    listed = desk.pod_py("list")
    assert "NOBODY LOOKS AFTER IT" in listed.stdout
    again = desk.pod_py("generate", "--recipe", str(cloud.recipe()), "--", "true", stdin="y\nn\n")
    assert "left behind by a client that is gone" in again.stdout and "destroyed" in again.stdout
    desk.given_back()


def test_sigkill_during_the_post_is_found_by_name(cloud: FakeRunpod, desk: Desk) -> None:
    cloud.fail("POST", "/pods", "slow")
    client = desk.start("generate", "--yes", "--recipe", str(cloud.recipe()), "--", *LONG)
    await_(lambda: len(cloud.pods) == 1)
    client.process.kill()
    client.end()
    lease = json.loads((desk.leases()[0] / "lease.json").read_text())
    assert lease["pod_id"] is None
    assert desk.pod_py("destroy", "--all-mine").returncode == 0
    desk.given_back()


# ---- the pod's own end, and pods that are meant to stay ----


@pytest.mark.parametrize("with_key", [True, False])
def test_the_pod_ends_itself_when_nobody_looks_after_it(cloud: FakeRunpod, desk: Desk, with_key: bool) -> None:
    """The client is killed for good; the guard's time is the deadline and the grace, both short here."""
    cloud.pod_keys_work = with_key
    recipe = str(cloud.recipe())
    client = desk.start("generate", "--yes", "--deadline", "0.03", "--recipe", recipe, "--", *LONG)
    client.until("stage: waiting")
    client.process.kill()
    client.end()
    pod = cloud.running[0]
    await_(lambda: pod.container is not None, 10)
    _shorten(cloud, pod)
    if with_key:
        await_(lambda: pod.terminated, 15)
        deletes = [path for method, path, _ in cloud.requests if method == "DELETE"]
        assert deletes == [f"/pods/{pod.id}"]
    else:
        await_(lambda: pod.state(0) == "EXITED", 15)
        assert "stopping the container" in (pod.home / "container.log").read_text()
    assert "time is up" in (pod.home / "container.log").read_text()


def _shorten(cloud: FakeRunpod, pod) -> None:
    await_(lambda: (cloud.state / "expires").exists(), 10)
    left = int((cloud.state / "expires").read_text()) - time.time()
    assert 5 < left < 30  # 1.8 s of deadline and 12 s of grace
    (cloud.state / "expires").write_text(str(int(time.time())))


def test_a_kept_pod_is_watched_and_every_hand_command_works(cloud: FakeRunpod, desk: Desk) -> None:
    lease = _kept(cloud, desk, "--deadline", "10")
    assert len(cloud.running) == 1
    assert json.loads((desk.leases()[0] / "lease.json").read_text())["kept"] is True
    assert "ssh -F none" in desk.pod_py("wait").stdout
    (desk.folder / "a.txt").write_text("hello")
    pushed = desk.pod_py("push", "a.txt", "--to", str(cloud.workspace / "in"))
    assert pushed.returncode == 0, pushed.stderr
    assert "hello" in desk.pod_py("exec", "--", "cat", str(cloud.workspace / "in" / "a.txt")).stdout
    failed = desk.pod_py("exec", "--pod", lease, "--", "sh", "-c", "echo sad >&2; exit 3")
    assert failed.returncode == 9 and "sad" in failed.stderr
    assert desk.pod_py("fetch", str(cloud.workspace / "in"), "back").returncode == 0
    assert (desk.folder / "back" / "a.txt").read_text() == "hello"
    rows = json.loads(desk.pod_py("list", "--json").stdout)
    assert rows[0]["name"] == lease and rows[0]["looked_after"] and rows[0]["per_hour"] == 2.0
    done = desk.pod_py("destroy", lease)
    assert done.returncode == 0 and "1 ended" in done.stdout
    desk.given_back()
    assert "nothing of h3dist is left" in desk.pod_py("list").stdout
    told = desk.pod_py("cost").stdout
    assert f"{lease}  over, about $0.0" in told and "storage not counted" in told


def test_a_kept_pod_is_ended_by_its_watcher(cloud: FakeRunpod, desk: Desk) -> None:
    _kept(cloud, desk, "--deadline", "0.12")
    assert len(cloud.running) == 1
    await_(lambda: not desk.leases(), 20)
    desk.given_back()


def test_checkpoints_come_checked_and_are_taken_again_when_wrong(cloud: FakeRunpod, desk: Desk) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + b"abcd"
    hub = cloud.folder / "hub" / "some" / "repo"
    (hub / "tok").mkdir(parents=True)
    (hub / "m.safetensors").write_bytes(whole)
    (hub / "tok" / "tokenizer.json").write_text("{}")
    items = [
        {"slot": "denoiser", "variable": "H3_MODEL_PATH", "file": "m.safetensors", "size": len(whole)},
        {"slot": "tokenizer", "variable": "H3_TOKENIZER_PATH", "file": "tok", "folder": True},
    ]
    items = [item | {"repo": "some/repo", "revision": "abc"} for item in items]
    desk.do(["sh", "-c", 'cat "$H3_MODEL_PATH" > got; ls "$H3_TOKENIZER_PATH"'], recipe={"checkpoints": items})
    assert (desk.out / "got").read_bytes() == whole and "tokenizer.json" in desk.said
    (hub / "m.safetensors").write_bytes(whole[:-1] + b"")
    items[0]["size"] = None
    with pytest.raises(CheckpointError, match="cut short or padded"):
        desk.do(QUICK, recipe={"checkpoints": items})
    desk.given_back()


def test_the_checkout_is_sent_and_installed(cloud: FakeRunpod, desk: Desk) -> None:
    """A real install of what git lists here, without its dependencies, which this environment has."""
    site = cloud.folder / "site"
    install = f"{sys.executable} -m pip install -q --no-deps --no-build-isolation --target {site} ./src"
    see = f"PYTHONPATH={site} {sys.executable} -P -c 'import h3dist; print(h3dist.__file__)'"
    desk.do(["sh", "-c", see], recipe={"package": "checkout", "install": install, "bin": ""})
    assert any(line.startswith(str(site)) for line in desk.said)
    desk.given_back()


def test_pace_is_what_the_docstring_says() -> None:
    from h3dist.cloud.pace import Pace

    assert Pace().scaled(PACE).poll == pytest.approx(0.1) and Pace().scaled(PACE).request == 60
    assert RunFailed("x", 300).exit_code == 1
