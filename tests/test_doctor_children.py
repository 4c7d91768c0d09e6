"""Children that hang, crash, speak half a line or leave children of their own never hold the doctor up."""

import os
import sys
import time
from pathlib import Path
from threading import Event, Timer

import pytest

from h3dist.doctor import children
from h3dist.doctor.children import Child, Ended, run_children

ACTING = str(Path(__file__).parent / "acting_doctor.py")


def acting(*words):
    return Child((sys.executable, ACTING, *words))


def run(*parts, limit=30.0, stop=None):
    begun = time.monotonic()
    ended = run_children([acting(*part.split()) for part in parts], limit, stop or Event())
    return ended, time.monotonic() - begun


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_that_hangs_is_killed_with_its_own_children():
    (ended,), seconds = run("hang", limit=1.5)
    assert ended.code is None and not ended.fine and not ended.stuck
    assert ended.why(1.5) == "no answer within 1.5 s"
    assert seconds < 1.5 + children.DYING_SECONDS
    pids = ended.value("pids")
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2 and not any(map(alive, pids))


def test_a_child_that_crashes_says_by_what():
    (ended,), _ = run("crash")
    assert ended.why(9) == "ended by SIGSEGV: the last word"


def test_half_a_line_is_not_read():
    (ended,), _ = run("cut")
    assert ended.fine and ended.said == ({"whole": 1},) and ended.value("who") is None


def test_a_command_that_is_not_there_raises_and_leaves_nobody():
    with pytest.raises(FileNotFoundError):
        run_children([acting("hang"), Child(("/no/such/command",))], 30, Event())
    mine = [pid for pid in os.listdir("/proc") if pid.isdecimal() and _parent(pid) == os.getpid() and alive(pid)]
    assert not [pid for pid in mine if b"acting_doctor" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_the_others_do_not_wait_for_one_that_failed(monkeypatch):
    monkeypatch.setattr(children, "GRACE_SECONDS", 0.3)
    (crashed, hung), seconds = run("crash", "hang", limit=60)
    assert crashed.code == -11 and hung.code is None and seconds < 20


def test_stop_ends_all_at_once():
    stop = Event()
    Timer(0.5, stop.set).start()
    (ended,), seconds = run("hang", limit=60, stop=stop)
    assert ended.code is None and seconds < 20


def test_a_child_that_cannot_be_killed_is_left_and_said():
    assert Ended(None, (), "", stuck=True).why(5) == "it hangs inside the driver and cannot even be killed"


def test_a_child_ends_without_its_parent():
    """Its own alarm, should the parent have been killed."""
    code = "import sys, time; from h3dist.doctor import child; child.EXTRA_SECONDS = 0; time.sleep(0); "
    code += "child.TASKS['sleep'] = 'tests.acting_doctor'; import tests.acting_doctor as a; "
    code += "a.sleep = lambda: iter([time.sleep(60) or {}]); child.main('1', 'sleep')"
    ended = run_children([Child((sys.executable, "-c", code))], 30, Event())[0]
    assert ended.why(30).startswith("ended by SIGALRM")


def test_a_child_leaves_past_a_teardown_that_hangs():
    code = "import atexit, time; atexit.register(time.sleep, 60)\n"
    code += "from h3dist.doctor.child import main; main('30', 'torch')"
    (ended,) = run_children([Child((sys.executable, "-c", code))], 30, Event())
    assert ended.fine and ended.said
