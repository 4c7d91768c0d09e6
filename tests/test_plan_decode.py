"""Where the plan has a clip decoded, why, and what that takes of memory and bytes."""

import pytest

from h3dist.errors import ConfigError
from h3dist.plan import Layout, choose_products, make_plan, released_dims
from h3dist.plan.plan import relayout
from h3dist.request import Resolved
from h3dist.tiles import even_batch

GIB = 1 << 30
CLIP = Resolved("t2va", "a quiet shot", 1344, 768, 124, 124, 7, 12, True)  # 7 chunks of 28 tiles
FILES = {"text_encoder": 20 * GIB, "video_vae": 5 * GIB, "audio_vae": GIB}
TILE = 3 * 22 * 256 * 256
TILE_BYTES = {"cuda": 2 * TILE, "cpu": 4 * TILE}


def plan_of(ranks, decode="auto", device="cuda", clip=CLIP, files=FILES, tp=1):
    layout = Layout(sp=ranks // tp, tp=tp)
    options = {"dtype": "bfloat16", "attention": "sdpa", "steps": 12, "files": files}
    return make_plan(clip, released_dims(), 60, layout, decode=decode, device=device, **options)


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("device", TILE_BYTES)
def test_all_but_rank_0_hand_in_their_tiles_and_the_last_the_sound(ranks, device):
    plan = plan_of(ranks, "parallel", device)
    assert plan.decode.parallel and sum(plan.decode.tiles) == 196
    assert max(plan.decode.tiles) - min(plan.decode.tiles) <= 20
    sent = [share.sent for share in plan.shares]
    for rank in range(1, ranks):
        assert sent[rank]["decode.tiles"] == plan.decode.tiles[rank] * TILE_BYTES[device]
    assert sent[0]["decode.tiles"] == 0
    assert [one["decode.sound"] for one in sent] == [0] * (ranks - 1) + [2 * 800 * 207 * 4]
    assert plan.decode.speedup >= 0.9 * ranks


def test_rank_0_alone_sends_nothing_and_needs_what_it_did():
    plan = plan_of(4, "rank0")
    assert not plan.decode.parallel
    assert all(share.sent["decode.tiles"] == share.sent["decode.sound"] == 0 for share in plan.shares)
    assert plan.memory[0]["decode"] > plan.memory[1]["decode"] + 6 * GIB


def test_a_rank_that_decodes_holds_the_vae_and_its_tiles_and_rank_0_two_chunks():
    alone, plan = plan_of(4, "rank0"), plan_of(4, "parallel")
    waits = alone.memory[1]["decode"]
    tile = 2 * TILE
    for rank, extra in ((1, 0), (3, GIB)):
        need = plan.memory[rank]["decode"] - waits
        tiles = need - extra - 5 * GIB - (1 << 28)
        assert tiles in (3 * most * tile for most in (7, 8, 9)), "what it makes, what is on its way, what was before"
    assert plan.memory[0]["decode"] - alone.memory[0]["decode"] == (2 * 28 - 15) * tile - GIB, "two rows and a call"
    others = [{k: v for k, v in stages.items() if k != "decode"} for stages in plan.memory]
    assert others == [{k: v for k, v in stages.items() if k != "decode"} for stages in alone.memory]


def test_calls_of_several_tiles_stay_whole_and_take_memory():
    options = {"dtype": "bfloat16", "attention": "sdpa", "steps": 12, "files": FILES, "fast_decode": True}
    for ranks, batch in ((ranks, batch) for ranks in (1, 2, 3, 4, 7, 8) for batch in (1, 2, 7)):
        how = {"decode": "parallel", "device": "cuda", "decode_batch": batch}
        plan = make_plan(CLIP, released_dims(), 60, Layout(sp=ranks), **how, **options)
        assert plan.decode.fast and plan.decode.batch == batch
        assert all(tiles % batch == 0 for tiles in plan.decode.tiles)
        assert plan.decode.speedup >= {1: 0.9, 2: 0.88, 7: 0.7}[batch] * ranks
    alone = {device: make_plan(CLIP, released_dims(), 60, Layout(), device=device, **options) for device in TILE_BYTES}
    assert {device: plan.decode.batch for device, plan in alone.items()} == {"cuda": 2, "cpu": 1}
    assert all(plan_of(ranks).decode.batch == 1 for ranks in (1, 8)), "not by the fast decoder"
    assert "2 tiles a call, by the fast decoder" in alone["cuda"].text()
    alone = make_plan(CLIP, released_dims(), 60, Layout(sp=2), decode_batch=2, **options)
    more = [
        fast["decode"] - plain["decode"] for fast, plain in zip(alone.memory, plan_of(2, "rank0").memory, strict=True)
    ]
    assert more == [(1 << 28) + 2 * TILE, 0], "rank 0 alone decodes"


def test_fp8_products_are_told_of_and_refused_without_the_fast_decoder_or_a_gpu_that_has_them():
    options = {"dtype": "bfloat16", "attention": "sdpa", "steps": 12, "fast_decode": True, "decode_gemm": "fp8"}
    for mode in ("rank0", "parallel"):
        plan = make_plan(CLIP, released_dims(), 60, Layout(sp=2), decode=mode, **options)
        assert plan.decode.gemm == "fp8" and "with FP8 products (an approximation)" in plan.text()
    exact = make_plan(CLIP, released_dims(), 60, Layout(sp=2), **options | {"decode_gemm": "exact"})
    assert exact.digest != plan.digest and "FP8 products" not in exact.text()
    assert choose_products("auto", False, (8, 0)) == "exact"
    assert choose_products("fp8", True, (8, 9)) == choose_products("fp8", True, None) == "fp8"
    with pytest.raises(ConfigError, match=r"decode\.gemm=fp8 is for the fast decoder, .* use decode\.fast=on"):
        choose_products("fp8", False, (9, 0))
    with pytest.raises(ConfigError, match=r"capability 8\.9 or later, and this is 8\.6; decode\.gemm=auto"):
        choose_products("fp8", True, (8, 6))


@pytest.mark.parametrize(
    ("tiles", "most", "batch"), [(28, 7, 7), (15, 7, 5), (16, 7, 6), (1, 7, 1), (9, 1, 1), (5, 8, 5)]
)
def test_calls_are_as_full_as_their_number_allows(tiles, most, batch):
    assert even_batch(tiles, most) == batch


def test_longer_clips_need_no_more_to_decode():
    short = plan_of(4, "parallel").memory
    long = plan_of(4, "parallel", clip=Resolved("t2va", "x", 1344, 768, 362, 362, 7, 12, True)).memory
    weights = [s.weight_bytes for s in plan_of(4).shares]
    assert len(set(weights)) == 1
    assert [need["decode"] for need in long] == pytest.approx([need["decode"] for need in short], rel=0.02)


def test_auto_gives_reasons_for_rank_0():
    def why(*args, **options):
        plan = plan_of(*args, **options)
        assert not plan.decode.parallel
        return plan.decode.why

    assert "one rank" in why(1)
    assert "one tile" in why(2, clip=Resolved("t2va", "x", 64, 64, 5, 5, 7, 12, True))
    assert "share the processor" in why(2, device="cpu")
    small = {"text_encoder": GIB, "video_vae": 30 * GIB, "audio_vae": 30 * GIB}
    assert "more than any rank needs without" not in plan_of(8, files=FILES).decode.why
    assert "more than any rank needs without" in why(8, files=small | {"video_vae": 30 * GIB, "audio_vae": 0}, tp=8)


def test_auto_spreads_where_memory_and_ranks_allow():
    for ranks in range(2, 9):
        plan = plan_of(ranks)
        assert plan.decode.parallel, plan.decode.why
        assert max(plan.peaks) == max(plan_of(ranks, "rank0").peaks), "auto never raises what a machine must have"
    assert "no rank needs more for it than rank 0" in plan.decode.text()


def test_another_layout_decides_again():
    one = plan_of(1, "parallel")
    assert one.decode.why == "there is one rank" and not one.decode.parallel
    eight = relayout(one, Layout(sp=4, tp=2))
    assert eight.decode.parallel and len(eight.decode.tiles) == 8
    assert eight.shares[7].sent["decode.sound"] > 0
    assert eight.digest != relayout(plan_of(1, "rank0"), Layout(sp=4, tp=2)).digest


def test_the_table_shows_who_decodes_and_why():
    text = plan_of(8, "parallel").text()
    assert "decode.tiles" in text and "decode.sound" in text
    assert "all ranks decode" in text and "as asked for" in text
    assert "rank 0 decodes: " in plan_of(8, "rank0").text()
    assert max(map(len, text.splitlines())) <= 120
