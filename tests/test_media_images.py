"""Pictures as people have them: what comes out, and what is refused in which words."""

import base64
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from h3dist.errors import RequestError
from h3dist.media import measure_image, read_image
from tests.mediafiles import corner, marked


def saved(path, image, **options):
    image.save(path, **options)
    return str(path)


def refused(source):
    """The one message for a file, whether it is measured or read."""
    with pytest.raises(RequestError) as caught:
        _ = measure_image(source), read_image(source)
    return str(caught.value)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_phone_photo_stands_upright(orientation, tmp_path):
    """What the camera stored is turned so that red is at the top left, as it was in front of the lens."""
    way = Image.Transpose
    undone = [None, way.FLIP_LEFT_RIGHT, way.ROTATE_180, way.FLIP_TOP_BOTTOM]  # of orientations 1 to 4
    undone += [way.TRANSPOSE, way.ROTATE_90, way.TRANSVERSE, way.ROTATE_270]  # 6 is shown turned clockwise
    upright = Image.fromarray(marked())
    stored = upright if orientation == 1 else upright.transpose(undone[orientation - 1])
    exif = Image.Exif()
    exif[0x0112] = orientation
    source = saved(tmp_path / "photo.jpg", stored, exif=exif, quality=95)
    picture, facts = read_image(source), measure_image(source)
    assert picture.shape == (32, 64, 3) and (facts.width, facts.height) == (64, 32)
    assert corner(picture, "top", "left") == "red" and corner(picture, "bottom", "right") == "blue"


def test_transparency_is_laid_on_white(tmp_path):
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:2] = (200, 0, 0, 255)
    pixels[2:, :2] = (0, 0, 0, 0)
    pixels[2:, 2:] = (0, 0, 0, 51)
    source = saved(tmp_path / "a.png", Image.fromarray(pixels, "RGBA"))
    picture = read_image(source)
    assert picture[0, 0].tolist() == [200, 0, 0]
    assert picture[3, 0].tolist() == [255, 255, 255]
    assert picture[3, 3].tolist() == [204, 204, 204]
    assert "white" in measure_image(source).notes[0]


def test_a_transparent_palette_is_laid_on_white(tmp_path):
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    image.putpixel((7, 7), 0)
    source = saved(tmp_path / "p.png", image, transparency=0)
    picture = read_image(source)
    assert picture[0, 0].tolist() == [10, 200, 30]
    assert picture[7, 7].tolist() == [255, 255, 255]


def test_palette_grey_and_cmyk(tmp_path):
    red = Image.new("RGB", (16, 16), (250, 0, 0))
    assert read_image(saved(tmp_path / "p.gif", red.convert("P"))).shape == (16, 16, 3)
    grey = read_image(saved(tmp_path / "l.png", Image.new("L", (16, 16), 77)))
    assert np.unique(grey).tolist() == [77]
    bits = read_image(saved(tmp_path / "1.png", Image.new("1", (16, 16), 1)))
    assert np.unique(bits).tolist() == [255]
    cmyk = read_image(saved(tmp_path / "c.jpg", red.convert("CMYK"), quality=95))
    assert np.abs(cmyk.astype(int) - (250, 0, 0)).max() < 8


def test_sixteen_bits_are_scaled(tmp_path):
    ramp = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    for name in ("g.png", "g.tif"):
        picture = read_image(saved(tmp_path / name, Image.fromarray(ramp)))
        assert np.array_equal(picture, np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, 2))


def test_sixteen_bits_a_channel_in_colour(tmp_path):
    rows = b"".join(b"\0" + struct.pack(">HHH", 0x8000, 0x4000, 0xFFFF) * 4 for _ in range(4))
    header = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    path = tmp_path / "rgb16.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    assert read_image(path)[0, 0].tolist() == [128, 64, 255]


def test_pixels_of_no_known_range_are_refused(tmp_path):
    source = saved(tmp_path / "f.tif", Image.fromarray(np.full((4, 4), 0.5, np.float32)))
    assert "32 bits a channel; a channel may have 1, 2, 4, 8 or 16" in refused(source)


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.webp"])
def test_of_an_animation_the_first_frame_is_taken_and_said(name, tmp_path):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    source = saved(tmp_path / name, frames[0], save_all=True, append_images=frames[1:], duration=100, lossless=True)
    assert np.abs(read_image(source)[8, 8].astype(int) - (250, 0, 0)).max() < 8
    assert "first is used" in measure_image(source).notes[0]
    assert measure_image(saved(tmp_path / ("one" + name), frames[0])).notes == ()


