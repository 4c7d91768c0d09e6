"""Media files as people have them, written by Pillow and PyAV."""

from fractions import Fraction

import av
import numpy as np

PORTRAIT = (0, 1, -1, 0)  # the matrix of a phone held upright: (x, y) -> (-y, x), a turn clockwise


def marked(width=64, height=32, shade=0):
    """Grey, with a red block at the top left and a blue one at the bottom right: every turn and flip shows."""
    picture = np.full((height, width, 3), shade, np.uint8)
    picture[: height // 2, : width // 4] = (250, 0, 0)
    picture[height // 2 :, -(width // 4) :] = (0, 0, 250)
    return picture


def corner(picture, vertical, horizontal):
    """The colour well inside a corner: "red", "blue" or "grey"."""
    height, width = picture.shape[:2]
    row = height // 8 if vertical == "top" else height - 1 - height // 8
    column = width // 8 if horizontal == "left" else width - 1 - width // 8
    red, _, blue = (int(value) for value in picture[row, column])
    return "red" if red > blue + 60 else "blue" if blue > red + 60 else "grey"


def tone(seconds, rate=48000, channels=2, hertz=440.0):
    """A tone [channels, n] of amplitude a half."""
    wave = 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    return np.tile(wave.astype(np.float32), (channels, 1))


def pitch(samples, rate=32000):
    """The loudest frequency of one channel, in hertz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.fft.rfftfreq(len(samples), 1 / rate)[spectrum.argmax()])


def write_film(
    path,
    pictures,
    times=None,
    *,
    fps=24,
    codec="libx264",
    pix_fmt="yuv420p",
    sound=None,
    rate=48000,
    sound_codec="aac",
    lead=0.0,
    aspect=None,
):
    """Frames at `times` in seconds, 1/fps apart by default, and `sound` [2, n] that begins at `lead` seconds."""
    pictures = list(pictures)
    fps = Fraction(fps)
    times = [index / fps for index in range(len(pictures))] if times is None else [Fraction(t) for t in times]
    tick = 1 / fps if times == [index / fps for index in range(len(pictures))] else Fraction(1, 90000)
    with av.open(str(path), "w") as container:
        video = container.add_stream(codec, rate=fps)
        video.height, video.width = pictures[0].shape[:2]
        video.pix_fmt = pix_fmt
        video.codec_context.time_base = tick
        if codec == "libx264":
            video.options = {"preset": "ultrafast", "crf": "4"}
        if aspect:
            video.codec_context.sample_aspect_ratio = aspect
        audio = None if sound is None else container.add_stream(sound_codec, rate=rate, layout="stereo")
        for picture, time in zip(pictures, times, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24").reformat(format=pix_fmt)
            frame.pts, frame.time_base = round(time / tick), tick
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None:
            add_sound(container, audio, sound, rate, round(lead * rate))


def write_sound(path, sound, rate, codec, layout=None, bit_rate=None, sample_format=None):
    """A sound file of [channels, n]."""
    layout = layout or {1: "mono", 2: "stereo", 6: "5.1"}[len(sound)]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        if bit_rate:
            stream.bit_rate = bit_rate
        if sample_format:
            stream.format = sample_format
        add_sound(container, stream, sound, rate, 0, layout)


def add_sound(container, stream, sound, rate, start, layout="stereo"):
    resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate)
    for place in range(0, sound.shape[1], 1 << 20):
        part = np.ascontiguousarray(sound[:, place : place + (1 << 20)])
        frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, start + place, Fraction(1, rate)
        for ready in resampler.resample(frame):
            container.mux(stream.encode(ready))
    for ready in resampler.resample(None):
        container.mux(stream.encode(ready))
    container.mux(stream.encode(None))


def turn_film(path, matrix):
    """Set the display matrix (a, b, c, d) of an MP4's first track, as a camera writes it."""
    data = bytearray(path.read_bytes())
    place = data.find(b"tkhd") + 4 + 4 + 20 + 8 + 8
    a, b, c, d = (value & 0xFFFFFFFF for value in (int(v * 65536) for v in matrix))
    numbers = (a, b, 0, c, d, 0, 0, 0, 1 << 30)
    data[place : place + 36] = b"".join(number.to_bytes(4, "big") for number in numbers)
    path.write_bytes(data)
