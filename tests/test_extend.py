"""A clip that goes on: the guide is the clip's end, the job is legal, and the joined film has no seam in time.

The new clip is written by a stand-in for the launcher; everything up to the launcher's job, and all after, is real.
"""

import json
import sys
from dataclasses import asdict
from itertools import pairwise

import av
import numpy as np
import pytest

from h3dist import launcher
from h3dist.cli.commands import main
from h3dist.config import compose
from h3dist.errors import OutputError, RequestError
from h3dist.extend import FADE, join_sound, prepare, run_extend
from h3dist.geometry import audio_samples
from h3dist.job import make_job
from h3dist.launcher import Job
from h3dist.media import film_sound, measure_film, read_film, write_film_lossless, write_mp4
from tests.mediafiles import pitch, tone

BITS = 8  # of a number on a frame, a stripe each


def film(path, first, count, hertz=440.0, size=(64, 32)):
    """Frames that show their numbers first, first + 1, ..., and a tone."""
    frames = np.zeros((count, size[1], size[0], 3), np.uint8)
    for index, frame in enumerate(frames):
        for bit in range(BITS):
            frame[:, bit * 8 : bit * 8 + 8] = 200 if (first + index) >> bit & 1 else 40
    sound = None if hertz is None else tone(count / 24 + 1, 32000, hertz=hertz)
    write_mp4(path, [frames], sound, width=size[0], height=size[1], frames=count, metadata={})
    return str(path)


def numbers(frames):
    """What `film` wrote on each frame."""
    return [sum((frame[:, bit * 8 + 2 : bit * 8 + 6].mean() > 120) << bit for bit in range(BITS)) for frame in frames]


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """In the launcher's place: checks that the job is legal, and writes a clip that goes on as it was guided to."""
    seen = []

    def generate(job):
        made = make_job(compose(["model.denoiser=h3"]), job.request, job.output)
        guide = read_film(made["request"]["keyframes"][0]["video"])
        seen.append((job, made, guide))
        film(made["output"]["path"], numbers(guide.frames)[0], made["request"]["frames"], hertz=660)
        return 0

    monkeypatch.setattr(launcher, "run_generate", generate)
    return seen


def test_a_clip_goes_on_without_a_seam(stand_in, tmp_path, capsys):
    clip = film(tmp_path / "a.mp4", 0, 39)
    job = Job({"prompt": "on it goes", "seed": 3, "frames": 39}, gpus=2)
    assert run_extend(clip, job, str(tmp_path / "b.mp4")) == 0
    (given, made, guide) = stand_in[0]
    assert (made["request"]["task"], made["request"]["width"], made["request"]["height"]) == ("fl2va", 64, 32)
    assert made["request"]["keyframes"] == [{"video": str(tmp_path / "b.guide.mov"), "frame": 0}]
    assert given.gpus == 2 and numbers(guide.frames) == list(range(17, 39))

    joined = tmp_path / "b.joined.mp4"
    assert capsys.readouterr() == (f"{joined}\n", "")
    with av.open(str(joined)) as container:
        frames = list(container.decode(video=0))
        assert [frame.pts * frame.time_base * 24 for frame in frames] == list(range(39 + 39 - 22))
    with av.open(str(joined)) as container:
        sound = list(container.decode(audio=0))
        assert sound[0].pts == 0
        for before, after in pairwise(sound):
            assert after.pts == before.pts + before.samples
    assert numbers(frame.to_ndarray(format="rgb24") for frame in frames) == list(range(56))
    heard = film_sound(joined)
    assert heard.shape == (2, audio_samples(56))
    assert abs(pitch(heard[0, : audio_samples(39)]) - 440) < 2
    assert abs(pitch(heard[0, audio_samples(39) :]) - 660) < 3


def test_the_guide_is_the_clips_end_to_the_bit(stand_in, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (39, 32, 64, 3), np.uint8)
    write_film_lossless(tmp_path / "a.mov", noise, tone(39 / 24, 32000))
    run_extend(str(tmp_path / "a.mov"), Job({"prompt": "x"}), str(tmp_path / "b.mp4"), overlap=22)
    guide = stand_in[0][2]
    assert np.array_equal(guide.frames, noise[17:])
    whole = tone(39 / 24, 32000)
    begins = audio_samples(39) - audio_samples(22)
    assert np.array_equal(guide.sound, whole[:, begins : begins + audio_samples(22)])


