"""The REST client: both dialects, numbers that come as text, retries, pages, and what is refused."""

import json
import socket
import time
from pathlib import Path

import pytest
from fake_runpod import USER_KEY, FakeRunpod
from pydantic import SecretStr
from runpod_desk import PACE, Desk

from h3dist.cloud.capacity import Wish
from h3dist.cloud.client import Client, is_capacity
from h3dist.cloud.dialects import V1, V2, dialect_of
from h3dist.cloud.failures import CloudError, Refused
from h3dist.cloud.keys import Redactor
from h3dist.cloud.models import Pod, PodSpec
from h3dist.cloud.money import Limits
from h3dist.cloud.pace import Pace, Stop
from h3dist.cloud.quote import Ask
from h3dist.cloud.recipe import load_recipe
from h3dist.errors import ConfigError

SPEC = PodSpec("h3dist-x", "image", "NVIDIA H200", 2, start=("bash", "-c", 'echo "$0 a b"', "it's"))


def client(url: str, **pace: float) -> Client:
    return Client(url, SecretStr(USER_KEY), Redactor(), Pace(**({"retry": 0.01, "retry_cap": 0.05} | pace)), Stop())


@pytest.fixture(params=["v1", "v2"])
def cloud(request, tmp_path):
    with FakeRunpod(tmp_path / "cloud", request.param) as cloud:
        cloud.never_ready = True  # no container is needed here
        yield cloud


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


def test_no_server_there_at_all(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v2"
    with pytest.raises(CloudError, match=r"ConnectError.*gave up"):
        client(url).pods()
    assert PACE < 1
