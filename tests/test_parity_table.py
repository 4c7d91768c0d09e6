"""The table of `benchmarks/parity.py`, of runs that a stand-in for the interpreter makes."""

import sys

import torch
from safetensors.torch import save_file

from benchmarks import parity

FAKE = """#!/bin/sh
for word; do case $word in output.intermediates=*) made=${word#*=};; esac; done
cp "$(dirname "$0")/expected.safetensors" "$made"
echo '{"ranks": []}' > "${made%.safetensors}.json"
echo /the/clip.mp4
"""


def test_nothing_but_the_table_goes_to_stdout(tmp_path, monkeypatch, capfd):
    save_file({"audio": torch.ones(3)}, tmp_path / "expected.safetensors")
    (tmp_path / "overrides.txt").write_text("runtime.device=cpu\n")
    (tmp_path / "python").write_text(FAKE)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["parity.py", str(tmp_path), "--layouts", "single,hybrid:2x2", "decode=parallel"])
    assert parity.main() == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["layout", "---", "single", "hybrid:2x2"]
