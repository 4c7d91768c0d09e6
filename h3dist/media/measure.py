"""What any medium holds, before it is decoded."""

from collections.abc import Callable

from h3dist.media.films import measure_film
from h3dist.media.images import measure_image
from h3dist.media.sounds import measure_sound
from h3dist.media.source import Source
from h3dist.request import MediaFacts

READERS: dict[str, Callable[[Source], MediaFacts]] = {
    "image": measure_image,
    "film": measure_film,
    "sound": measure_sound,
}


def measure(source: Source, kind: str) -> MediaFacts:
    """Size, frames and samples of an "image", a "film" or a "sound". Raises RequestError for what cannot be read."""
    return READERS[kind](source)
