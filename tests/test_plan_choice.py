"""Which layout, GPUs and order are chosen on recorded machines and on odd ones, and what is said of it."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, permutations, takewhile
from pathlib import Path
from random import Random

import pytest

from h3dist import planner
from h3dist.cli.commands import main
from h3dist.config import compose
from h3dist.errors import ConfigError, PlanError
from h3dist.intake import read_request
from h3dist.plan import Layout, fits
from h3dist.plan.choose import MARGIN, NEAR, Weigher, choose
from h3dist.plan.exchange import PLAIN, ExchangePlan, open_exchanges
from h3dist.plan.explain import reasons
from h3dist.plan.machine import Machine
from h3dist.plan.order import arrange
from h3dist.plan.plan import relayout
from h3dist.plan.rates import GIB, load_rates
from h3dist.planner import Ahead, decide_ahead, decide_run
from h3dist.preflight import facts_ahead, plan_on, read_aloud
from h3dist.topology import Device, Link, load_topology

RECORDED = Path(__file__).parent / "fixtures" / "topology"
REFERENCE = {"prompt": "a quiet shot", "width": 864, "height": 480, "frames": 141, "seed": 440420}
LONG = REFERENCE | {"width": 1344, "height": 768, "frames": 243}
TINY = REFERENCE | {"width": 96, "height": 64, "frames": 5}

# fixture -> sp, tp, and words of the reasons
WANTED = {
    **{f"h200-x{n}": (n, 1, ["predicted on H200", "NV18" if n > 1 else "one rank"]) for n in (1, 2, 4, 6, 8)},
    **{
        f"rtxpro6000-{kind}-x{n}": (n, 1, ["predicted on RTX PRO 6000 Server", kind.upper() if n > 1 else "one rank"])
        for kind in ("node", "sys")
        for n in (1, 2, 4, 6, 8)
    },
    "b200-x2": (2, 1, ["predicted on B200", "joined are ranks by NV18"]),
    "b200-x8": (8, 1, ["predicted on B200", "joined are ranks by NV18"]),
    "gb10-x1": (1, 1, ["one rank does everything", "predicted on GB10"]),
    "rtx3090-pairs-x4": (4, 1, ["predicted on RTX 3090", "ranks by NV4 and PHB without P2P", "sp 2 x tp 2 lost"]),
    "no-gpu": (1, 1, ["there is no GPU", "predicted on CPU"]),
    "h200-mig": (1, 1, ["one rank does everything", "predicted on H200"]),
}


@pytest.fixture
def run(monkeypatch, capsys):
    """Type words after `h3dist`: gives the exit code, stdout and stderr."""

    def type_words(*words):
        monkeypatch.setattr(sys, "argv", ["h3dist", *words])
        with pytest.raises(SystemExit) as left:
            main()
        told = capsys.readouterr()
        return left.value.code, told.out, told.err

    return type_words


def config_of(*words: str):
    return compose([*words])


def decide(fixture: str | None, request=REFERENCE, words=(), **ahead):
    links = str(RECORDED / f"{fixture}.json") if fixture else None
    return decide_ahead(config_of(*words), request, Ahead(links=links, **ahead))


@cache
def base_plan(dtype: str = "bfloat16", shape: tuple[int, int, int] = (864, 480, 141)):
    config = config_of(f"runtime.dtype={dtype}")
    request = REFERENCE | dict(zip(("width", "height", "frames"), shape, strict=True))
    resolved = read_request(config, request)
    facts = facts_ahead(config, read_aloud(config, resolved))
    return plan_on(config, resolved, facts, Layout(), device="cuda", capability=(9, 0))


def machine_of(count: int, kind, *, gib: float = 139, name: str = "NVIDIA H200") -> Machine:
    """`count` GPUs whose pairs are of `kind(a, b)`."""
    size = int(gib * GIB)
    gpus = tuple(Device(i, name, size, size, (9, 0), f"GPU-{i:02}") for i in range(count))
    links = []
    for a, b in combinations(range(count), 2):
        word = kind(a, b)
        links.append(Link(a, b, word, True, True, int(word[2:]) if word.startswith("NV") else 0, 4, 16, 0, 0))
    return Machine(gpus, tuple(links))


def chosen(machine: Machine, counts, fixed=None, **base):
    return choose(Weigher(base_plan(**base), machine, load_rates()), counts, fixed)


@pytest.mark.parametrize("fixture", [path.stem for path in sorted(RECORDED.glob("*.json"))])
@pytest.mark.parametrize("request_", [REFERENCE, LONG], ids=["864x480x141", "1344x768x243"])
def test_recorded_machines_get_the_right_layout_with_reasons(fixture, request_):
    sp, tp, words = WANTED[fixture]
    decision = decide(fixture, request_)
    layout = decision.plan.layout
    assert (layout.sp, layout.tp) == (sp, tp)
    assert decision.choice.taken.seats == tuple(range(sp * tp)) and decision.visible is None
    why = "\n".join(reasons(decision.choice))
    assert all(word in why for word in words), why
    decodes = "all ranks decode after" if decision.plan.decode.parallel else "decodes after"
    assert f"encodes the text before all denoise, and {decodes}" in why and "GiB of the denoiser" in why
    if sp > 1:
        assert "times one rank" in why and ("lost" in why or "is predicted faster" in why)


def test_links_decide_between_equal_gpus():
    """The same eight GPUs: predicted to scale over NVLink, to lose half to the exchange over PCIe."""
    near, far = decide("h200-x8").choice, decide("rtxpro6000-sys-x8", gpu="H200").choice
    assert near.speedup > 6.5 > 4 > far.speedup > 2
    assert far.taken.cost.exchange > 10 * near.taken.cost.exchange


def test_the_smallest_tp_that_fits_is_taken_and_the_next_smaller_told():
    machine = machine_of(4, lambda a, b: "NV18", gib=9)
    choice = chosen(machine, [4])
    assert choice.taken.layout == Layout(sp=2, tp=2)
    assert "the smallest tp that fits; the next smaller lacks" in reasons(choice)[0]
    assert any(line.startswith("sp 4 x tp 1 lost: it lacks") for line in reasons(choice))
    assert not fits(choice.rivals[0].plan, [int(9 * GIB)] * 4) and fits(choice.taken.plan, [int(9 * GIB)] * 4)


def test_tp_ranks_take_the_closest_links_and_ranks_are_told_by_uuid():
    """NVLink joins 0 with 2 and 1 with 3: tp groups are those pairs, whatever the order of the GPUs."""
    machine = machine_of(4, lambda a, b: "NV4" if b - a == 2 else "PHB", gib=9)
    choice = chosen(machine, [4])
    assert choice.taken.layout == Layout(sp=2, tp=2) and choice.taken.seats == (0, 2, 1, 3)
    why = "\n".join(reasons(choice))
    assert "the ranks of a tp group by NV4, the groups by PHB" in why and "ranks take GPUs 0, 2 | 1, 3" in why
    decision = planner.Decision(choice.taken.plan, choice, ())
    assert decision.visible == "GPU-00,GPU-02,GPU-01,GPU-03"


def test_fewer_ranks_than_gpus_take_those_that_are_close():
    machine = machine_of(6, lambda a, b: "NV4" if {a, b} == {3, 5} else "SYS")
    choice = chosen(machine, [2])
    assert choice.taken.seats == (3, 5)
    assert planner.Decision(choice.taken.plan, choice, ()).visible == "GPU-03,GPU-05"


@pytest.mark.parametrize(("count", "sp", "tp"), [(4, 2, 2), (6, 3, 2), (6, 2, 3), (6, 2, 2), (5, 1, 3), (6, 1, 6)])
def test_no_order_has_closer_tp_groups(count, sp, tp):
    """Against every permutation of the GPUs, on links of random speed."""
    draw = Random(count * 100 + sp * 10 + tp)
    layout = Layout(sp=sp, tp=tp)
    for _ in range(3):
        costs = {pair: draw.random() for pair in combinations(range(count), 2)}

        def worst(places, costs=costs):
            groups = [sorted(places[i : i + tp]) for i in range(0, sp * tp, tp)]
            return max(costs[pair] for group in groups for pair in combinations(group, 2))

        found = arrange(layout, count, costs)
        assert len(set(found)) == sp * tp
        assert worst(found) == min(worst(places) for places in permutations(range(count), sp * tp))


def test_equal_links_keep_the_order_and_many_gpus_are_not_searched():
    equal = dict.fromkeys(combinations(range(64), 2), 1.0)
    assert arrange(Layout(sp=4, tp=2), 8, equal) == tuple(range(8))
    assert arrange(Layout(sp=16, tp=2), 64, equal) == tuple(range(32))
    assert arrange(Layout(sp=4), 2, equal) == (0, 1, 0, 1)


def test_a_free_number_takes_no_gpu_that_gains_nothing():
    """A tiny clip is bound by the host on every number; a long one gains from all."""
    few = decide("h200-x8", TINY).choice
    assert few.taken.layout.world < 8
    best = min(option.seconds for option in (few.taken, *few.counts))
    assert few.taken.seconds <= best * (1 + MARGIN)
    assert all(o.seconds > best * (1 + MARGIN) for o in few.counts if o.layout.world < few.taken.layout.world)
    assert any("the best of more" in line and "won" in line for line in reasons(few))
    assert decide("h200-x8", LONG).choice.taken.layout.world == 8


def test_a_given_number_is_used_and_fewer_said_to_do():
    choice = decide("h200-x8", TINY, gpus=8).choice
    assert choice.taken.layout.world == 8
    assert any(line.startswith("fewer GPUs would do: --gpus ") for line in reasons(choice))
    assert not any("fewer GPUs" in line for line in reasons(decide("h200-x8", LONG, gpus=8).choice))


def test_a_given_layout_is_kept_and_the_others_weighed():
    choice = decide("h200-x8", words=["parallel=hybrid", "parallel.sp=2", "parallel.tp=4"]).choice
    assert choice.taken.layout == Layout(sp=2, tp=4) and choice.given
    assert reasons(choice)[0] == "sp 2 x tp 4 was asked for"
    assert [option.layout.tp for option in choice.rivals] == [1, 2, 8]
    assert any("is predicted faster" in line for line in reasons(choice))


def test_a_gpu_without_rates_is_planned_but_not_timed():
    choice = chosen(machine_of(4, lambda a, b: "SYS", name="Some GPU"), range(1, 5))
    assert choice.taken.cost is None and choice.taken.layout == Layout(sp=4)
    assert any("the table of rates has no Some GPU" in line for line in reasons(choice))
    json.dumps([option.as_dict() for option in choice.rivals])


def test_an_attention_without_a_rate_is_named():
    base = replace(base_plan(), attention="flash9")
    choice = choose(Weigher(base, machine_of(2, lambda a, b: "NV18"), load_rates()), [2], None)
    assert any("no attention.flash9 for H200" in line for line in reasons(choice))


# How heads move

AUTO = ["exchange.variant=auto", "exchange.groups=auto"]


@pytest.mark.parametrize("fixture", ["rtxpro6000-sys-x2", "rtxpro6000-node-x8", "h200-x6"])
def test_an_exchange_left_open_is_the_plainest_of_the_fastest(fixture):
    choice = decide(fixture, LONG, AUTO, gpus=int(fixture[-1])).choice
    taken, ways = choice.taken, choice.taken.ways
    fastest = min(way.cost.seconds for way in ways)
    plainer = list(takewhile(lambda way: way.exchange != taken.plan.exchange, ways))
    assert taken.seconds <= fastest * (1 + NEAR) and all(way.cost.seconds > fastest * (1 + NEAR) for way in plainer)
    assert taken.plan.exchange.groups > 1 and ways[0].exchange == PLAIN and taken.seconds < ways[0].cost.seconds
    assert {way.exchange.codec for way in ways} == {"none"}
    why = "\n".join(reasons(choice))
    assert f"exchange {taken.plan.exchange}: attention hides " in why and "exchange heads in 1 group lost: " in why


def test_collectives_are_taken_where_they_are_predicted_to_be_faster(monkeypatch):
    """A table in which copies are slow; and without one, ranks try copies, as ever."""
    table = load_rates()
    rows = [
        row | {"value": 0.1} if (row["of"], row["what"]) == ("NV copy", "efficiency") else row for row in table.rows
    ]
    open_ways = open_exchanges("heads", "1", "none", transport="auto")
    machine = machine_of(2, lambda a, b: "NV18")
    slow = choose(Weigher(base_plan(), machine, replace(table, rows=rows), open_ways), [2], None).taken
    assert slow.plan.exchange == PLAIN
    for other in (replace(machine, links=()), machine_of(2, lambda a, b: "SYS")):
        tried = choose(Weigher(base_plan(), other, table, open_ways), [2], None).taken
        assert tried.plan.exchange == ExchangePlan(transport="auto")


def test_the_exchange_is_plain_unless_left_open_and_what_is_faster_is_told():
    choice = decide("rtxpro6000-sys-x2", LONG).choice
    assert choice.taken.plan.exchange == PLAIN
    (told,) = [line for line in reasons(choice) if "is predicted faster (exchange.variant=heads" in line]
    assert "exchange.groups=" in told and "shorter" in told
    fixed = decide("rtxpro6000-sys-x2", LONG, ["exchange.variant=hidden", "exchange.groups=auto"]).choice.taken
    assert fixed.plan.exchange.variant == "hidden" and fixed.plan.exchange.groups > 1


def test_a_codec_is_priced_where_it_is_asked_for():
    plain, coded = (decide("rtxpro6000-sys-x2", LONG, [*AUTO, *more]).choice for more in ([], ["exchange.codec=int8"]))
    assert coded.taken.plan.exchange.codec == "int8" and coded.taken.seconds < plain.taken.seconds
    assert {way.exchange.codec for way in coded.taken.ways} == {"int8"}
    assert any("as int8 codes (approximate)" in line for line in reasons(coded))


def test_where_nothing_is_known_the_exchange_is_plain():
    """Neither rates nor links, ranks that share a GPU, and ranks on the processor, where copies take the cores."""
    nvlink = machine_of(2, lambda a, b: "NV18")
    unknown = [
        machine_of(2, lambda a, b: "SYS", name="Some GPU"),
        replace(nvlink, links=()),
        Machine(),
        Machine(host_free=64 * GIB),
    ]
    for machine, count in [*((machine, 2) for machine in unknown), (nvlink, 4)]:
        base = base_plan("float32" if machine.host_free else "bfloat16")
        weigher = Weigher(base, machine, load_rates(), open_exchanges("auto", "auto", "none"))
        assert choose(weigher, [count], None).taken.plan.exchange == PLAIN


def test_an_exchange_that_fits_comes_before_one_that_is_faster_and_before_a_larger_tp():
    """Hidden rows need the QKV weights of a rank's own heads alone: 8 ranks fit where they would not otherwise."""
    base, layout = base_plan(), Layout(sp=8)
    need, less = (
        max(relayout(replace(base, exchange=ExchangePlan(variant)), layout).peaks) for variant in ("heads", "hidden")
    )
    machine = machine_of(8, lambda a, b: "NV18", gib=(need + less) / 2 / GIB)
    weigh = partial(Weigher, base, machine, load_rates())
    given, free = (choose(weigh(ways), [8], None).taken for ways in ((), open_exchanges("auto", "auto", "none")))
    assert less < need and given.layout.tp > 1
    assert free.layout == layout and free.fits and free.plan.exchange.variant == "hidden"


