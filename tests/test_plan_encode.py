"""Where the plan has the text encoded, who holds which rows of it, and what that takes of memory and bytes."""

import pytest

from h3dist.checkpoint.storage import Extras, Int8, Nvfp4
from h3dist.checkpoint.text_names import RELEASED
from h3dist.checkpoint.text_shard import TextStored, kv_span, text_slices
from h3dist.config import compose
from h3dist.errors import PlanError
from h3dist.plan import ENCODE_LABELS, Layout, check_memory, make_plan, released_dims
from h3dist.plan.encode import share_text
from h3dist.plan.machine import Machine
from h3dist.plan.plan import relayout
from h3dist.plan.text_memory import alone_bytes, spread_bytes
from h3dist.planner import _decide
from h3dist.preflight import Facts
from h3dist.request import Resolved

GIB = 1 << 30
CLIP = Resolved("t2va", "a quiet shot", 864, 480, 141, 141, 7, 12, True)
SHAPES = {
    "self_attn.q_proj": (8192, 5120),
    "self_attn.k_proj": (1024, 5120),
    "self_attn.v_proj": (1024, 5120),
    "self_attn.o_proj": (5120, 8192),
    "mlp.gate_proj": (25600, 5120),
    "mlp.up_proj": (25600, 5120),
    "mlp.down_proj": (5120, 25600),
}
STORED = TextStored(
    RELEASED,
    tuple(
        (name, Nvfp4(shape, True, Extras(False, "BF16" if name.endswith(("o_proj", "down_proj")) else None)), 50)
        for name, shape in SHAPES.items()
    ),
    norms=50 * 2 * (2 * 5120 + 2 * 128),
    front=Int8((151936, 5120), (151936, 1), False, Extras(False, None)).nbytes() + 2 * 577_000_000,
)


def plan_of(ranks, encode="tp", text_rows=400, shown_rows=0, stored=STORED):
    options = {"dtype": "bfloat16", "attention": "sdpa", "steps": 12, "encode": encode, "shown_rows": shown_rows}
    options |= {"text": stored, "files": {"text_encoder": stored.nbytes, "video_vae": GIB, "audio_vae": GIB}}
    return make_plan(CLIP, released_dims(), text_rows, Layout(sp=ranks), **options)


