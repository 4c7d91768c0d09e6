"""Films and sound as files: exact lengths, real colours, sound in its place, nothing left on failure."""

import os
import resource
import subprocess
import wave
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from h3dist.errors import NumericsError, OutputError, RequestError
from h3dist.geometry import SAMPLES_PER_AUDIO_LATENT, audio_latents, audio_samples, legal_frames
from h3dist.media import cut_sound, probe, write_mp4, write_wav
from h3dist.media.boxes import read_layout
from h3dist.media.mp4 import _settle


def pictures(frames, size=32, seed=0):
    """Chunks as the VAE gives them: 17 frames each, the last with its tail of 5, as CPU tensors."""
    generator = torch.Generator().manual_seed(seed)
    left = frames
    while left:
        count = 17 if left > 22 else left
        yield torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)
        left -= count


def sound(frames, seed=0):
    """Uncut sound as the audio VAE gives it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, audio_latents(frames) * SAMPLES_PER_AUDIO_LATENT, generator=generator) * 0.1


def write(path, frames=22, *, chunks=None, audio="made", metadata=None, size=32):
    write_mp4(
        path,
        pictures(frames, size) if chunks is None else chunks,
        sound(frames) if isinstance(audio, str) else audio,
        width=size,
        height=size,
        frames=frames,
        metadata=metadata or {},
    )


def heard(path):
    """Every sample that a decoder gives, [2, n]."""
    import av

    with av.open(str(path)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)


def seen(path):
    import av

    with av.open(str(path)) as container:
        return list(container.decode(video=0))


@pytest.mark.parametrize("frames", legal_frames())
def test_every_legal_length_is_exact(tmp_path, frames):
    path = tmp_path / "film.mp4"
    write(path, frames)
    found = probe(path)
    assert found.frames == frames and found.fps == 24 and (found.width, found.height) == (32, 32)
    assert (found.audio_rate, found.audio_channels) == (32000, 2)
    assert found.audio_samples == frames * 4000 // 3
    assert found.timescale == 96000 and found.video_ticks == frames * 4000
    assert abs(found.audio_ticks - found.video_ticks) <= 2
    assert found.faststart


def test_times_are_uniform_from_zero(tmp_path):
    write(tmp_path / "film.mp4", 39)
    frames = seen(tmp_path / "film.mp4")
    assert [frame.pts * frame.time_base * 24 for frame in frames] == list(range(39))


def test_frames_keep_their_order_and_colours_are_converted_to_bt709(tmp_path):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)] * 4 + [(128, 64, 200)] * 2
    chunk = np.broadcast_to(np.array(colours, np.uint8)[:, None, None], (22, 32, 32, 3))
    path = tmp_path / "film.mp4"
    write(path, chunks=[chunk])
    for frame, rgb in zip(seen(path), colours, strict=True):
        assert frame.format.name == "yuv420p"
        assert (frame.color_range, frame.colorspace, frame.color_primaries, frame.color_trc) == (1, 1, 1, 1)
        r, g, b = (level / 255 for level in rgb)
        y = 0.2126 * r + 0.7152 * g + 0.0722 * b
        wanted = 16 + 219 * y, 128 + 224 * (b - y) / 1.8556, 128 + 224 * (r - y) / 1.5748
        planes = frame.to_ndarray()
        found = planes[:32].mean(), planes[32:40].mean(), planes[40:].mean()
        assert np.abs(np.subtract(found, wanted)).max() < 2.5, (rgb, found, wanted)


def test_an_impulse_at_the_first_sample_is_heard_at_the_first_sample(tmp_path):
    impulse = torch.zeros(2, 30000)
    impulse[0, 0] = impulse[1, 4321] = 0.9
    write(tmp_path / "film.mp4", audio=impulse)
    left, right = np.abs(heard(tmp_path / "film.mp4"))
    assert left.argmax() == 0 and left[0] > 0.3
    assert right.argmax() == 4321


def test_nothing_is_faded_in_or_out(tmp_path):
    t = torch.arange(29333) / 32000
    tone = torch.stack([torch.sin(2 * torch.pi * 440 * t), torch.sin(2 * torch.pi * 660 * t)]) * 0.5
    write(tmp_path / "film.mp4", audio=tone)
    error = heard(tmp_path / "film.mp4")[:, :29333] - tone.numpy()
    for part in (error[:, :320], error[:, 320:-320], error[:, -320:]):
        assert np.sqrt((part**2).mean()) < 0.02  # the tone's own is 0.35


def test_sound_is_cut_at_its_tail_alone():
    long, short = torch.arange(2 * 29600.0).view(2, -1), torch.arange(2 * 6400.0).view(2, -1)
    assert np.array_equal(cut_sound(long, 22), long[:, :29333])
    assert np.array_equal(cut_sound(short, 5)[:, :6400], short)  # 266 samples short, as the audio VAE gives it
    assert cut_sound(short, 5).shape == (2, 6666) and not cut_sound(short, 5)[:, 6400:].any()


@pytest.mark.parametrize(
    ("audio", "error"),
    [
        (torch.full((2, 30000), float("nan")), NumericsError),
        (torch.full((2, 30000), float("inf")), NumericsError),
        (torch.zeros(2, 28000), OutputError),
        (torch.zeros(1, 30000), OutputError),
        (torch.zeros(30000), OutputError),
    ],
)
def test_sound_that_cannot_be_written(tmp_path, audio, error):
    with pytest.raises(error, match=r"audio|sound"):
        write(tmp_path / "film.mp4", audio=audio)
    with pytest.raises(error):
        write_wav(tmp_path / "film.wav", audio, frames=22)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (list(pictures(5)), "22 frames were planned, 5 came"),
        (list(pictures(39)), "22 frames were planned, 39 or more came"),
        ([], "22 frames were planned, 0 came"),
        (list(pictures(22, size=64)), r"must be uint8 \(32, 32, 3\)"),
        ([torch.zeros(22, 32, 32, 3)], "must be uint8"),
    ],
)
def test_other_frames_than_planned(tmp_path, chunks, message):
    with pytest.raises(OutputError, match=message):
        write(tmp_path / "film.mp4", chunks=chunks)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [NumericsError("the video VAE gave NaN"), KeyboardInterrupt(), OSError("GPU")])
def test_what_the_decoder_raises_passes_and_leaves_no_file(tmp_path, error):
    def failing():
        yield torch.zeros(17, 32, 32, 3, dtype=torch.uint8)
        assert (tmp_path / "film.mp4").exists()
        raise error

    with pytest.raises(type(error)) as raised:
        write(tmp_path / "film.mp4", chunks=failing())
    assert raised.value is error
    assert not list(tmp_path.iterdir())


def test_chunks_are_not_kept(tmp_path):
    alive = []

    def counted():
        for index in range(5):
            assert sum(reference() is not None for reference in alive) <= 1
            chunk = np.full((22 if index == 4 else 17, 32, 32, 3), index, np.uint8)
            alive.append(weakref.ref(chunk))
            yield chunk
            del chunk

    write(tmp_path / "film.mp4", 90, chunks=counted())
    assert len(alive) == 5


def test_sound_lies_beside_its_picture_in_the_file(tmp_path):
    import av

    write(tmp_path / "film.mp4", 124)
    reached = {"video": 0.0, "audio": 0.0}
    with av.open(str(tmp_path / "film.mp4")) as container:
        packets = [packet for packet in container.demux() if packet.size]
        for packet in sorted(packets, key=lambda packet: packet.pos):
            reached[packet.stream.type] = float(packet.dts * packet.time_base)
            assert abs(reached["video"] - reached["audio"]) < 0.5


def test_two_writes_give_the_same_bytes(tmp_path):
    for name in ("a.mp4", "b.mp4"):
        write(tmp_path / name, 22, size=256)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    assert b" threads=4 " in (tmp_path / "a.mp4").read_bytes()  # x264 writes its settings into the stream


@pytest.mark.parametrize(
    "text",
    [
        'a "quote", it\'s; = # \\ %',
        "two\nlines\r\n\ttab",
        "猫が走る 😀 é",
        "  leading",
        "x" * 100_000,
        "<d>${oops}</d>",
    ],
)
def test_metadata_survives(tmp_path, text):
    write(tmp_path / "film.mp4", 5, audio=None, metadata={"title": text, "comment": f"seed 7: {text}"})
    found = probe(tmp_path / "film.mp4").metadata
    assert (found["title"], found["comment"]) == (text, f"seed 7: {text}")


def test_metadata_that_no_mp4_can_hold_is_replaced_not_cut(tmp_path):
    write(tmp_path / "film.mp4", 5, audio=None, metadata={"title": "a\0b \ud800 c"})
    assert probe(tmp_path / "film.mp4").metadata["title"] == "a\N{REPLACEMENT CHARACTER}b ? c"


@pytest.mark.parametrize(
    "name", ["a,b (1) #'é.mp4", "猫" * 83 + ".mp4", "x:y.mp4", "%03d.mp4", "film.part", "http:x", "-"]
)
def test_any_name_in_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(name, 5, audio=None)
    assert os.listdir() == [name] and probe(name).frames == 5


def test_a_silent_film_has_no_sound(tmp_path):
    write(tmp_path / "film.mp4", audio=None)
    found = probe(tmp_path / "film.mp4")
    assert (found.audio_rate, found.audio_channels, found.audio_samples, found.audio_ticks) == (None, 0, 0, 0)
    assert found.video_ticks == 22 * 4000


def test_wav_is_pcm16_stereo_of_the_whole_cut_length(tmp_path):
    audio = sound(22)
    audio[0, 0], audio[1, 1], audio[0, 2] = 1.0, -1.0, 0.5
    write_wav(tmp_path / "film.wav", audio, frames=22)
    with wave.open(str(tmp_path / "film.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, 32000)
        assert file.getnframes() == audio_samples(22)
        levels = np.frombuffer(file.readframes(30000), "<i2").reshape(-1, 2).T
    assert levels[0, 0] == 32767 and levels[1, 1] == -32767 and levels[0, 2] == 16384
    assert np.abs(levels / 32767 - audio[:, :29333].numpy()).max() <= 0.5 / 32767 + 1e-7


@contextmanager
def small_files(limit):
    """No file may grow beyond `limit` bytes: what a full disk does, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(path, kibibytes):
    """A real file system of that size, where this user may mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("limit", [0, 20_000, 100_000])
def test_a_file_that_cannot_grow_is_an_output_error(tmp_path, limit):
    with small_files(limit), pytest.raises(OutputError, match=r"cannot write .*film\.mp4: File too large"):
        write(tmp_path / "film.mp4", 39, size=64)
    with small_files(limit), pytest.raises(OutputError, match=r"cannot write .*film\.wav: File too large"):
        write_wav(tmp_path / "film.wav", sound(22), frames=22)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_output_error_wherever_it_fills_up(tmp_path):
    write(tmp_path / "whole.mp4", 39, size=64)
    size = (tmp_path / "whole.mp4").stat().st_size // 1024
    for kibibytes in (4, size // 2, size - 20, size - 4):
        disk = tmp_path / f"disk{kibibytes}"
        with small_disk(disk, kibibytes):
            with pytest.raises(OutputError, match="No space left on device"):
                write(disk / "film.mp4", 39, size=64)
            assert not list(disk.iterdir())


def test_a_file_that_lost_bytes_without_an_error_is_found(tmp_path):
    path = tmp_path / "film.mp4"
    write(path, 5)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(OutputError, match="not a whole MP4"):
        _settle(path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/film.mp4", "No such file"),
        ("猫" * 90 + ".mp4", "File name too long"),
        ("", "Is a directory"),
    ],
)
def test_a_place_that_cannot_be_written(tmp_path, name, reason):
    for attempt in (lambda path: write(path), lambda path: write_wav(path, sound(22), frames=22)):
        with pytest.raises(OutputError, match=reason):
            attempt(f"{tmp_path}/{name}")
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html>", b"version https://git-lfs", bytes(64)])
def test_what_is_no_film_is_refused(tmp_path, content):
    path = tmp_path / "film.mp4"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="cannot be read as an MP4"):
        probe(path)


def test_a_truncated_film_is_refused(tmp_path):
    path = tmp_path / "film.mp4"
    write(path)
    assert read_layout(path).kinds[:2] == ("ftyp", "moov")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RequestError, match="not a whole MP4"):
        probe(path)
