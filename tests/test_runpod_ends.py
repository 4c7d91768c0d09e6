"""How a rental ends: budget and deadline, signals and kills on this side, and the pod that ends itself."""

import json
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from fake_runpod import FakeRunpod
from runpod_desk import LONG, Desk, await_, needs_sshd, python

from h3dist.cloud.failures import (
    CloudError,
    ConnectionLost,
    LimitReached,
)
from h3dist.cloud.money import Limits

pytestmark = [needs_sshd, pytest.mark.waits]


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
    with pytest.raises(LimitReached, match=r"the deadline of 0.03 min is used up"):
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
    with pytest.raises(CloudError, match=r"the API still lists it.*\nIT MAY STILL COST MONEY.*\n.*came after: done"):
        desk.rent()
    assert len(desk.leases()) == 1


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


def _kept(cloud: FakeRunpod, desk: Desk, *more: str) -> str:
    done = desk.pod_py("create", "--yes", "--recipe", str(cloud.recipe()), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return desk.leases()[0].name


def test_a_host_key_that_changes_is_refused(cloud: FakeRunpod, desk: Desk) -> None:
    """Between first contact and the next connection the server has another key."""

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
    expires = cloud.state / "expires"
    await_(lambda: expires.exists() and expires.read_text(), 10)
    left = int(expires.read_text()) - time.time()
    assert 5 < left < 30  # 1.8 s of deadline and 12 s of grace
    expires.write_text(str(int(time.time())))


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
    assert failed.returncode == 3 and "sad" in failed.stdout
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