@pytest.mark.parametrize("ranks", [*range(1, 10), 65])
def test_every_row_is_somebodys_and_only_keys_are_anybodys_twice(ranks):
    shares = share_text(RELEASED, ranks)
    slices = [text_slices(RELEASED, share) for share in shares]
    for name, (rows, _) in SHAPES.items():
        held = [row for cut in slices for start, stop in cut[name].rows for row in range(start, stop)]
        assert sorted(set(held)) == list(range(rows))
        assert len(held) == rows or name.endswith(("k_proj", "v_proj"))
    for share in shares:
        first, last = kv_span(RELEASED, share.heads)
        assert {head // 8 for head in range(*share.heads)} == set(range(first, last))
    if ranks < 9:
        assert all(edge % 128 == 0 for cut in slices for part in cut.values() for edge in part.rows[0])


@pytest.mark.parametrize("ranks", range(2, 9))
def test_bytes_are_those_of_the_formulas(ranks):
    plan = plan_of(ranks, text_rows=333, shown_rows=100)
    heads, ffn, hidden = (-(-units // ranks) for units in (64, 200, 40))
    for rank, share in enumerate(plan.shares):
        assert share.sent["encode.inputs"] == (rank == 0) * 4 * (333 + 3 * 100) * 5120 * (ranks - 1)
        assert share.sent["encode.heads"] == 4 * 50 * 333 * heads * 128 * (ranks - 1)
        assert share.sent["encode.ffn"] == 4 * 50 * 333 * ffn * 128 * (ranks - 1)
        assert share.sent["encode.hidden"] == 4 * 50 * 2 * 333 * hidden * 128 * (ranks - 1)
    twice = sum(share.text_bytes for share in plan.shares) - STORED.nbytes
    assert 0 <= twice < 0.02 * STORED.nbytes, "norms, AWQ's scales and a few keys"
    assert max(share.text_bytes for share in plan.shares[1:]) < (STORED.nbytes - STORED.front) / ranks * 1.1


def test_rank_0_alone_reads_all_of_it_and_sends_nothing():
    plan = plan_of(4, "rank0")
    assert [share.text_bytes for share in plan.shares] == [STORED.nbytes, 0, 0, 0]
    assert not any(share.sent[label] for share in plan.shares for label in ENCODE_LABELS)
    assert plan_of(1).encode.shares == () and plan_of(1).memory == plan_of(1, "rank0").memory
    assert relayout(plan_of(1), Layout(sp=2)).shares[1].text_bytes == plan_of(2).shares[1].text_bytes > 0


def test_memory_is_a_part_for_each_and_the_front_alone_on_rank_0_before_it():
    alone = plan_of(4, "rank0").memory[0]["encode"]
    spread = [stages["encode"] for stages in plan_of(4).memory]
    part = STORED.layer_bytes(text_slices(RELEASED, share_text(RELEASED, 4)[1]))
    assert alone == GIB + STORED.nbytes + alone_bytes(RELEASED, 400, 0) + 4 * 400 * 5120
    assert spread[1] == GIB + part + spread_bytes(RELEASED, 400, 0, share_text(RELEASED, 4)[1]) + 4 * 400 * 5120
    assert spread[0] == spread[1] < alone / 2
    assert plan_of(8).memory[0]["encode"] > GIB + STORED.front, "the embedding and the vision tower are rank 0's"


def test_scores_of_a_long_presentation_are_counted():
    """64 heads of L x L scores, each itself, its softmax and a byte: what transformers' call comes to on CUDA."""
    few, many = (plan_of(1, "rank0", text_rows=rows).memory[0]["encode"] for rows in (400, 8000))
    assert few - STORED.nbytes - GIB < 0.8 * GIB
    assert many - STORED.nbytes - GIB > 9 * 64 * 8000**2
    assert max(stages["encode"] for stages in plan_of(2, text_rows=8000).memory) < many / 3


def test_a_refusal_names_the_text_encoder_over_ranks():
    free = 14 * GIB
    with pytest.raises(PlanError, match=r"to encode .*no layout changes that; what fits is encode=tp parallel") as two:
        check_memory(plan_of(2, "rank0"), [free] * 2)
    assert "--gpus" not in str(two.value)
    with pytest.raises(PlanError, match=r"what fits is encode=tp --gpus 2 parallel=ulysses, 1"):
        check_memory(plan_of(1, "rank0"), [free])
    check_memory(plan_of(2), [free] * 2)


def decided(encode, gib, ranks=2):
    config = compose([f"encode={encode}", "model.denoiser=/models/h3.safetensors"])
    sizes = {"text_encoder": STORED.nbytes, "video_vae": GIB, "audio_vae": GIB}
    facts = Facts(released_dims(), None, sizes, 400, (), STORED)
    return _decide(config, CLIP, facts, Machine.imagined(ranks, None, gib * GIB), [ranks])


def test_auto_spreads_it_where_rank_0_does_not_hold_it_and_else_changes_nothing():
    spread = decided("auto", 14)
    assert spread.plan.encode.spread and spread.choice.taken.fits and "encode=auto is tp here" in spread.notes[0]
    assert decided("auto", 40).plan.digest == decided("rank0", 40).plan.digest and not decided("auto", 40).notes
    with pytest.raises(PlanError, match="to encode"):
        decided("rank0", 14)
    with pytest.raises(PlanError, match=r"rank 0 needs about 1.* GiB to encode"):
        decided("auto", 8)


def test_the_table_shows_who_encodes():
    text = decided("tp", 40).text()
    assert "encode.heads" in text and "text heads" in text and "all ranks encode the text" in text
    assert "rank 0 encodes the text" in plan_of(2, "rank0").text()
    assert max(map(len, plan_of(8).text().splitlines())) <= 120


@pytest.mark.gpu
def test_scores_on_a_gpu_are_those_that_the_plan_counts(capsys):
    """Of grouped queries in float32 9 bytes a score; of keys for each head none."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def taken(keys: int, **grouped: bool) -> int:
        q, k, v = (torch.randn(1, heads, 2500, 128, device="cuda") for heads in (64, keys, keys))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        return torch.cuda.max_memory_allocated() - before

    grouped, each = taken(8, enable_gqa=True), taken(64)
    counted = 9 * 64 * 2500**2 + 5 * 2500**2 + 4 * 2500 * 5 * 8192
    with capsys.disabled():
        print(f"\nattention of 64 heads, 2500 rows, float32: {grouped} bytes, {counted} counted; {each} ungrouped")
    assert 0.8 * grouped <= counted <= 1.25 * grouped and each < 0.2 * grouped
