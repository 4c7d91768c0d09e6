"""Films as people have them: 24 frames a second, upright, with the sound that plays beside them."""

from fractions import Fraction

import av
import numpy as np
import pytest

from h3dist.errors import RequestError
from h3dist.geometry import audio_samples
from h3dist.media import film_frames, film_sound, measure_film, read_film
from tests.mediafiles import PORTRAIT, corner, marked, pitch, tone, turn_film, write_film


def shades(count, size=(64, 32)):
    """Frames that can be told apart by their grey: 4 levels a frame."""
    return [np.full((size[1], size[0], 3), 20 + 4 * index, np.uint8) for index in range(count)]


def shown(film):
    """Which of `shades` each frame is."""
    return [round((float(frame.mean()) - 20) / 4) for frame in film.frames]


def refused(path, *longest):
    with pytest.raises(RequestError) as caught:
        _ = measure_film(path, *longest), read_film(path, *longest)
    return str(caught.value)


def read(path, **options):
    """A film whose measure is checked against what comes out."""
    facts, film = measure_film(path), read_film(path, **options)
    if not options:
        assert film.frames.shape == (facts.frames, facts.height, facts.width, 3)
        assert (0 if film.sound is None else film.sound.shape[1]) == facts.samples
    return film


@pytest.mark.parametrize("count", [1, 4, 5, 48])
def test_frames_at_24_a_second_come_out_as_they_are(count, tmp_path):
    write_film(tmp_path / "f.mp4", shades(count))
    film = read(tmp_path / "f.mp4")
    assert shown(film) == list(range(count)) and film.sound is None


@pytest.mark.parametrize("fps", [Fraction(30000, 1001), 12, 25, 60])
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_other_rates_are_resampled_to_the_nearest_place(fps, suffix, tmp_path):
    """Each frame is put at the nearest of 24 places a second; the last that falls to a place is held."""
    count = 50
    write_film(tmp_path / f"f.{suffix}", shades(count), fps=fps)
    places = [int(index * 24 / Fraction(fps) + Fraction(1, 2)) for index in range(count + 1)]
    wanted = [max(i for i in range(count) if places[i] <= place) for place in range(places[-1])]
    assert shown(read(tmp_path / f"f.{suffix}")) == wanted


def test_a_variable_rate(tmp_path):
    times = [0, 0.1, 0.2, 0.5, 0.54, 1.0]
    write_film(tmp_path / "f.mkv", shades(6), times=times, fps=24)
    places = [round(time * 24) for time in times]
    film = shown(read(tmp_path / "f.mkv"))
    assert film[: places[-1] + 1] == [max(i for i in range(6) if places[i] <= place) for place in range(places[-1] + 1)]
    assert 25 <= len(film) <= 26 and film[-1] == 5


@pytest.mark.parametrize(
    ("matrix", "size", "red", "blue"),
    [
        ((1, 0, 0, 1), (64, 32), ("top", "left"), ("bottom", "right")),
        (PORTRAIT, (32, 64), ("top", "right"), ("bottom", "left")),
        ((-1, 0, 0, -1), (64, 32), ("bottom", "right"), ("top", "left")),
        ((0, -1, 1, 0), (32, 64), ("bottom", "left"), ("top", "right")),
        ((-1, 0, 0, 1), (64, 32), ("top", "right"), ("bottom", "left")),
    ],
    ids=["none", "clockwise", "half", "anticlockwise", "mirrored"],
)
def test_a_turned_film_stands_upright(matrix, size, red, blue, tmp_path):
    path = tmp_path / "f.mp4"
    write_film(path, [marked(shade=60)] * 5)
    turn_film(path, matrix)
    film, facts = read(path), measure_film(path)
    assert (facts.width, facts.height) == size
    assert corner(film.frames[0], *red) == "red" and corner(film.frames[0], *blue) == "blue"


def test_a_film_turned_by_an_odd_angle_is_refused(tmp_path):
    write_film(tmp_path / "f.mp4", shades(5))
    turn_film(tmp_path / "f.mp4", (0.7071, 0.7071, -0.7071, 0.7071))
    assert "45 degrees; quarter turns are allowed" in refused(tmp_path / "f.mp4")


def test_odd_sizes_and_pixels_that_are_not_square(tmp_path):
    write_film(tmp_path / "odd.mkv", shades(5, (65, 33)), codec="ffv1", pix_fmt="bgr0")
    assert read(tmp_path / "odd.mkv").frames.shape == (5, 33, 65, 3)
    write_film(tmp_path / "wide.mp4", shades(5), aspect=Fraction(4, 3))
    assert read(tmp_path / "wide.mp4").frames.shape == (5, 32, 85, 3)


def test_colours(tmp_path):
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250), (128, 128, 128), (240, 240, 240)]
    pictures = [np.full((32, 64, 3), colour, np.uint8) for colour in colours]
    write_film(tmp_path / "f.mkv", pictures, codec="ffv1", pix_fmt="bgr0")
    assert np.array_equal(read(tmp_path / "f.mkv").frames, np.stack(pictures))


def test_sound_longer_than_the_picture_ends_with_it(tmp_path):
    write_film(tmp_path / "f.mp4", shades(24), sound=tone(3))
    film = read(tmp_path / "f.mp4")
    assert film.sound.shape == (2, audio_samples(24)) and film.sound.dtype == np.float32
    assert all(abs(pitch(channel) - 440) < 2 for channel in film.sound)
    assert 0.3 < np.sqrt((film.sound[:, 4000:] ** 2).mean()) < 0.4


