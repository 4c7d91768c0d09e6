"""Names of output files and the checks before work."""

import os
from types import SimpleNamespace

import pytest

from h3dist.errors import OutputError
from h3dist.geometry import Geometry
from h3dist.outputs import Outputs, bytes_needed, check_outputs, choose_outputs

SMALL = Geometry(64, 32, 5)


def chosen(path, **options):
    outputs = choose_outputs(str(path), **options)
    check_outputs(outputs, SMALL, 4)
    return outputs


def publish_all(outputs):
    """Write every file under its temporary name and rename it, as a run does."""
    for role in outputs.targets():
        with open(outputs.parts[role], "x") as file:
            file.write(role)
        outputs.publish(role)


NAMES = [
    "a,b.mp4",
    "a=b.mp4",
    "(1)",
    "#",
    "'",
    "é",
    "null",
    "123",
    "雨" * 83 + ".mp4",
    "é" * 127,
    "x" * 251 + ".mp4",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_that_the_file_system_takes_works(tmp_path, name):
    outputs = chosen(tmp_path / name, mux_audio=False, trace=str(tmp_path / "trace"))
    publish_all(outputs)
    written = {entry.name for entry in tmp_path.iterdir()}
    assert written == {os.path.basename(path) for path in outputs.targets().values()}
    assert len(written) == 5 and name in written
    assert (tmp_path / name).read_text() == "path"


def test_companions_of_long_names_are_cut_at_a_character_and_differ(tmp_path):
    long = [chosen(tmp_path / ("雨" * 82 + last + ".mp4")) for last in "雲雪"]
    sidecars = [os.path.basename(outputs.sidecar) for outputs in long]
    rescues = [os.path.basename(outputs.rescue) for outputs in long]
    assert sidecars == ["雨" * 82 + "雲.json", "雨" * 82 + "雪.json"]  # 254 bytes
    assert rescues[0] != rescues[1]
    assert all(rescue.startswith("雨" * 70) and rescue.endswith(".latents.safetensors") for rescue in rescues)
    assert all(len(os.fsencode(name)) <= 255 for name in rescues)


def test_only_the_ending_mp4_is_taken_off(tmp_path):
    assert chosen(tmp_path / "clip.v2.MP4").sidecar == str(tmp_path / "clip.v2.json")
    assert chosen(tmp_path / "clip.v2").sidecar == str(tmp_path / "clip.v2.json")
    assert chosen(tmp_path / ".mp4").sidecar == str(tmp_path / ".mp4.json")


def test_relative_paths_count_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert chosen("x.mp4", latents="l.safetensors").latents == str(tmp_path / "l.safetensors")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("x" * 252 + ".mp4", "256 bytes, the file system at most 255"),
        ("雨" * 84 + ".mp4", "256 bytes"),
        ("absent/x.mp4", "there is no folder"),
        ("folder", "it is a folder"),
        ("folder/", "names a folder"),
        ("pipe", "no plain file"),
        ("file/x.mp4", "there is no folder"),
        ("", "no file name"),
        ("a\0b", "no file name"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, name, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match=named):
        chosen(name)
    assert len(list(tmp_path.iterdir())) == 3


def test_every_output_is_checked(tmp_path):
    for role in ("latents", "intermediates", "trace"):
        with pytest.raises(OutputError, match="there is no folder"):
            chosen(tmp_path / "x.mp4", **{role: str(tmp_path / "absent" / "l")})
        with pytest.raises(OutputError, match="named for two outputs"):
            chosen(tmp_path / "x.mp4", **{role: str(tmp_path / "x.json")})


def test_a_folder_that_takes_no_files(tmp_path):
    with pytest.raises(OutputError, match=r"cannot write /proc/x\.mp4"):
        chosen("/proc/x.mp4")
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(OutputError, match="Permission denied"):
            chosen(tmp_path / "x.mp4")


def test_no_clobber_refuses_before_work_and_at_the_end(tmp_path):
    publish_all(chosen(tmp_path / "x.mp4", clobber=False))
    with pytest.raises(OutputError, match=r"exists, and --no-clobber"):
        chosen(tmp_path / "x.mp4", clobber=False)
    publish_all(chosen(tmp_path / "x.mp4"))
    late = chosen(tmp_path / "y.mp4", clobber=False)
    (tmp_path / "y.mp4").write_text("somebody else's")
    with pytest.raises(OutputError, match="exists"):
        publish_all(late)
    assert (tmp_path / "y.mp4").read_text() == "somebody else's"
    late.discard()
    assert list(tmp_path.glob(".h3dist-*")) == []


def test_two_runs_never_share_a_temporary_name(tmp_path):
    first, second = (set(chosen(tmp_path / "x.mp4").parts.values()) for _ in range(2))
    assert not first & second


def test_a_full_disk_is_refused_naming_both_figures(tmp_path, monkeypatch):
    outputs = choose_outputs(str(tmp_path / "x.mp4"), intermediates=str(tmp_path / "i"))
    large = Geometry(1344, 768, 124)
    needed = sum(bytes_needed(large, 12)[role] for role in outputs.targets())
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=needed, f_frsize=1))
    check_outputs(outputs, large, 12)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=needed - 1, f_frsize=1))
    with pytest.raises(OutputError, match=r"MB free; this run writes about 4\d\d MB"):
        check_outputs(outputs, large, 12)


def test_bytes_of_latents_are_exact():
    sizes = bytes_needed(Geometry(1344, 768, 124), 12)
    assert sizes["latents"] == 4 * (24 * 37 * 48 * 84 + 32 * 2 * 207)
    assert sizes["trace"] == 13 * sizes["latents"]


def test_outputs_travel_as_json_values(tmp_path):
    outputs = chosen(tmp_path / "x.mp4")
    assert Outputs(**outputs.as_dict()) == outputs
