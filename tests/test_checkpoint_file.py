"""Safetensors files: what is refused before a tensor is read, and reads that ask for no byte too many."""

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from safefiles import raw, write
from safetensors.torch import save_file

from h3dist.checkpoint.file import TensorFile
from h3dist.checkpoint.slices import Slice, merge
from h3dist.errors import CheckpointError


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    floats = torch.arange(7 * 6, dtype=torch.float32).view(7, 6)
    tensors = {
        "f32": floats,
        "bf16": floats.bfloat16(),
        "f16": floats.half(),
        "i8": floats.to(torch.int8),
        "u8": floats.to(torch.uint8),
        "i64": floats.long(),
        "f8": floats.to(torch.float8_e4m3fn),
        "bool": floats > 20,
        "scalar": torch.tensor(3.5),
        "cube": torch.randn(5, 2, 3),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path_factory.mktemp("file") / "sample.safetensors"
    save_file(tensors, path, metadata={"made": "here"})
    return path, tensors


def same(found: torch.Tensor, due: torch.Tensor) -> bool:
    return found.dtype == due.dtype and found.shape == due.shape and torch.equal(found.float(), due.float())


def test_whole_tensors_are_read_as_they_are(sample):
    path, tensors = sample
    file = TensorFile.open(path)
    assert file.tensors.keys() == tensors.keys()
    assert file.metadata == {"made": "here"}
    for name, due in tensors.items():
        before = file.bytes_read
        assert same(file.read(name), due), name
        assert file.bytes_read - before == due.nbytes == file.tensors[name].nbytes


@pytest.mark.parametrize("rows", [((0, 7),), ((2, 5),), ((4, 6), (0, 2), (2, 3)), ((1, 1), (6, 7)), ()])
@pytest.mark.parametrize("cols", [None, (0, 6), (1, 4), (3, 3)])
@pytest.mark.parametrize("name", ["f32", "bf16", "i8", "f8"])
def test_rows_and_columns(sample, name, rows, cols):
    path, tensors = sample
    file = TensorFile.open(path)
    due = torch.cat([tensors[name].float()[:0], *(tensors[name].float()[a:b] for a, b in rows)])
    due = due if cols is None else due[:, cols[0] : cols[1]]
    found = file.read(name, rows=rows, cols=cols)
    assert torch.equal(found.float(), due)
    assert file.bytes_read == found.nbytes == due.numel() * tensors[name].element_size()


def test_rows_of_a_cube(sample):
    path, tensors = sample
    assert torch.equal(TensorFile.open(path).read("cube", rows=((3, 5), (0, 1))), tensors["cube"][[3, 4, 0]])


def test_neighbouring_ranges_are_one_read(sample, monkeypatch):
    file, calls = TensorFile.open(sample[0]), []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append(args) or real(*args))
    file.read("f32", rows=((0, 2), (2, 3), (3, 5), (6, 7)))
    assert len(calls) == 2


def test_short_reads_are_continued(sample, monkeypatch):
    path, tensors = sample
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:7]], offset))
    assert torch.equal(TensorFile.open(path).read("f32"), tensors["f32"])


def test_a_read_is_memory_of_its_own(sample):
    file = TensorFile.open(sample[0])
    file.read("f32", cols=(1, 4)).zero_()
    file.read("f32").zero_()
    assert same(file.read("f32"), sample[1]["f32"])


def test_a_file_that_shrinks_is_noticed(tmp_path):
    path = tmp_path / "shrinks.safetensors"
    save_file({"x": torch.zeros(100)}, path)
    file = TensorFile.open(path)
    os.truncate(path, 200)
    with pytest.raises(CheckpointError, match="ended early while reading x"):
        file.read("x")


def test_files_are_closed_with_their_last_user(sample):
    before = len(os.listdir("/proc/self/fd"))
    files = [TensorFile.open(sample[0]) for _ in range(20)]
    files[0].read("f32", cols=(1, 2))
    assert len(os.listdir("/proc/self/fd")) >= before + 20
    del files
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_hash_is_of_header_and_size(tmp_path):
    def hash_of(name, **tensors):
        save_file(tensors, tmp_path / name)
        return TensorFile.open(tmp_path / name).header_hash

    first = hash_of("a", x=torch.zeros(4))
    assert first == hash_of("b", x=torch.ones(4))
    assert first != hash_of("c", x=torch.zeros(5))
    assert len(first) == 64


