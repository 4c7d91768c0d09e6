"""Stands in the place of the doctor's children: `python acting_doctor.py PART [ARGUMENT]... [what the doctor adds]`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def say(**said):
    print(json.dumps(said), flush=True)


def hang(*_):
    """Ignores every signal that can be ignored, and has a child of its own that does too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    say(pids=[os.getpid(), grandchild.pid])
    time.sleep(600)


def crash(*_):
    print("the last word", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def cut(*_):
    say(whole=1)
    print('{"who', end="", flush=True)


def recording(name, *_):
    say(recording=json.loads((Path(__file__).parent / "fixtures" / "topology" / f"{name}.json").read_text()))


def torch(devices, *_):
    said = {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.29.3", "cudnn": 91900, "archs": ["sm_90", "sm_120"]}
    say(**said, available=devices != "0", devices=int(devices))


def nothing(*_):
    say(av="18.1.0")


def copy(how, *_):
    """What the real check says of two GPUs, up to a copy that hangs."""
    for place in (0, 1):
        say(begin=[place])
        say(device=place, right=True)
    for pair in ([0, 1], [1, 0]):
        say(begin=pair)
        if how == "hang" and pair == [1, 0]:
            time.sleep(600)
        say(pair=pair, wrong=0, zero=False, size=100, gb_s=50.0)


def exchange(how, *more):
    """One rank: `how` it goes with P2P; without it, well. "taken" FILE N: the first N ports are another's."""
    with_p2p = os.environ.get("NCCL_P2P_DISABLE") != "1"
    rank = int(os.environ["RANK"])
    Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))).write_text(
        f"x [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {'P2P/CUMEM/read' if with_p2p else 'SHM/direct/direct'}\n"
    )
    if how == "taken" and rank == 0:
        file = Path(more[0])
        tried = file.read_text().split() if file.exists() else []
        file.write_text(" ".join([*tried, os.environ["MASTER_PORT"]]))
        if len(tried) < int(more[1]):
            print("RankError: The server socket has failed to listen on any local network address", file=sys.stderr)
            sys.exit(1)
    if how == "hang" and with_p2p:
        time.sleep(600)
    if how == "broken" or (how == "die" and with_p2p and rank == 1):
        print("RankError: rank 1: NCCL error 3", file=sys.stderr)
        sys.exit(1)
    if how == "die" and with_p2p:
        time.sleep(600)
    say(wrong=5 if how == "wrong" and with_p2p and rank == 1 else 0, seconds=0.002, bytes=100)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
