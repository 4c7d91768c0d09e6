"""Plans need no process group, no torch and no weights: splits, refusals, bytes, memory."""

import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest

from h3dist.checkpoint.comfy import DenoiserDims, open_denoiser
from h3dist.checkpoint.shard import rank_file_bytes
from h3dist.checkpoint.tiny import write_tiny
from h3dist.errors import ConfigError, PlanError
from h3dist.plan import (
    DECODE_LABELS,
    ENCODE_LABELS,
    LABELS,
    Layout,
    Plan,
    check_memory,
    ffn_split,
    fits,
    make_layout,
    make_plan,
    released_dims,
    split_heads,
    split_ragged,
    split_rows,
)
from h3dist.plan.exchange import ExchangePlan
from h3dist.plan.weights import stored_bytes
from h3dist.request import Resolved

GIB = 1 << 30
REFERENCE = Resolved("t2va", "a quiet shot", 864, 480, 141, 141, 440420, 12, True)
SMALL = Resolved("t2va", "a quiet shot", 96, 64, 124, 124, 7, 4, True)
TINY = DenoiserDims(
    hidden=160, heads=14, head_dim=32, ffn=1024, layers=3, refiner_layers=1, text_dim=96, video_channels=24,
    audio_channels=32, rope_freqs=4, form="full", curve_grid=0, curve_rank=0, time_freq=32, time_hidden=160,
    time_dim=80,
)  # fmt: skip
EVERY_LAYOUT = [Layout(sp=n // tp, tp=tp) for n in range(1, 15) for tp in range(1, n + 1) if n % tp == 0]


def plan_of(layout: Layout, *, resolved=REFERENCE, dims=None, text_rows=60, **options) -> Plan:
    options = {"dtype": "bfloat16", "attention": "sdpa", "steps": resolved.steps} | options
    return make_plan(resolved, dims or released_dims(), text_rows, layout, **options)


def sizes(spans) -> list[int]:
    return [stop - start for start, stop in spans]


def covers(spans, count: int) -> bool:
    """Neighbours without gaps or overlaps, from 0 to count."""
    edges = [0, *(stop for _, stop in spans)]
    return [start for start, _ in spans] == edges[:-1] and edges[-1] == count


@pytest.mark.parametrize("parts", range(1, 9))
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 64, 701, 17540])
def test_rows_are_even_but_for_the_tail(rows, parts):
    spans = split_rows(rows, parts)
    assert covers(spans, rows) and len(spans) == parts
    chunk = -(-rows // parts)
    full = [size == chunk for size in sizes(spans)]
    assert full == sorted(full, reverse=True), "a short part comes before a full one"
    assert sizes(spans)[sum(full) + 1 :] == [0] * len(sizes(spans)[sum(full) + 1 :]), "two parts are short"


def test_heads_and_ffn_over_six():
    assert sizes(split_ragged(56, 6)) == [10, 10, 9, 9, 9, 9]
    assert sizes(ffn_split(14336, 6)) == [units * 128 for units in (19, 19, 19, 19, 18, 18)]


@pytest.mark.parametrize(("ffn", "tp", "unit"), [
    (14336, 112, 128), (14336, 113, 64), (1024, 8, 128), (1024, 14, 64), (512, 14, 32), (256, 14, 16),
    (224, 14, 16), (1000, 8, 128),
])  # fmt: skip
def test_ffn_units_shrink_until_no_rank_is_empty(ffn, tp, unit):
    spans = ffn_split(ffn, tp)
    assert covers(spans, ffn) and min(sizes(spans)) > 0
    assert all(start % unit == 0 for start, _ in spans)
    assert unit == 128 or any(start % (2 * unit) for start, _ in spans)


def test_ffn_too_small_names_the_largest_tp():
    with pytest.raises(PlanError, match="largest tp for this model is 13"):
        ffn_split(208, 14)


@pytest.mark.parametrize("layout", EVERY_LAYOUT, ids=str)
def test_every_rank_gets_heads_and_all_are_held_once(layout):
    """Up to as many ranks as heads: each attends to some; the shares of a group are the heads, each once."""
    shares = split_heads(14, layout.sp, layout.tp)
    assert covers([held for held, _ in shares], 14)
    for (start, stop), own in shares:
        assert covers([(a - start, b - start) for a, b in own], stop - start)
        assert min(sizes(own)) >= 1
    assert max(sizes(span for _, own in shares for span in own)) <= -(-14 // layout.tp)


def test_groups_are_numbered_with_tp_innermost():
    layout = Layout(sp=3, tp=2)
    assert layout.tp_groups() == ((0, 1), (2, 3), (4, 5))
    assert layout.sp_groups() == ((0, 2, 4), (1, 3, 5))
    assert layout.request_groups() == ((0, 1, 2, 3, 4, 5),)
    twice = Layout(dp=2, sp=2, tp=1)
    assert twice.sp_groups() == ((0, 1), (2, 3)) == twice.request_groups()
    assert (twice.world, twice.ranks) == (4, 2)


@pytest.mark.parametrize(("mode", "world", "sp", "tp", "want"), [
    ("single", 1, None, None, (1, 1)), ("ulysses", 1, None, None, (1, 1)), ("tensor", 1, None, None, (1, 1)),
    ("hybrid", 1, None, None, (1, 1)), ("auto", 1, None, None, (1, 1)),
    ("ulysses", 6, None, None, (6, 1)), ("ulysses", 6, 6, 1, (6, 1)), ("tensor", 8, None, None, (1, 8)),
    ("hybrid", 4, None, None, (2, 2)), ("hybrid", 6, None, None, (3, 2)), ("hybrid", 8, None, None, (4, 2)),
    ("hybrid", 7, None, None, (7, 1)), ("hybrid", 6, 2, None, (2, 3)), ("hybrid", 6, None, 3, (2, 3)),
    ("hybrid", 6, 3, 2, (3, 2)), ("auto", 6, None, None, (6, 1)), ("auto", 6, None, 2, (3, 2)),
])  # fmt: skip
def test_modes_name_layouts(mode, world, sp, tp, want):
    assert make_layout(mode, world, sp, tp, released_dims()) == Layout(1, *want)


@pytest.mark.parametrize(("mode", "world", "sp", "tp", "dp", "words"), [
    ("ulyses", 2, None, None, None, "did you mean 'ulysses'"),
    ("single", 2, None, None, None, "--gpus 1 or parallel=ulysses"),
    ("ulysses", 57, None, None, None, "at most 56"), ("hybrid", 64, 8, 8, None, "at most 56"),
    ("ulysses", 4, 2, None, None, "use parallel=hybrid"), ("tensor", 4, None, 2, None, "use parallel=hybrid"),
    ("hybrid", 8, 3, None, None, "nearest that does is 2"), ("hybrid", 8, 2, 3, None, "--gpus 6"),
    ("hybrid", 4, 0, None, None, "the least is 1"), ("ulysses", 4, None, None, 2, "parallel.dp=1"),
])  # fmt: skip
def test_illegal_layouts_name_what_is_legal(mode, world, sp, tp, dp, words):
    with pytest.raises(PlanError, match=words):
        make_layout(mode, world, sp, tp, released_dims(), dp=dp)


def test_auto_takes_ulysses_where_it_fits_and_else_the_smallest_tp_that_does():
    def layout(gib: float) -> Layout:
        free = [int(gib * GIB)] * 4
        return make_layout("auto", 4, None, None, released_dims(), fits=lambda shape: fits(plan_of(shape), free))

    assert [layout(gib).tp for gib in (40, 10, 7)] == [1, 2, 4]


@pytest.mark.parametrize("layout", EVERY_LAYOUT, ids=str)
@pytest.mark.parametrize("text_rows", [1, 60])
def test_shares_fit_together(layout, text_rows):
    plan = plan_of(layout, resolved=SMALL, dims=TINY, text_rows=text_rows)
    assert plan.rows == text_rows + 414 + 222
    assert covers([share.rows for share in plan.shares], plan.rows)
    for group in layout.tp_groups():
        shares = [plan.shares[rank] for rank in group]
        assert {share.group_rows for share in shares} == {(shares[0].rows[0], shares[-1].rows[1])}
        assert covers([share.ffn for share in shares], TINY.ffn)
    for group in layout.sp_groups():
        shares = [plan.shares[rank] for rank in group]
        assert covers([share.group_rows for share in shares], plan.rows)
        assert len({(share.tp_heads, share.ffn) for share in shares}) == 1
        assert shares[0].tp_heads == (shares[0].heads[0], shares[-1].heads[1])


def test_more_ranks_than_rows_leaves_ranks_without_rows_and_says_so():
    short = replace(SMALL, width=32, height=32, frames=5)  # 2 video rows, 16 of sound
    plan = plan_of(Layout(sp=14), resolved=short, dims=TINY, text_rows=1)
    assert plan.rows == 19
    assert sizes(share.rows for share in plan.shares) == [2] * 9 + [1] + [0] * 4
    assert any("no row for rank 10, 11, 12, 13" in reason for reason in plan.reasons)


@pytest.mark.parametrize("ranks", [2, 4, 7, 8, 14])
def test_ulysses_sends_by_the_formula_and_its_mean_is_the_published_one(ranks):
    """Divisible sizes: 4 S 7168 2 (P - 1) / P^2 bytes a block, in bfloat16."""
    text_rows = next(rows for rows in range(1, 99) if (rows + 470 + 17010) % ranks == 0)
    plan = plan_of(Layout(sp=ranks), text_rows=text_rows)
    S, blocks = plan.rows, 50 * 12
    exchanged = [share.sent["heads.to"] + share.sent["heads.from"] for share in plan.shares]
    for share, count in zip(plan.shares, exchanged, strict=True):
        s, h = (b - a for a, b in (share.rows, share.heads))
        assert count == blocks * (3 * s * (56 - h) + (S - s) * h) * 128 * 2
    if 56 % ranks == 0:
        assert Fraction(sum(exchanged), ranks * blocks) == Fraction(4 * S * 7168 * 2 * (ranks - 1), ranks**2)


def test_tensor_sends_its_padding_and_amax_only_where_asked():
    plan = plan_of(Layout(tp=6), resolved=SMALL, dims=TINY, text_rows=61, dtype="float32")
    assert plan.rows == 697 and plan.chunk == 117  # the last rank has 112 rows and pads
    wire = 3 * 4 * 2 * 117 * 160 * 4 * 5
    for share in plan.shares:
        assert share.sent == {
            "text": 61 * 160 * 4 * 5 if share.rank == 0 else 0,
            "conditions": 0,
            "rows.gather": wire,
            "rows.reduce": wire,
            "hidden.gather": 0,
            "heads.to": 0,
            "heads.from": 0,
            "amax": 0,
            "outputs": 4 * 117 * 128 * 4 * 5,
            "encode.inputs": 0,
            "encode.heads": 0,
            "encode.ffn": 0,
            "encode.hidden": 0,
            "encode.pixels": 0,
            "encode.sounds": 0,
            "encode.moments": 0,
            "decode.tiles": 0,
            "decode.sound": 0,
        }
    quantised = plan_of(Layout(tp=6), resolved=SMALL, dims=TINY, text_rows=61, dtype="float32", amax=12)
    assert {share.sent["amax"] for share in quantised.shares} == {3 * 4 * 4 * 4 * 5}


def test_one_rank_sends_nothing():
    plan = plan_of(Layout(), amax=200)
    assert plan.shares[0].sent == dict.fromkeys((*LABELS, *ENCODE_LABELS, *DECODE_LABELS), 0)


def test_stored_bytes_are_the_published_payload():
    """The released pruned NVFP4 file: 12,528,520,792 bytes of tensors, 200 of them markers of 19 bytes."""
    assert stored_bytes(released_dims(), 56, 14336, refiner=True) == 12_528_520_792 - 200 * 19


@pytest.mark.parametrize("ranks", [2, 4, 6, 7, 8])
def test_tensor_ranks_keep_their_part_of_the_block_weights(ranks):
    """At most 1/P of the block weights and a tenth, all ranks together exactly the whole file's linears."""
    dims = released_dims()
    rest = stored_bytes(dims, 0, 0, refiner=False)
    whole = stored_bytes(dims, 56, 14336, refiner=False) - rest
    plan = plan_of(Layout(tp=ranks))
    parts = [share.file_bytes - rest for share in plan.shares[1:]]
    first = plan.shares[0].file_bytes - (stored_bytes(dims, 0, 0, refiner=True))
    assert sum(parts) + first == whole
    assert max(first, *parts) <= whole / ranks * 1.1
    assert plan_of(Layout()).shares[0].weight_bytes <= 13.5e9


def test_a_plan_that_does_not_fit_names_one_that_does():
    plan = plan_of(Layout(sp=4))
    check_memory(plan, list(plan.peaks))
    free = [int(11 * GIB)] * 4
    with pytest.raises(
        PlanError, match=r"to denoise and 11.0 GiB are free .*parallel=hybrid parallel.sp=2 parallel.tp=2"
    ):
        check_memory(plan, free)
    with pytest.raises(PlanError, match=r"--gpus 5 parallel=tensor, 4.. GiB"):
        check_memory(plan, [int(4.6 * GIB)] * 4)
    with pytest.raises(PlanError, match=r"fewer frames or a smaller canvas"):
        check_memory(plan, [2 * GIB] * 4)
    fitting = plan_of(Layout(sp=2, tp=2))
    assert fits(fitting, free)


def test_a_text_encoder_too_large_is_not_blamed_on_the_layout():
    plan = plan_of(Layout(sp=4), files={"text_encoder": 60 * GIB})
    with pytest.raises(PlanError, match=r"rank 0 needs about 61.5 GiB to encode .*no layout changes that; .*encode=tp"):
        check_memory(plan, [40 * GIB] * 4)


def test_the_digest_depends_on_everything_and_is_the_same_every_time():
    plan = plan_of(Layout(sp=3, tp=2))
    assert plan.digest == plan_of(Layout(sp=3, tp=2)).digest
    others = [
        plan_of(Layout(sp=2, tp=3)),
        plan_of(Layout(sp=3, tp=2), text_rows=61),
        plan_of(Layout(sp=3, tp=2), steps=13),
        plan_of(Layout(sp=3, tp=2), dtype="float32"),
        plan_of(Layout(sp=3, tp=2), attention="sdpa_cudnn"),
        plan_of(Layout(sp=3, tp=2), amax=200),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 7
    assert json.loads(json.dumps(plan.as_dict())) == plan.as_dict()


def test_the_table_shows_every_rank_and_every_reason():
    plan = plan_of(Layout(sp=3, tp=2), mode="auto")
    text = plan.text()
    for share in plan.shares:
        assert f"{share.rows[0]}..{share.rows[1]}" in text and f"{share.ffn[0]}..{share.ffn[1]}" in text
    for label in LABELS:
        assert (label in text) == any(share.sent[label] for share in plan.shares), label
    assert "17540 rows = 60 text + 470 sound + 17010 video; 2924 a rank" in text
    assert "auto is hybrid here" in text and "10 or 9 a rank" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(("layout", "idle", "heading"), [
    (Layout(tp=3), ("variant", "groups", "codec"), "exchange heads in 1 group, rows packed, sums in 3 chunks"),
    (Layout(sp=3), ("chunks",), "exchange hidden in 2 groups as int8 codes (approximate), rows packed"),
    (Layout(sp=2, tp=2), (), "exchange hidden in 2 groups as int8 codes (approximate), rows packed, sums in 3 chunks"),
    (Layout(), ("variant", "groups", "codec", "rows", "chunks"), "12 evaluations"),
])  # fmt: skip
def test_what_is_idle_on_a_layout_is_noted_and_not_told_of_the_run(layout, idle, heading):
    plan = plan_of(layout, exchange=ExchangePlan("hidden", 2, "int8", "packed", 3))
    notes = [note for note in plan.notes if "changes nothing here: " in note and "NVFP4" not in note]
    assert [note.split("=")[0].removeprefix("exchange.") for note in notes] == list(idle)
    assert plan.text().splitlines()[0].endswith(heading)
    plain = plan_of(layout)
    assert not any("changes nothing" in note for note in plain.notes) and plain.exchange.on(layout) == plain.exchange


def test_an_unknown_dtype_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        plan_of(Layout(), dtype="bfloat")


@pytest.fixture(scope="module", params=["full", "curve"])
def denoiser(request, tmp_path_factory):
    return open_denoiser(write_tiny(tmp_path_factory.mktemp("tiny"), request.param)["denoiser"])


@pytest.mark.parametrize("layout", [Layout(), Layout(sp=3), Layout(tp=6), Layout(sp=2, tp=3)], ids=str)
def test_an_opened_file_says_what_each_rank_reads(denoiser, layout):
    """Ulysses ranks read all of it but the text's layers; tensor ranks their slices, whole scale tiles each."""
    plan = plan_of(layout, resolved=SMALL, dims=denoiser.dims, dfile=denoiser)
    whole = sum(info.nbytes for info in denoiser.tensors.values())
    asked = [share.file_bytes for share in plan.shares]
    for share in plan.shares:
        assert share.file_bytes == rank_file_bytes(denoiser, share.tp_heads, share.ffn, refiner=share.rank == 0)
    assert max(asked) == asked[0] <= whole
    if layout.tp == 1:
        assert len(set(asked[1:])) <= 1 and asked[0] > 0.98 * whole
    else:
        assert sum(asked) > asked[0] and asked[1] < asked[0]
    assert plan.stored.bytes_per_weight > 9 / 16, "scale tiles of small layers are padded"
    assert not any("no denoiser file" in note for note in plan.notes)


def test_planning_imports_no_torch():
    code = "import sys, h3dist.plan as p; p.released_dims(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
