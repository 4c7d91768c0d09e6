"""Sound as people have it: any rate, layout and format to stereo at 32 kHz."""

import subprocess
import sys

import numpy as np
import pytest

from h3dist.errors import RequestError
from h3dist.media import measure_sound, read_sound
from tests.mediafiles import pitch, tone, write_sound


def refused(path):
    with pytest.raises(RequestError) as caught:
        _ = measure_sound(path), read_sound(path)
    return str(caught.value)


@pytest.mark.parametrize("channels", [1, 2, 6], ids=["mono", "stereo", "5.1"])
@pytest.mark.parametrize("rate", [8000, 24000, 44100, 48000, 96000])
def test_440_hertz_stay_440_hertz_in_two_channels(rate, channels, tmp_path):
    path = tmp_path / "a.wav"
    write_sound(path, tone(1.5, rate, channels), rate, "pcm_s16le")
    sound = read_sound(path)
    assert sound.dtype == np.float32 and sound.shape == (2, 48000)
    assert measure_sound(path).samples == 48000
    for channel in sound:
        assert abs(pitch(channel) - 440) < 1
        level = np.sqrt((channel[2000:-2000] ** 2).mean())
        assert level == pytest.approx(0.5 / 2**0.5, rel=0.02) if channels < 6 else level > 0.1


@pytest.mark.parametrize(
    ("codec", "suffix", "rate"),
    [
        ("pcm_u8", "wav", 22050),
        ("pcm_s24le", "wav", 44100),
        ("pcm_f32le", "wav", 48000),
        ("pcm_f64le", "wav", 32000),
        ("flac", "flac", 96000),
        ("libmp3lame", "mp3", 44100),
        ("aac", "m4a", 48000),
        ("libopus", "ogg", 48000),
        ("ac3", "mkv", 48000),
    ],
)
def test_every_codec_gives_what_was_measured(codec, suffix, rate, tmp_path):
    path = tmp_path / f"a.{suffix}"
    write_sound(path, tone(2, rate), rate, codec)
    sound = read_sound(path)
    assert sound.shape == (2, measure_sound(path).samples)
    assert abs(sound.shape[1] - 64000) < 3200
    assert all(abs(pitch(channel[8000:56000]) - 440) < 1 for channel in sound)


def test_left_and_right_stay_apart(tmp_path):
    both = np.concatenate([tone(1, 44100, 1), tone(1, 44100, 1, hertz=660)])
    write_sound(tmp_path / "a.wav", both, 44100, "pcm_s16le")
    left, right = read_sound(tmp_path / "a.wav")
    assert abs(pitch(left) - 440) < 1.1 and abs(pitch(right) - 660) < 1.1


def test_the_beginning_alone(tmp_path):
    write_sound(tmp_path / "a.wav", tone(2), 48000, "pcm_s16le")
    whole = read_sound(tmp_path / "a.wav")
    assert np.array_equal(read_sound(tmp_path / "a.wav", 5000), whole[:, :5000])
    assert np.array_equal(read_sound(tmp_path / "a.wav", 10**9), whole)


def test_an_hour_of_8_kbit_is_refused_by_its_header(tmp_path):
    """A file of 3.6 MB that would be 900 MB of samples: nothing is decoded."""
    path = tmp_path / "hour.mp3"
    write_sound(path, np.zeros((1, 60 * 8000), np.float32), 8000, "libmp3lame", bit_rate=8000)
    minute = path.read_bytes()
    path.write_bytes(minute * 60)
    assert 3e6 < path.stat().st_size < 5e6
    code = (
        "import resource, sys, av, numpy, PIL.Image; from h3dist.media import read_sound; from h3dist.errors import *\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: read_sound(sys.argv[1])\n"
        "except RequestError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    told = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    message, grown = told.stdout.splitlines()
    assert "hour.mp3: lasts" in message and "at most 600 s are read" in message
    assert int(grown) < 20_000  # KiB


def test_less_than_one_latent_is_refused(tmp_path):
    write_sound(tmp_path / "a.wav", tone(0.02), 48000, "pcm_s16le")
    assert "640 samples at 32 kHz; at least 800" in refused(tmp_path / "a.wav")


def test_a_sound_that_lost_its_end(tmp_path):
    path = tmp_path / "a.m4a"
    write_sound(path, tone(2), 48000, "aac")
    path.write_bytes(path.read_bytes()[:-300])
    assert "not sound that can be read" in refused(path)


def test_what_holds_no_sound(tmp_path):
    from tests.mediafiles import write_film

    write_film(tmp_path / "f.mp4", [np.zeros((32, 64, 3), np.uint8)] * 5)
    assert "f.mp4: holds no sound; allowed are MP4" in refused(tmp_path / "f.mp4")
    (tmp_path / "a.wav").write_bytes(b"RIFF, they said, but it is a text" * 9)
    assert "a.wav: not sound that can be read" in refused(tmp_path / "a.wav")


def test_the_sound_of_a_film(tmp_path):
    from tests.mediafiles import write_film

    write_film(tmp_path / "f.mp4", [np.zeros((32, 64, 3), np.uint8)] * 5, sound=tone(1))
    assert abs(read_sound(tmp_path / "f.mp4").shape[1] - 32000) < 1000


def test_an_unknown_codec_is_named(tmp_path):
    path = tmp_path / "a.wav"
    write_sound(path, tone(1), 48000, "pcm_s16le")
    data = bytearray(path.read_bytes())
    data[20:22] = b"\x99\x77"  # the format's number
    path.write_bytes(data)
    assert "its audio is in a codec that this build of PyAV does not know" in refused(path)
