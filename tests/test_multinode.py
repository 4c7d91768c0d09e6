"""Two machines, as two torchrun agents that meet on loopback: each starts one rank, its own local rank 0."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from h3dist.checkpoint.tiny import write_tiny
from h3dist.media import probe

CLIP = ["request.width=64", "request.height=64", "request.frames=5", "request.steps=2", "request.seed=3"]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def agent(node: int, port: int, overrides: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """One machine's torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=1", "-m", "h3dist.generate"]
    log = (folder / f"node{node}.log").open("wb")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *overrides], cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )


@pytest.mark.limit(180)
def test_two_agents_make_one_clip_and_only_rank_0_needs_the_prompt(tmp_path):
    tiny = write_tiny(tmp_path / "tiny", form="curve", seed=1)
    shared = (tmp_path / "tiny" / "overrides.txt").read_text().replace("@", str(tmp_path / "tiny")).split()
    assert tiny
    (tmp_path / "p.txt").write_text("a boat, ${at} dawn\n")
    port = free_port()
    first = ["request.prompt_file=p.txt", "output.path=out.mp4", *CLIP]
    nodes = [
        agent(node, port, [*shared, "parallel=ulysses", *(first if node == 0 else [])], tmp_path) for node in (0, 1)
    ]
    codes = [node.wait(150) for node in nodes]
    logs = [(tmp_path / f"node{node}.log").read_text() for node in (0, 1)]
    assert codes == [0, 0], "\n".join(logs)
    film = probe(tmp_path / "out.mp4")
    assert (film.frames, film.width, film.height) == (5, 64, 64)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["request"]["prompt"] == "a boat, ${at} dawn"
    assert report["plan"]["layout"] == {"dp": 1, "sp": 2, "tp": 1}
    assert all(rank["sent"]["planned"] == rank["sent"]["counted"] for rank in report["ranks"])
