"""Progress: what is told of each step, and that a log which nobody can write to ends no run."""

import errno
import sys

from h3dist.progress import Steps, announce


class FullDisk:
    """A standard error that takes nothing, as on a full disk."""

    tries = 0

    def write(self, text):
        self.tries += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def isatty(self):
        return False


def advance(total):
    with Steps(total, shown=True) as steps:
        for _ in range(total):
            steps.advance()
    return steps


def test_a_line_a_step(capsys):
    assert len(advance(2).seconds) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["h3dist: step 1/2", "h3dist: step 2/2"]
    assert lines[-1].endswith("0 s left")


def test_the_first_step_may_have_begun_before():
    with Steps(2, shown=False, spent=40.0) as steps:
        steps.advance()
        steps.advance()
    assert steps.seconds[0] > 40 and steps.seconds[1] < 40


def test_a_log_on_a_full_disk_ends_no_run(monkeypatch):
    full = FullDisk()
    monkeypatch.setattr(sys, "stderr", full)
    assert len(advance(3).seconds) == 3
    assert full.tries == 3


def test_a_stage_is_said_in_one_line_and_a_full_disk_ends_no_run(capsys, monkeypatch):
    for stage in ("start", "plan", "encode", "denoise", "decode"):
        announce(stage)
    told = capsys.readouterr()
    assert told.out == "" and [line.split(":")[1].strip() for line in told.err.splitlines()] == [
        "start",
        "encode",
        "denoise",
        "decode",
    ]
    full = FullDisk()
    monkeypatch.setattr(sys, "stderr", full)
    announce("encode")
    assert full.tries == 1
