"""What an exchange in groups hides behind attention, on a link made slow: the benchmark's own measurement, in small."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from world import World

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SECONDS = 0.28  # of attention to all of a rank's heads, by a timer: a core more or less does not matter


@pytest.fixture(scope="module")
def found():
    with World(2) as world:
        return world.run(hide, ranks=2, limit=90)


def hide(seat):
    """Rows for 1 and 7 groups where exchange and attention take equally long."""
    sys.path.insert(0, str(BENCHMARKS))
    import overlap

    from h3dist.geometry import Geometry

    plan = overlap.plan_of(2, shape=Geometry(64, 64, 5))
    comm = seat.connect(plan.layout)
    return overlap.measure(comm, plan, [1, 7], ["1:1"], timed=True, repeats=3, seconds=SECONDS)


def test_groups_hide_what_one_group_does_not(found):
    """In 7 groups all but a seventh can be hidden, 86 %; where moves do not run beside attention nothing is."""
    one, seven = found[0]
    assert one["hidden"] < 0.25 and one["both"] > 1.7 * SECONDS
    assert seven["hidden"] > 0.5 and seven["both"] < 1.6 * SECONDS


def test_the_link_is_busy_until_earlier_bytes_are_through(found):
    """Each rank's link takes its moves one after the other, at its bandwidth, and all of them in its time."""
    for rows in found:
        for row in rows:
            moves = [(begun, ended) for lane, _, begun, ended in row["events"] if lane == "link"]
            assert len(moves) == 2 * row["groups"]
            assert all(begun >= ended for (_, ended), (begun, _) in pairwise(moves))
            assert sum(ended - begun for begun, ended in moves) == pytest.approx(SECONDS, rel=0.01)
            assert row["exchange"] >= 0.99 * SECONDS


def test_the_trace_shows_moves_beside_attention(found):
    sys.path.insert(0, str(BENCHMARKS))
    import overlap

    rows = [{key: value for key, value in row.items() if key != "events"} for row in found[0]]
    trace = overlap.trace_of({"rows": rows, "events": [[row["events"] for row in rank] for rank in found]})
    events = json.loads(json.dumps(trace))["traceEvents"]
    assert {(event["pid"], event["tid"]) for event in events} == {
        (r, lane) for r in (0, 1) for lane in ("link", "attention")
    }
    beside = {
        case: sum(_shared(a, b) for a in events for b in events if _pair(a, b, case))
        for case in ("1:1, 1 groups", "1:1, 7 groups")
    }
    assert beside["1:1, 1 groups"] < 0.05e6 * SECONDS and beside["1:1, 7 groups"] > 0.5e6 * SECONDS


def _pair(a, b, case):
    return (
        a["args"]["case"] == b["args"]["case"] == case
        and a["pid"] == b["pid"] == 0
        and (a["tid"], b["tid"]) == ("link", "attention")
    )


def _shared(a, b):
    """Microseconds that two events have in common."""
    return max(0.0, min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"]))
