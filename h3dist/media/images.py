"""Pictures as people have them, into RGB: upright by their EXIF, on white where they are transparent.

Colours are taken as they stand: a colour profile in the file is not applied, and CMYK is converted plainly.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from h3dist.errors import RequestError
from h3dist.media.source import Source, name_of, opened, plain_reading
from h3dist.request import MediaFacts

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
ALLOWED = "JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF"
MAX_PIXELS = 89_000_000
BACKGROUND = (255, 255, 255)  # behind what is transparent
ORIENTATION = 0x0112  # the EXIF tag; from 5 on the sides are swapped
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
NUMBERS = ("I", "F")  # 32 bits a pixel, of no known range


def measure_image(source: Source) -> MediaFacts:
    """Size and kind of a picture, from its header. Raises RequestError."""
    with _open(source) as image:
        width, height = image.size
        if image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8):
            width, height = height, width
        return MediaFacts("image", width, height, frames=1, notes=tuple(_notes(source, image)))


def read_image(source: Source) -> np.ndarray:
    """The pixels of a picture, uint8 [H, W, 3] RGB. Raises RequestError, for a damaged file too."""
    from PIL import ImageOps

    with _open(source) as image:
        image.seek(0)
        image.load()
        return np.array(_rgb(ImageOps.exif_transpose(image)))


@contextmanager
def _open(source: Source) -> Iterator["Image.Image"]:
    """The picture of a source, its header read and its size checked, its pixels not yet decoded."""
    from PIL import Image

    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    with opened(source) as file, plain_reading(source, "a picture", ALLOWED), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd metadata, and of sizes, which are checked here
        try:
            image = Image.open(file, formats=known)
        except Image.DecompressionBombError as error:
            pixels = re.search(r"\d+", str(error))
            raise RequestError(f"{name_of(source)}: {pixels[0] if pixels else 'too many'} pixels{_LIMIT}") from None
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise RequestError(f"{name_of(source)}: {width} x {height} = {width * height} pixels{_LIMIT}")
        if image.mode in NUMBERS:
            raise RequestError(f"{name_of(source)}: 32 bits a channel; a channel may have 1, 2, 4, 8 or 16")
        yield image


_LIMIT = f"; at most {MAX_PIXELS // 10**6} million are read"


def _notes(source: Source, image: "Image.Image") -> Iterator[str]:
    if image.has_transparency_data:
        yield f"{name_of(source)}: what is transparent is laid on white"
    if getattr(image, "is_animated", False) and image.format != "MPO":
        yield f"{name_of(source)}: of several frames or pages, the first is used"


def _rgb(image: "Image.Image") -> "Image.Image":
    """8 bits a channel, without transparency."""
    from PIL import Image

    if image.mode in SIXTEEN_BITS:
        levels = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    ground = Image.new("RGBA", image.size, (*BACKGROUND, 255))
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
