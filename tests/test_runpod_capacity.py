"""Finding a machine: capacity that comes and goes, and answers that do not say whether there is a pod."""

import time
from pathlib import Path

import pytest
from fake_runpod import FakeRunpod
from runpod_desk import Desk, needs_sshd

from h3dist.cloud.failures import (
    CloudError,
    KeyRefused,
    NoCapacity,
    Refused,
)

pytestmark = [needs_sshd, pytest.mark.waits]


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
    import fake_runpod_http

    monkeypatch.setattr(fake_runpod_http, "V2_GPU_FIELDS", {"id", "count"})
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


def test_a_pod_that_costs_more_than_was_shown_is_given_back(cloud: FakeRunpod, desk: Desk, monkeypatch) -> None:
    import fake_runpod_http

    offer = fake_runpod_http._offer
    monkeypatch.setattr(fake_runpod_http, "_offer", lambda gpu, price: offer(gpu, price / 2))
    with pytest.raises(CloudError, match=r"costs \$2.00 an hour, not \$1.00 as was shown"):
        desk.rent(gpus=("B200",))
    desk.given_back()
