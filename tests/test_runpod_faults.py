"""What goes wrong with a pod between its start and its results: it is gone in the end, and the cause is said."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_runpod import FakeRunpod
from runpod_desk import LONG, QUICK, Desk, await_, needs_sshd, python

from h3dist.cloud.failures import (
    CloudError,
    ConnectionLost,
    PodFailed,
    PodLost,
)
from h3dist.errors import CheckpointError, OutputError

pytestmark = [needs_sshd, pytest.mark.waits]


def test_a_pod_that_never_gets_ready(cloud: FakeRunpod, desk: Desk) -> None:
    cloud.no_address = True
    with pytest.raises(PodFailed, match=r"never got ready.*RUNNING, address None.*no public address"):
        desk.do(QUICK, pace=desk.office().pace.__class__(ready=1.0, poll=0.1, missing=0.5, grace=5))
    desk.given_back()


def test_a_pod_whose_ssh_never_answers(cloud: FakeRunpod, desk: Desk) -> None:
    start = ["bash", "-c", "sleep 60"]
    with pytest.raises(PodFailed, match=r"refused|closed"):
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


def test_a_pod_destroyed_from_another_terminal_is_not_replaced(tmp_path: Path) -> None:
    with FakeRunpod(tmp_path / "cloud", "v1") as cloud:
        desk = Desk(cloud, tmp_path)

        def destroy() -> None:
            await_(lambda: "tick 2" in desk.said)
            assert desk.pod_py("destroy", "--all-mine").returncode == 0

        other = threading.Thread(target=destroy)
        other.start()
        with pytest.raises(PodLost):
            desk.do(LONG, ask={"interruptible": True}, pods=3)
        other.join()
        assert len(cloud.pods) == 1
        desk.given_back()


def test_a_pod_cannot_steer_the_terminal(cloud: FakeRunpod, desk: Desk) -> None:
    desk.do(python(r"import sys; sys.stdout.write('a\x1b]0;title\x07b\rc\r\nünï\tx\n' + 'z' * 70000)"))
    shown = [line for line in desk.said if line[:1] in "acüz" and "asking" not in line]
    assert shown[0] == "a]0;titleb" and shown[1:3] == ["c", "ünï\tx"] and sum(map(len, shown[3:])) == 70000


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