def test_sound_shorter_than_the_picture_is_not_drawn_out(tmp_path):
    write_film(tmp_path / "f.mkv", shades(48), sound=tone(1), sound_codec="pcm_s16le")
    assert abs(read(tmp_path / "f.mkv").sound.shape[1] - 32000) <= 32


def test_sound_that_begins_later_keeps_its_place(tmp_path):
    write_film(tmp_path / "f.mkv", shades(48), sound=tone(1), sound_codec="pcm_s16le", lead=0.5)
    sound = read(tmp_path / "f.mkv").sound
    begins = int(np.abs(sound[0] > 0.05).argmax())
    assert abs(begins - 16000) < 100


def test_14_99_seconds_in_a_container_of_15_1(tmp_path):
    """The picture's own length counts, not the container's."""
    write_film(tmp_path / "f.mp4", shades(1) * 360, sound=tone(15.1))
    with av.open(str(tmp_path / "f.mp4")) as container:
        assert container.duration > 15.05e6
    assert measure_film(tmp_path / "f.mp4", 15.09).frames == 360


def test_the_first_frames_alone_and_each_fitted_as_it_comes(tmp_path):
    write_film(tmp_path / "f.mp4", shades(48), sound=tone(2))
    film = read(tmp_path / "f.mp4", frames=22, fit=lambda picture: picture[::2, ::2])
    assert film.frames.shape == (22, 16, 32, 3) and film.sound.shape == (2, audio_samples(48))
    assert sum(1 for _ in film_frames(tmp_path / "f.mp4")) == 48
    assert film_sound(tmp_path / "f.mp4").shape == (2, 64000)


def test_a_gif_is_a_film_too(tmp_path):
    from PIL import Image

    frames = [Image.fromarray(picture) for picture in shades(5)]
    frames[0].save(tmp_path / "f.gif", save_all=True, append_images=frames[1:], duration=1000)
    assert shown(read(tmp_path / "f.gif"))[::24] == list(range(5))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.mp4", b"", "holds no bytes"),
        ("a.mp4", b"just a text\n" * 99, "not a film that can be read (Invalid data"),
        ("a.txt", b"just a text\n" * 99, "not a film"),
        ("a.m3u8", b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", "not a film"),
        ("a.ffconcat", b"ffconcat version 1.0\nfile '/etc/passwd'\n", "not a film"),
    ],
)
def test_what_is_no_film(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name)
    assert said in message and name in message


def test_a_film_without_pictures(tmp_path):
    from tests.mediafiles import write_sound

    write_sound(tmp_path / "a.wav", tone(1), 48000, "pcm_s16le")
    assert "a.wav: holds no moving pictures; allowed are MP4" in refused(tmp_path / "a.wav")


def test_a_film_that_lost_its_end(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (96, 32, 64, 3), np.uint8)
    from h3dist.media import write_mp4

    write_mp4(tmp_path / "f.mp4", [noise], None, width=64, height=32, frames=96, metadata={})  # its index is in front
    data = (tmp_path / "f.mp4").read_bytes()
    (tmp_path / "f.mp4").write_bytes(data[: len(data) // 2])
    assert "f.mp4" in refused(tmp_path / "f.mp4")
    write_film(tmp_path / "g.mp4", shades(48))  # its index is at the end
    (tmp_path / "g.mp4").write_bytes((tmp_path / "g.mp4").read_bytes()[:-200])
    assert "not a film that can be read" in refused(tmp_path / "g.mp4")


def test_too_long_is_refused_by_the_header(tmp_path):
    write_film(tmp_path / "f.mp4", shades(1) * 60)
    assert "lasts 2.50 s or more; at most 2 s are read" in refused(tmp_path / "f.mp4", 2)


def test_too_many_pixels_are_refused_by_the_header(tmp_path):
    write_film(tmp_path / "f.mkv", [np.zeros((2400, 4096, 3), np.uint8)], codec="mpeg4")
    assert "frames of 4096 x 2400 pixels; at most 9437184 pixels are read" in refused(tmp_path / "f.mkv")


def test_bytes_are_read_as_a_file_is(tmp_path):
    write_film(tmp_path / "f.mp4", shades(5), sound=tone(1))
    film = read((tmp_path / "f.mp4").read_bytes())
    assert shown(film) == [0, 1, 2, 3, 4] and film.sound.shape == (2, audio_samples(5))


def test_high_dynamic_range_is_said(tmp_path):
    write_film(tmp_path / "f.mp4", shades(5))
    assert measure_film(tmp_path / "f.mp4").notes == ()
    with av.open(str(tmp_path / "h.mp4"), "w") as container:
        video = container.add_stream("libx264", rate=24)
        video.width, video.height, video.pix_fmt = 64, 32, "yuv420p10le"
        video.codec_context.color_trc = 18
        for picture in shades(5):
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, "rgb24").reformat(format="yuv420p10le")))
        container.mux(video.encode(None))
    assert "HLG high dynamic range" in measure_film(tmp_path / "h.mp4").notes[0]
    assert read(tmp_path / "h.mp4").frames.shape == (5, 32, 64, 3)