def test_a_truncated_jpeg(tmp_path):
    path = tmp_path / "cut.jpg"
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
    Image.fromarray(noise).save(path, quality=90)
    path.write_bytes(path.read_bytes()[:9000])
    message = refused(path)
    assert "cut.jpg: not a picture that can be read (image file is truncated" in message
    assert "allowed are JPEG" in message


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "webp", "tiff", "bmp"])
def test_damage_anywhere_is_answered_with_one_line(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    noise = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    Image.fromarray(noise).save(path)
    whole, random, answers = path.read_bytes(), np.random.default_rng(1), []
    for _ in range(60):
        data = bytearray(whole[: random.integers(1, len(whole) + 1)])
        for place in random.integers(0, min(len(data), 200), 3):
            data[place] = random.integers(0, 256)
        try:
            facts = measure_image(bytes(data))
            assert read_image(bytes(data)).shape == (facts.height, facts.width, 3)
        except RequestError as error:
            answers.append(str(error))
    assert len(answers) > 10 and not any("\n" in answer for answer in answers)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("text.png", b"hello, I am a text\n" * 20, "text.png: not a picture that can be read; allowed are JPEG, PNG"),
        ("empty.png", b"", "empty.png: holds no bytes"),
        ("page.jpg", b"<!DOCTYPE html><html></html>", "not a picture"),
        ("a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
        ("head.png", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "not a picture"),
    ],
)
def test_what_is_no_picture(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert said in refused(tmp_path / name)


def test_what_is_no_file(tmp_path):
    assert "no.png: No such file" in refused(str(tmp_path / "no.png"))
    assert "a folder" in refused(str(tmp_path))
    assert "no plain file" in refused("/dev/zero")
    assert "embedded null" in refused("a\0b.png")


def test_one_pixel(tmp_path):
    picture = read_image(saved(tmp_path / "dot.png", Image.new("RGB", (1, 1), (1, 2, 3))))
    assert picture.tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize("size", [(20000, 20000), (9500, 9500)], ids=["400", "90"])
def test_a_bomb_is_refused_by_its_header(size, tmp_path):
    """A file of a few KB; a process that may hold 2 GB less than the pixels would take, decoded, still answers."""
    path = tmp_path / "bomb.png"
    Image.new("1", size).save(path, compress_level=1)
    code = (
        "import resource, sys, PIL.Image, av, numpy; from h3dist.media import read_image; from h3dist.errors import *\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: read_image(sys.argv[1])\n"
        "except RequestError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    told = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    message, grown = told.stdout.splitlines()
    assert f"{size[0] * size[1]}" in message and "at most 89 million" in message and told.stderr == ""
    assert int(grown) < 8_000  # KiB


def test_one_picture_by_every_way(tmp_path):
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (24, 40, 3), np.uint8))
    path = tmp_path / "a, (1) 猫.png"
    image.save(path)
    data = path.read_bytes()
    text = base64.b64encode(data).decode()
    wrapped = "\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    escaped = "data:image/png," + "".join(f"%{byte:02x}" for byte in data)
    ways = [path, str(path), data, text, wrapped, f"data:image/png;base64,{text}", escaped]
    for way in ways:
        assert np.array_equal(read_image(way), np.asarray(image))


def test_inline_data_is_named_by_its_size_not_by_itself():
    text = base64.b64encode(b"x" * 3000).decode()
    for source in (text, f"data:image/png;base64,{text}"):
        message = refused(source)
        assert "characters: not a picture" in message and len(message) < 200
    assert "no base64" in refused("data:image/png;base64,@@@")
    assert "data:TYPE;base64,DATA" in refused("data:image/png")
    assert "holds no bytes" in refused("data:image/png;base64,")


def test_a_file_above_the_limit_is_not_read(tmp_path):
    path = tmp_path / "big.png"
    with path.open("wb") as file:
        file.truncate((512 << 20) + 1)
    assert "512 MiB; at most 512 are read" in refused(path)
