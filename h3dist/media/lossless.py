"""Frames and sound kept exactly, for films that are read again: RGB H.264 without loss, and float PCM."""

from fractions import Fraction
from pathlib import Path

import numpy as np

from h3dist.geometry import AUDIO_RATE, FPS
from h3dist.media.files import deleted_on_error, plain_errors

OPTIONS = {"crf": "0", "preset": "veryfast", "threads": "4"}


def write_film_lossless(path: str | Path, frames: np.ndarray, sound: np.ndarray | None) -> None:
    """Write uint8 [F, H, W, 3] at 24 a second and float32 [2, N] at 32 kHz into a MOV, which gives both back.

    Raises OutputError; no file is left where anything fails.
    """
    import av

    with deleted_on_error(path), plain_errors(path), av.open(str(Path(path).absolute()), "w", format="mov") as film:
        video = film.add_stream("libx264rgb", rate=FPS, options=OPTIONS)
        video.height, video.width = frames.shape[1:3]
        video.pix_fmt = "rgb24"
        audio = None if sound is None else film.add_stream("pcm_f32le", rate=AUDIO_RATE, layout="stereo")
        for index, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
            frame.pts, frame.time_base = index, Fraction(1, FPS)
            film.mux(video.encode(frame))
        film.mux(video.encode(None))
        if audio is not None and sound is not None:
            packed = np.ascontiguousarray(sound.T).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(packed, format="flt", layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = AUDIO_RATE, 0, Fraction(1, AUDIO_RATE)
            film.mux(audio.encode(frame))
            film.mux(audio.encode(None))