def test_a_header_as_long_as_a_brace_is_no_json_file(tmp_path):
    """The first byte of the length is that of "{" where the header has 123 + 256 n bytes."""
    bare = len(json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}))
    path = write(tmp_path / "brace.safetensors", {"x": ("F32", [1], bytes(4))}, pad=(123 - bare) % 256)
    assert path.read_bytes()[0] == ord("{")
    assert TensorFile.open(path).read("x").item() == 0


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def header(**entries: object) -> bytes:
    return json.dumps(entries).encode()


IMPOSTORS = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "LFS pointer"),
    "html": (b"<!DOCTYPE html>\n<html><body>Please log in</body></html>", "HTML page"),
    "html after blanks": (b"\n\n  <html><head></head></html>", "HTML page"),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML page"),
    "json": (b'{"error": "not found", "status": 404, "more": "text to be long"}', "JSON text"),
    "zip": (b"PK\x03\x04" + bytes(100), "PyTorch archive"),
    "pickle": (b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01u." + bytes(40), "pickle"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, "GGUF"),
    "nothing": (b"", "empty"),
    "one byte": (b"x", "does not begin with a header"),
    "noise": (bytes(range(1, 100)), "does not begin with a header"),
}


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_what_is_no_safetensors_file_is_named(tmp_path, kind):
    data, words = IMPOSTORS[kind]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        TensorFile.open(tmp_path / "model.safetensors")


HEADERS = {
    "cut json": (b'{"x": {"dtype": "F32", ', bytes(8), "no JSON"),
    "not utf-8": (b'{"\xff\xfe": 1}', bytes(8), "no JSON"),
    "deep json": (b'{"a":' * 100_000, b"", "no JSON"),
    "twice": (b'{"x": %b, "x": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8), "'x' is there twice"),
    "a list": (header(x=[1, 2]), bytes(8), "malformed"),
    "no shape": (header(x={"dtype": "F32", "data_offsets": [0, 8]}), bytes(8), "malformed"),
    "three offsets": (header(x=entry(data_offsets=[0, 4, 8])), bytes(8), "malformed"),
    "unknown dtype": (header(x=entry(dtype="F4")), bytes(8), "unknown dtype 'F4'"),
    "dtype in a list": (header(x=entry(dtype=["F32"])), bytes(8), "unknown dtype"),
    "negative": (header(x=entry(shape=[-2])), bytes(8), "illegal shape"),
    "a fraction": (header(x=entry(shape=[2.0])), bytes(8), "illegal shape"),
    "true": (header(x=entry(shape=[True, 2])), bytes(8), "illegal shape"),
    "wrong size": (header(x=entry(shape=[3])), bytes(8), r"= 12 bytes, but its offsets hold 8"),
    "truncated": (header(x=entry()), bytes(7), "truncated"),
    "padded": (header(x=entry()), bytes(9), "1 bytes after its last tensor"),
    "overlap": (header(x=entry(), y=entry(data_offsets=[4, 12])), bytes(12), "'y' overlaps 'x'"),
    "hole": (header(x=entry(), y=entry(data_offsets=[12, 20])), bytes(20), "4 bytes before 'y'"),
    "metadata": (header(__metadata__={"a": 1}, x=entry()), bytes(8), "no map of strings"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_faulty_header_is_refused(tmp_path, kind):
    head, body, words = HEADERS[kind]
    with pytest.raises(CheckpointError, match=words):
        TensorFile.open(raw(tmp_path / "model.safetensors", head, body))


def test_a_file_that_ends_within_its_header(tmp_path):
    path = raw(tmp_path / "model.safetensors", header(x=entry()), bytes(8))
    os.truncate(path, 30)
    with pytest.raises(CheckpointError, match="truncated: its header alone"):
        TensorFile.open(path)


def test_what_is_no_file_at_all(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in [
        (tmp_path, "a folder"),
        (tmp_path / "pipe", "no regular file"),
        (tmp_path / "no", "no such"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            TensorFile.open(path)


def test_merging_keeps_the_order():
    assert merge([(4, 6), (6, 6), (6, 9), (0, 2), (2, 3), (2, 3)]) == ((4, 9), (0, 3), (2, 3))
    assert Slice(rows=((4, 6), (6, 9)), cols=(2, 5)).shape((10, 8)) == (5, 3)
    assert Slice().shape((10, 8)) == (10, 8)
