"""Pictures, films and sound: out of files and into files."""

from h3dist.media.behind import write_behind
from h3dist.media.films import Film, film_frames, film_sound, measure_film, read_film
from h3dist.media.images import measure_image, read_image
from h3dist.media.lossless import write_film_lossless
from h3dist.media.measure import measure
from h3dist.media.mp4 import write_mp4
from h3dist.media.probe import Probe, probe
from h3dist.media.sound import cut_sound, write_wav
from h3dist.media.sounds import measure_sound, read_sound

__all__ = [
    "Film",
    "Probe",
    "cut_sound",
    "film_frames",
    "film_sound",
    "measure",
    "measure_film",
    "measure_image",
    "measure_sound",
    "probe",
    "read_film",
    "read_image",
    "read_sound",
    "write_behind",
    "write_film_lossless",
    "write_mp4",
    "write_wav",
]