@pytest.mark.parametrize(("first", "second"), [(None, 660), (440, None), (None, None)])
def test_silent_clips(stand_in, tmp_path, first, second, monkeypatch):
    clip = film(tmp_path / "a.mp4", 0, 22, hertz=first)
    film(tmp_path / "new.mp4", 17, 22, hertz=second)
    monkeypatch.setattr(launcher, "run_generate", lambda job: (tmp_path / "new.mp4").rename(job.output["path"]) and 0)
    assert run_extend(clip, Job({"prompt": "x", "frames": 22}), str(tmp_path / "b.mp4"), overlap=5) == 0
    heard = film_sound(tmp_path / "b.joined.mp4")
    seam = audio_samples(22)
    if first is None and second is None:
        assert heard is None
        return
    levels = [float(np.abs(part).max()) > 0.1 for part in (heard[:, 2000 : seam - 2000], heard[:, seam + 2000 :])]
    assert levels == [first is not None, second is not None]


def test_the_sound_fades_where_both_clips_play():
    ones, twos = np.ones((2, audio_samples(22)), np.float32), 2 * np.ones((2, audio_samples(22)), np.float32)
    sound = join_sound(ones, twos, 22, 5, 39)
    seam = audio_samples(22)
    assert sound.shape == (2, audio_samples(39))
    assert np.all(sound[:, : seam - FADE] == 1) and np.all(sound[:, seam:-2] == 2)
    assert np.abs(np.diff(sound[:, :-2])).max() < 1.1 / FADE


def test_where_the_new_clip_fails_nothing_is_left(tmp_path, monkeypatch):
    clip = film(tmp_path / "a.mp4", 0, 22)
    monkeypatch.setattr(launcher, "run_generate", lambda job: 7)
    assert run_extend(clip, Job({"prompt": "x"}), str(tmp_path / "b.mp4")) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize(
    ("fields", "overlap", "said"),
    [
        ({}, 20, "--overlap 20: must be 5, 22, 39, ... frames; the nearest are 5 and 22"),
        ({}, 39, "--overlap 39: the clip has 22 frames"),
        ({"frames": 22}, 22, "the new clip has 22, of which --overlap repeats 22"),
        ({"width": 96}, 22, "width=96: the clip to go on from has 64; leave width out"),
        ({"mux_audio": False}, 22, "leave mux_audio out"),
        ({"first_frame": "a.png"}, 22, "first_frame and keyframes[0] both stand at frame 0"),
        ({"references": [{"image": "a.png"}]}, 22, "keyframes does not belong to ref2va"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_go_on_is_refused(tmp_path, fields, overlap, said):
    clip = film(tmp_path / "a.mp4", 0, 22)
    with pytest.raises(RequestError) as caught:
        prepare(clip, Job({"prompt": "x"} | fields), str(tmp_path / "b.mp4"), overlap)
    assert said in str(caught.value)


def test_a_clip_of_another_size_is_refused(tmp_path):
    clip = film(tmp_path / "a.mp4", 0, 22, size=(80, 48))
    with pytest.raises(RequestError, match="80 x 48 pixels; to go on, both must be multiples of 32"):
        prepare(clip, Job({"prompt": "x"}), str(tmp_path / "b.mp4"), 22)


def test_no_file_is_replaced_that_should_stay(tmp_path):
    clip = film(tmp_path / "a.mp4", 0, 22)
    for name in ("a.mp4", "b.mp4"):
        film(tmp_path / "b.joined.mp4", 0, 22)
        with pytest.raises(OutputError, match="is the clip to go on from, and would be replaced"):
            prepare(str(tmp_path / name.replace("b", "b.joined")), Job({"prompt": "x"}), str(tmp_path / name), 22)
    with pytest.raises(OutputError, match=r"b\.joined\.mp4 exists"):
        prepare(clip, Job({"prompt": "x"}, output={"clobber": False}), str(tmp_path / "b.mp4"), 22)


def test_the_command(stand_in, tmp_path, monkeypatch):
    film(tmp_path / "a, (1).mp4", 0, 22)
    monkeypatch.chdir(tmp_path)
    words = [
        "extend",
        "a, (1).mp4",
        "on, ${it} goes",
        "-o",
        "b.mp4",
        "--overlap",
        "5",
        "request.frames=22",
        "--gpus",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["h3dist", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    job = asdict(stand_in[0][0])
    assert job["request"]["prompt"] == "on, ${it} goes" and job["overrides"] == ["request.frames=22"]
    assert json.dumps(job) and measure_film("b.joined.mp4").frames == 22 + 22 - 5
