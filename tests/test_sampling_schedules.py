"""Schedules against the published tables, diffusers' grid, and Comfy's rules in double precision."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from scipy.stats import beta as beta_distribution

from h3dist.errors import ConfigError
from h3dist.sampling.schedules import beta, evaluations, make_schedule, official, simple

SIMPLE = {
    (4, 12): "1 .972973 .923077 .8 0",
    (6, 12): "1 .9836839 .9600576 .9230769 .8575097 .7063800 0",
    (8, 12): "1 .9882353 .9729730 .9523810 .9230769 .8780488 .8 .6315789 0",
    (
        20,
        12,
    ): "1 .995633 .990826 .985507 .979592 .972973 .965517 .957055 .947368 .936170 .923077 .907563 .888889 "
    ".865979 .837209 .8 .75 .679245 .571429 .387097 0",
    (4, 6): "1 .9473684 .8571429 .6666667 0",
    (8, 10): "1 .9859155 .9677419 .9433962 .9090909 .8571429 .7692308 .5882353 0",
}
BETA = {
    4: "1 .982512 .923361 .720733 0",
    8: "1 .994988 .982512 .960745 .923361 .855292 .720733 .424908 0",
    20: "1 .998904 .996540 .993096 .988448 .982512 .975175 .966148 .954852 .940853 .923361 .900888 .872421 "
    ".835247 .786611 .720733 .629442 .503767 .339077 .145581 0",
}
BETA_INDEX_50 = (
    "999 996 990 982 972 959 946 930 913 895 876 856 835 812 789 765 741 715 690 663 637 610 582 555 527 500 "
    "472 444 417 389 362 336 309 284 258 234 210 187 164 143 123 104 86 69 53 40 27 17 9 3"
)
OFFICIAL = {
    (4, 12): "1 .972973 .923077 .8 0",
    (4, 6): "1 .947368 .857143 .666667 0",
    (4, 3): "1 .9 .75 .5 0",
    (8, 12): "1 .988235 .972973 .952381 .923077 .878049 .8 .631579 0",
    (8, 6): "1 .976744 .947368 .909091 .857143 .782609 .666667 .461538 0",
    (8, 3): "1 .954545 .9 .833333 .75 .642857 .5 .3 0",
}


def values(text: str) -> list[float]:
    return [float(word) for word in text.split()]


@pytest.mark.parametrize(("key", "table"), SIMPLE.items())
def test_simple_gives_the_published_sigmas(key, table):
    assert simple(*key) == pytest.approx(values(table), abs=6e-7)


@pytest.mark.parametrize(("steps", "table"), BETA.items())
def test_beta_gives_the_published_sigmas(steps, table):
    assert beta(steps, 12) == pytest.approx(values(table), abs=6e-7)


@pytest.mark.parametrize(("key", "table"), OFFICIAL.items())
def test_official_gives_the_published_sigmas(key, table):
    assert official(*key) == pytest.approx(values(table), abs=6e-7)


def test_beta_takes_the_published_table_entries():
    index = np.array([int(word) for word in BETA_INDEX_50.split()])
    entries = [np.float32(simple(1000, 12)[999 - i]) for i in index]  # simple over 1000 steps is the whole table
    assert beta(50, 12) == (*map(float, entries), 0.0)


def test_the_whole_sigma_table_is_float32_of_the_shifted_thousandths():
    tau = torch.arange(1, 1001) / 1000
    table = 12.0 * tau / (1 + 11.0 * tau)
    assert simple(1000, 12) == (*table.flip(0).tolist(), 0.0)
    assert simple(1000, 12)[-2] == pytest.approx(0.011869, abs=5e-7)


def test_beta_indices_are_scipys_quantiles_rounded_half_to_even():
    table = np.array(simple(1000, 12)[:-1])[::-1]
    for steps in range(1, 201):
        index = np.rint(beta_distribution.ppf(1 - np.arange(steps) / steps, 0.6, 0.6) * 999).astype(int).tolist()
        kept = [i for at, i in enumerate(index) if at == 0 or i != index[at - 1]]
        assert beta(steps, 12) == (*table[kept].tolist(), 0.0), steps


def test_beta_rounds_a_tie_to_the_even_entry():
    table = simple(1000, 12)[::-1]  # table[i + 1] is entry i
    assert beta(2, 12)[1] == table[500 + 1]  # the median is entry 499.5


def test_official_is_diffusers_grid_where_steps_count_evaluations():
    scheduler = {shift: MiniMaxH3Scheduler(shift=shift) for shift in (12.0, 3.0)}
    for steps in range(1, 201):
        for shift, ours in scheduler.items():
            ours.set_timesteps(steps + 1)
            assert official(steps, shift) == pytest.approx(ours.sigmas.tolist(), rel=2.4e-7, abs=0), (
                steps,
                shift,
            )
        schedule = make_schedule("official", steps)
        assert schedule.times_v == pytest.approx(scheduler[12.0].timesteps.tolist(), rel=0, abs=1.2e-7)
        assert schedule.times_a == pytest.approx(scheduler[3.0].timesteps.tolist(), rel=0, abs=1.2e-7)
        assert schedule.evaluations == steps


def test_official_drops_levels_that_float32_cannot_tell_apart():
    kept = official(4, 1e9)  # levels 1/4 .. 1 all become 1
    assert kept == (1.0, 0.0)
    with pytest.raises(ConfigError, match="smaller shifts"):
        make_schedule("official", 4, video_shift=1e9)


@pytest.mark.parametrize("name", ["simple", "beta"])
@pytest.mark.parametrize(("video_shift", "audio_shift"), [(12.0, 3.0), (6.0, 3.0), (5.0, 7.0)])
def test_comfy_times_follow_from_the_video_sigmas(name, video_shift, audio_shift):
    schedule = make_schedule(name, 12, video_shift=video_shift, audio_shift=audio_shift)
    assert len(schedule.video_sigmas) == len(schedule.audio_sigmas) == 13
    assert schedule.video_sigmas[-1] == schedule.audio_sigmas[-1] == 0
    assert schedule.gain == video_shift / audio_shift
    for step, sigma in enumerate(schedule.video_sigmas[:-1]):
        base = sigma / (video_shift + sigma * (1 - video_shift))
        audio = audio_shift * base / (1 + (audio_shift - 1) * base)
        assert schedule.times_v[step] == pytest.approx(1 - sigma, abs=2e-7)
        assert schedule.audio_sigmas[step] == pytest.approx(audio, rel=1e-6)
        assert schedule.times_a[step] == pytest.approx(1 - audio, abs=2e-7)


def test_comfy_times_pass_through_thousandths_in_float32():
    schedule = make_schedule("beta", 50)
    travelled = torch.tensor(schedule.video_sigmas[:-1]) * 1000 / 1000
    assert schedule.times_v == tuple((1 - travelled).tolist())
    assert schedule.times_v != tuple((1 - torch.tensor(schedule.video_sigmas[:-1])).tolist())


def test_the_model_never_sees_a_sigma_below_a_millionth():
    schedule = make_schedule("beta", 138, video_shift=1e-4)
    assert min(schedule.video_sigmas[:-1]) < 1e-6
    assert max(schedule.times_v) == float(np.float32(1) - np.float32(1e-6))


def test_every_sigma_is_a_float32_and_falls():
    for name in ("simple", "beta", "official"):
        schedule = make_schedule(name, 30)
        for stream in (schedule.video_sigmas, schedule.audio_sigmas):
            assert all(float(np.float32(sigma)) == sigma for sigma in stream)
            assert stream[0] == 1 and all(a > b for a, b in pairwise(stream))


def test_evaluations_are_the_steps_until_beta_repeats_an_entry():
    for steps in (1, 2, 12, 138):
        assert {evaluations(name, steps) for name in ("simple", "beta", "official")} == {steps}
    assert evaluations("beta", 139) == 138
    assert evaluations("simple", 200) == evaluations("official", 200) == 200


def test_an_unknown_schedule_or_shift_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"'simpel'.*simple, beta, official.*'simple'"):
        make_schedule("simpel", 4)
    with pytest.raises(ConfigError, match="above 0, got -3"):
        evaluations("beta", 4, video_shift=-3)


def test_counting_evaluations_loads_no_torch():
    code = "import sys\nfrom h3dist.sampling.schedules import evaluations\n"
    code += "assert evaluations('beta', 12) == 12\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
