"""The parts of the RunPod client on their own: numbers, dialects, retries, leases, money, signals, paths."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
from pydantic import SecretStr

from fake_runpod import USER_KEY, FakeRunpod
from h3dist.cloud.capacity import Wish
from h3dist.cloud.client import Client, is_capacity
from h3dist.cloud.dialects import V1, V2, dialect_of
from h3dist.cloud.failures import CloudError, LimitReached, Refused, Stopped
from h3dist.cloud.gpus import gpu_type
from h3dist.cloud.keys import Redactor
from h3dist.cloud.lease import Lease, Owner, Store
from h3dist.cloud.models import Pod, PodSpec
from h3dist.cloud.money import Limits, Watchdog
from h3dist.cloud.pace import Pace, Stop
from h3dist.cloud.quote import Ask
from h3dist.cloud.recipe import load_recipe
from h3dist.cloud.run import attention_of, with_inputs
from h3dist.cloud.signals import Gate
from h3dist.errors import ConfigError, OutputError
from runpod_desk import PACE, Desk

SPEC = PodSpec("h3dist-x", "image", "NVIDIA H200", 2, start=("bash", "-c", 'echo "$0 a b"', "it's"))


def client(url: str, **pace: float) -> Client:
    return Client(
        url, SecretStr(USER_KEY), Redactor(), Pace(**({"retry": 0.01, "retry_cap": 0.05} | pace)), Stop()
    )


@pytest.fixture(params=["v1", "v2"])
def cloud(request, tmp_path):
    with FakeRunpod(tmp_path / "cloud", request.param) as cloud:
        cloud.never_ready = True  # no container is needed here
        yield cloud


def test_cloud_needs_no_torch() -> None:
    code = "import sys, h3dist.cloud.typed, h3dist.cloud.run, h3dist.cloud.offers, h3dist.cloud.watch; "
    code += "from h3dist.cloud.offers import Shape, fits; fits(Shape(), (1, 2), {}, 'SECURE'); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("value", "price"),
    [
        ("0.74", 0.74),
        (0.74, 0.74),
        ("", None),
        (None, None),
        ("NaN", None),
        ("inf", None),
        (True, None),
        ("-1", None),
    ],
)
def test_numbers_may_come_as_text(value: object, price: float | None) -> None:
    assert Pod(id="x", price=value).price == price
    assert V1().pod(
        {"id": "x", "costPerHr": value, "portMappings": {"22": "10341"}, "publicIp": "1.2.3.4"}
    ).address == (
        "1.2.3.4",
        10341,
    )


@pytest.mark.parametrize("when", ["2026-11-29T12:00:00Z", "2026-11-29 12:00:00.0 +0000 UTC"])
def test_times_of_both_forms(when: str) -> None:
    created = Pod(id="x", created=when).created
    assert created and created.timestamp() == 1795953600
    assert Pod(id="x", created="yesterday").created is None


def test_a_starting_pod_has_no_address() -> None:
    for data in (
        {"id": "x", "publicIp": None, "portMappings": None},
        {"id": "x", "publicIp": "", "portMappings": {}},
    ):
        assert V1().pod(data).address is None
    for runtime in (None, {}, {"ports": None}, {"ports": [{"private": 22, "public": None, "ip": None}]}):
        assert V2().pod({"id": "x", "runtime": runtime}).address is None
    direct = {"id": "x", "ssh": {"proxy": None, "direct": {"host": "5.6.7.8", "port": 22001}}}
    assert V2().pod(direct).address == ("5.6.7.8", 22001)


def test_the_start_command_survives_both_dialects() -> None:
    import shlex

    assert V1().create_body(SPEC)["dockerStartCmd"] == list(SPEC.start)
    assert shlex.split(V2().create_body(SPEC)["args"]) == list(SPEC.start)


def test_the_version_is_in_the_address_and_plain_http_is_refused() -> None:
    assert isinstance(dialect_of("https://rest.runpod.io/v1/"), V1)
    assert isinstance(dialect_of("https://api.runpod.io/v2"), V2)
    with pytest.raises(ConfigError, match="must end in /v1 or /v2"):
        dialect_of("https://api.runpod.io/v3")
    for url in (
        "http://api.runpod.io/v2",
        "http://10.0.0.1/v2",
        "http://localhost.evil.example/v2",
        "ftp://127.0.0.1/v2",
    ):
        with pytest.raises(ConfigError, match="not https"):
            client(url)


def test_reads_are_tried_again_and_posts_are_not(cloud: FakeRunpod) -> None:
    here = client(cloud.url)
    pod = here.create(SPEC)
    for kind in ("429", "500", "drop", "truncated"):
        cloud.fail("GET", "/pods", kind, 2)
        assert here.pod(pod.id).id == pod.id, kind
        cloud.fail("GET", "/pods", kind, 2)
        assert [p.id for p in here.find(SPEC.name)] == [pod.id]
    cloud.fail("GET", "/pods", "500", 99)
    with pytest.raises(CloudError, match=r"HTTP 500.*gave up after 6 tries"):
        here.pod(pod.id)
    assert cloud.posts() == 1


def test_an_answer_that_trickles_is_cut_off(cloud: FakeRunpod) -> None:
    here = client(cloud.url, request=0.4)
    cloud.fail("GET", "/pods", "trickle")
    began = time.monotonic()
    assert here.pods() == []
    assert time.monotonic() - began < 4


def test_every_page_is_read_and_other_peoples_pods_are_left_alone(cloud: FakeRunpod) -> None:
    here = client(cloud.url)
    for i in range(5):
        here.create(PodSpec(f"h3dist-{i}", "image", "NVIDIA H200", 1))
    assert len(here.pods()) == 5
    assert [pod.name for pod in here.find("h3dist-4")] == ["h3dist-4"]


def test_deleting_twice_and_deleting_nothing_is_fine(cloud: FakeRunpod) -> None:
    here = client(cloud.url)
    pod = here.create(SPEC)
    here.delete(pod.id)
    here.delete(pod.id)
    here.delete("nosuchpod")
    assert here.find(SPEC.name) == []


def test_a_volume_pins_the_data_centre(cloud: FakeRunpod) -> None:
    from h3dist.cloud.quote import make_quote

    def quote(**more: object):
        ask = Ask(("H200 NVL",), 1, clouds=("COMMUNITY",), volume="vol1", **more)
        return make_quote(
            ask, load_recipe(None), Limits(1, 60), api=cloud.url, name="h3dist-x", client=client(cloud.url)
        )

    spec = next(quote().wish.specs(quote().base))
    assert (spec.data_centers, spec.cloud) == (("EU-RO-1",), "SECURE")
    body = dialect_of(cloud.url).create_body(spec)
    assert "vol1" in json.dumps(body) and body["dataCenterIds"] == ["EU-RO-1"]
    with pytest.raises(ConfigError, match="is in EU-RO-1"):
        quote(data_centers=("US-TX-3",))
    cloud.volume.clear()
    with pytest.raises(ConfigError, match="no network volume vol1"):
        quote()


def test_unknown_fields_are_refused_as_the_api_does(cloud: FakeRunpod) -> None:
    here = client(cloud.url)
    here.dialect.create_body = lambda spec: type(here.dialect)().create_body(spec) | {"bogus": 1}  # type: ignore[method-assign]
    with pytest.raises(Refused, match="bogus"):
        here.create(SPEC)


def test_v1_that_is_gone_names_v2(cloud: FakeRunpod) -> None:
    if cloud.version == "v1":
        cloud.version = "v9"  # the routes are there no more
        with pytest.raises(Refused, match=r"try --api https://api.runpod.io/v2"):
            client(cloud.url).pods()


def test_the_order_of_the_search() -> None:
    wish = Wish(("A", "B"), (8, 4), ("SECURE", "COMMUNITY"), ("X", "Y"))
    order = [(s.gpu_count, s.gpu, s.cloud, s.data_centers) for s in wish.specs(SPEC)]
    assert len(order) == 16 and order[:3] == [
        (8, "A", "SECURE", ("X",)),
        (8, "A", "SECURE", ("Y",)),
        (8, "A", "COMMUNITY", ("X",)),
    ]
    assert Ask(("H200 NVL",), 8, fewer=True).wish().counts == (8, 6, 4, 2, 1)
    assert Ask(("H200 NVL",), 5).wish().counts == (5,)
    assert is_capacity("There are no longer any instances available with enough disk space")
    assert not is_capacity("image is required")


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
    with gate.caught():
        reached = False
        with pytest.raises(Stopped) as stopped, gate.held("the reason"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            reached = True
        assert reached and stopped.value.exit_code == 130 and said == ["SIGINT noted: the reason"]
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is before


def test_leases(tmp_path: Path) -> None:
    store = Store(tmp_path)
    name = store.new_name()
    assert name.startswith(f"h3dist-{store.client_id()}-") and name != store.new_name()
    lease = Lease(name=name, api="https://x/v2", price=3.6, created=time.time() - 1000)
    store.save(lease)
    assert (
        store.load(name) == lease
        and not lease.left_behind()
        and lease.spent() == pytest.approx(1.0, rel=0.01)
    )
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


def test_all_mine_leaves_other_pods_alone(cloud: FakeRunpod, tmp_path: Path) -> None:
    desk = Desk(cloud, tmp_path)
    office = desk.office()
    here, mine = office.client(), office.store.new_name()
    for name in (mine, "h3dist-00000000-0101-000000-aaaaaa", "somebody else's pod"):
        here.create(PodSpec(name, "image", "NVIDIA H200", 1))
    done = desk.pod_py("destroy", "--all-mine")
    assert done.returncode == 0, done.stderr
    assert sorted(pod.name for pod in cloud.running) == [
        "h3dist-00000000-0101-000000-aaaaaa",
        "somebody else's pod",
    ]
    assert "another machine's" in desk.pod_py("list").stdout
    by_id = next(pod.id for pod in cloud.running if pod.name.startswith("h3dist"))
    assert desk.pod_py("destroy", by_id).returncode == 0
    assert desk.pod_py("destroy", "nosuchpod").returncode == 9
    assert [pod.name for pod in cloud.running] == ["somebody else's pod"]


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
    assert attention_of(["matrix=scaling", "attention=flash4"]) == "flash4"
    assert attention_of(["h3dist", "generate", "--attention", "sage"]) == "sage"
    assert attention_of(["h3dist"]) == "sdpa"


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
        plan = desk.pod_py(
            "plan", "--gpu", "5090", "--gpu", "B200", "--gpus", "8", "--fewer", "--budget", "20"
        )
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


def test_no_server_there_at_all(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v2"
    with pytest.raises(CloudError, match="ConnectError.*gave up"):
        client(url).pods()
    assert PACE < 1