def test_every_rank_takes_the_exchange_that_was_chosen():
    """It is in the plan's hash; ranks that were told of it compute the same plan, others another."""
    decision = decide("rtxpro6000-sys-x2", words=AUTO)
    config = config_of(*AUTO)
    resolved = read_request(config, REFERENCE)
    facts, layout = facts_ahead(config, read_aloud(config, resolved)), decision.plan.layout
    on = {"device": "cuda", "capability": (12, 0)}
    told = plan_on(config, resolved, facts, layout, **on, exchange=decision.plan.exchange)
    assert decision.plan.exchange != PLAIN and told.digest == decision.plan.digest
    assert plan_on(config, resolved, facts, layout, **on).digest != decision.plan.digest


def test_ranks_that_share_a_gpu_are_not_timed():
    machine = machine_of(2, lambda a, b: "NV18")
    choice = chosen(machine, [4])
    assert choice.taken.seats == (0, 1, 0, 1) and choice.taken.cost is None
    assert machine.free(choice.taken.seats) == (int(139 * GIB) // 2,) * 4
    assert any("ranks share GPUs" in line for line in reasons(choice))


def test_without_links_nothing_is_timed():
    machine = replace(machine_of(2, lambda a, b: "NV18"), links=())
    choice = chosen(machine, [2])
    assert choice.taken.cost is None and choice.one.cost is not None and choice.speedup is None
    assert any("the links between the GPUs are not known" in line for line in reasons(choice))


def test_the_slowest_gpu_sets_the_pace():
    mixed = machine_of(2, lambda a, b: "SYS")
    mixed = replace(mixed, gpus=(mixed.gpus[0], replace(mixed.gpus[1], name="NVIDIA GeForce RTX 3090")))
    assert mixed.rates(load_rates()).name == "RTX 3090"


def test_a_mig_slice_has_its_share_of_the_rates():
    whole, part = decide("h200-x1").choice.taken.cost, decide("h200-mig").choice.taken.cost
    assert 1.5 * whole.attention < part.attention < 3 * whole.attention


def test_ranks_on_the_processor_share_it():
    machine = Machine(host_free=64 * GIB)
    one, four = (chosen(machine, [count], dtype="float32").taken for count in (1, 4))
    assert machine.device == "cpu" and machine.free(four.seats) == (16 * GIB,) * 4
    assert four.seconds > one.seconds


def test_every_rank_makes_the_same_plan():
    """What the launcher decides with the machine before it is, by hash, what a rank computes without."""
    decision = decide("rtxpro6000-sys-x8")
    config = config_of()
    resolved = read_request(config, REFERENCE)
    facts = facts_ahead(config, read_aloud(config, resolved))
    layout = decision.plan.layout
    ranks = {
        plan_on(config, resolved, facts, layout, device="cuda", capability=(12, 0)).digest for _ in range(layout.world)
    }
    assert ranks == {decision.plan.digest} == {decide("rtxpro6000-node-x8").plan.digest}


@pytest.mark.parametrize(
    ("ahead", "error", "words"),
    [
        ({"gpu": "RTX PRO 600"}, ConfigError, "known are H200"),
        ({"gpu": "H200", "gpu_memory": 5 * GIB}, PlanError, "5.0 GiB are free"),
        ({"gpu": "H200", "gpus": 57}, PlanError, "at most 56"),
    ],
)
def test_machines_that_cannot_be(ahead, error, words):
    with pytest.raises(error, match=words):
        decide_ahead(config_of(), REFERENCE, Ahead(**ahead))


def test_more_gpus_than_a_file_describes():
    with pytest.raises(PlanError, match=r"--gpus 8: .*b200-x2.json describes 2; use --gpus 2"):
        decide("b200-x2", gpus=8)


def test_an_imagined_machine_is_of_its_class():
    decision = decide(None, gpu="B200", gpus=4)
    assert decision.choice.machine.capability == (10, 0) and decision.plan.fp4 == decision.plan.amax == 200
    assert {link.kind for link in decision.choice.machine.links} == {"NV18"}
    six = decide(None, gpu="RTX PRO 6000", gpus=6).choice.machine
    assert {link.kind for link in six.links} == {"NODE", "SYS"}
    assert decide(None, gpu="H200", gpu_memory=100 * GIB).choice.machine.gpus[0].memory_free == 100 * GIB


def test_a_run_starts_on_this_machines_gpus(monkeypatch, tmp_path):
    """decide_run looks at files, GPUs and memory; the prompt's tokens are counted."""
    from h3dist.checkpoint.tiny import write_tiny

    write_tiny(tmp_path)
    words = (tmp_path / "overrides.txt").read_text().replace("@", str(tmp_path)).split()
    machine = machine_of(4, lambda a, b: "NV4" if b - a == 2 else "PHB", gib=2)
    monkeypatch.setattr(planner, "this_machine", lambda config: machine)
    decision = decide_run(config_of(*words, "parallel=hybrid"), TINY, 4)
    assert decision.plan.layout == Layout(sp=2, tp=2) and decision.visible == "GPU-00,GPU-02,GPU-01,GPU-03"
    few = decide_run(config_of(*words), TINY)
    assert few.plan.layout.world == 1 and any("GPU of 4" in note for note in few.notes)


def test_the_command_plans_a_machine_one_does_not_have_in_little_time():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import sys\nfrom h3dist.cli.commands import app\ntry:\n    app()\nfinally:\n    print('torch' in sys.modules)"
    )
    words = ["plan", "--gpus", "6", "--gpu", "RTX PRO 6000", "--links", str(RECORDED / "rtxpro6000-sys-x8.json")]
    done = subprocess.run([sys.executable, "-c", code, *words, "a fox"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    *plan, torch = done.stdout.splitlines()
    assert torch == "False" and "why" in plan and any("predicted on RTX PRO 6000 Server" in line for line in plan)


def test_a_backend_in_slices_is_priced_and_told_as_the_whole_one():
    whole, slices = (decide("h200-x2", words=[f"attention={name}"]).choice for name in ("sdpa", "sdpa+sliced"))
    assert slices.taken.cost == whole.taken.cost and reasons(slices) == reasons(whole)
    assert any(line.startswith("attention sdpa_cudnn: ") for line in reasons(slices))


def test_plans_as_json_and_as_a_table(run):
    links = str(RECORDED / "h200-x8.json")
    code, out, _ = run("plan", "--links", links, "--json", "a fox")
    found = json.loads(out)
    assert code == 0 and found["choice"]["taken"]["ranks"] == 8 and found["choice"]["device_class"] == "H200"
    assert found["choice"]["taken"]["seconds"] > 0 and len(found["choice"]["rivals"]) == 3
    assert len(found["choice"]["placement"]["resident_bytes"]) == 8
    taken = found["choice"]["taken"]
    plain = {"variant": "heads", "groups": 1, "codec": "none", "rows": "plain", "chunks": 1, "transport": "collective"}
    assert taken["exchange"] == found["exchange"] == plain
    assert taken["exchanges"][0]["seconds"] == taken["seconds"] and len(taken["exchanges"]) > 10
    code, out, _ = run("plan", "--links", links, "--table", "a fox")
    lines = out.splitlines()
    assert code == 0 and [line.split("|")[1].strip() for line in lines[4:]] == ["1", "2", "4", "6", "8"]
    code, out, _ = run("plan", "--gpu", "RTX 3090", "--table", "--json", "a fox")
    assert [row["ranks"] for row in json.loads(out)["rows"]] == [1, 2, 4, 6, 8]


def test_a_file_that_is_no_topology(run, tmp_path):
    (tmp_path / "links.json").write_text('{"devices": [')
    code, _, err = run("plan", "--links", str(tmp_path / "links.json"), "a fox")
    assert code == 2 and "links.json" in err
    assert load_topology(RECORDED / "h200-x2.json").devices
