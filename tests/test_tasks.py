"""Tasks: what each takes, what is inferred, what is refused by name, and what the media themselves forbid."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import h3dist.request
from h3dist.config import compose
from h3dist.errors import OutputError, RequestError
from h3dist.intake import check_partition, read_request
from h3dist.job import make_job
from h3dist.request import gather_request, json_schema, parse_request, resolve
from tests.mediafiles import tone, write_film, write_sound

MEDIA = {
    "first_frame": "a.png",
    "last_frame": "b.png",
    "keyframes": [{"image": "c.png", "frame": 7}],
    "references": [{"image": "d.png"}],
}


def parsed(**fields):
    return parse_request({"prompt": "a fox", "seed": 1} | fields)


def refused(**fields):
    with pytest.raises(RequestError) as caught:
        resolve(parsed(**fields))
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "task"),
    [
        ([], "t2va"),
        (["first_frame"], "i2va"),
        (["last_frame"], "l2va"),
        (["first_frame", "last_frame"], "fl2va"),
        (["keyframes"], "fl2va"),
        (["first_frame", "keyframes"], "fl2va"),
        (["references"], "ref2va"),
    ],
    ids=str,
)
def test_the_task_follows_from_the_media(given, task):
    fields = {name: MEDIA[name] for name in given}
    assert resolve(parsed(**fields)).task == task
    said = resolve(parsed(**fields, task=task))
    assert said.task == task
    again = resolve(parse_request(said.as_request()))
    assert again == said and again.as_request() == said.as_request()
    assert {name: said.as_request()[name] for name in given} == fields


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"references": MEDIA["references"], "last_frame": "b.png"}, "last_frame does not belong to ref2va"),
        ({"task": "ref2va", "first_frame": "a.png"}, "first_frame does not belong to ref2va, which takes references"),
        ({"task": "i2va", "first_frame": "a", "last_frame": "b"}, "last_frame goes with l2va, fl2va"),
        ({"task": "i2va"}, "first_frame is missing: it must be a picture"),
        ({"task": "l2va", "first_frame": "a"}, "last_frame is missing"),
        ({"task": "t2va", "first_frame": "a"}, "first_frame does not belong to t2va, which takes no media"),
        ({"task": "fl2va"}, "fl2va needs first_frame, last_frame or keyframes"),
        ({"task": "ref2va"}, "references is missing"),
        ({"task": "i2v"}, 'task="i2v": must be one of t2va, i2va, l2va, fl2va, ref2va; did you mean'),
        ({"references": []}, "references=[]: must be a list"),
        ({"references": [{"audio": "a"}]}, "sound cannot be the only one"),
        ({"references": [{"audio": "a"}] * 4 + [{"image": "i"}]}, "4 audios, of 3 allowed"),
        ({"references": [{"image": "a"}] * 10}, "10 images, of 9 allowed"),
        ({"references": [{"video": "a"}] * 4}, "4 videos, of 3 allowed"),
        ({"references": [{"image": "a"}] * 9 + [{"video": "a"}] * 3 + [{"audio": "a"}]}, "13 in all, of 12 allowed"),
        ({"references": [{"picture": "a"}]}, 'references[0]={"picture": "a"}: references must be a list'),
        ({"references": ["a.png"]}, 'references[0]="a.png": references must be a list'),
        ({"references": [{"image": "a", "soundtrack": True}]}, "references[0]: 'soundtrack' does not belong there"),
        ({"references": [{"video": "a", "soundtrack": 1}]}, "references[0].soundtrack=1: must be true, false"),
        ({"references": [{"video": 5}]}, "references[0].video=5: must be a file's path, a data URI, or base64"),
        ({"references": {"image": "a"}}, "references="),
        ({"keyframes": [{"image": "a"}]}, "keyframes[0].frame is missing: it must be a whole number from 0"),
        ({"keyframes": [{"image": "a", "frame": -1}]}, "keyframes[0].frame=-1: must be a whole number from 0"),
        ({"keyframes": [{"image": "a", "frame": 1.0}]}, "keyframes[0].frame=1.0"),
        ({"keyframes": [{"image": "a", "video": "b", "frame": 1}]}, "'video' does not belong there"),
        ({"keyframes": [{"image": "a", "frame": 124}]}, "keyframes[0].frame=124: the clip has frames 0 to 123"),
        ({"keyframes": [{"image": "a", "frame": 5}, {"video": "a", "frame": 5}]}, "both stand at frame 5"),
        ({"first_frame": "a", "keyframes": [{"image": "a", "frame": 0}]}, "first_frame and keyframes[0] both stand"),
        ({"last_frame": "a", "keyframes": [{"image": "a", "frame": 123}]}, "keyframes[0] and last_frame both stand"),
        ({"first_frame": " "}, 'first_frame=" ": must be a picture'),
        ({"first_frame": 5}, "first_frame=5: must be a picture"),
        ({"first_frame": "https://x.org/a.png"}, "first_frame: 'https://x.org/a.png' is an address"),
        ({"references": [{"image": "s3://b/a.png"}]}, "references[0].image: 's3://b/a.png' is an address"),
        ({"first_frame": "a", "width": 512}, "width and height go together"),
        ({"firstframe": "a"}, "did you mean 'first_frame'"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_does_not_belong_is_refused_by_name(fields, said):
    assert said in refused(**fields)


@pytest.mark.parametrize(
    ("prompt", "counts", "said"),
    [
        ("as in <Picture 3>", 2, "the prompt names <Picture 3>, which the request does not have; it has 2 <Picture"),
        ("as in <Picture 0>", 2, "<Picture 0>"),
        ("<Audio 1> and <Video 2>", 2, "<Audio 1>, <Video 2>"),
        ("<Picture 1>", 0, "it has 0 <Picture"),
    ],
)
def test_a_prompt_that_names_what_is_not_there_is_refused(prompt, counts, said):
    fields = {"references": [{"image": "a"}] * counts} if counts else {}
    assert said in refused(prompt=prompt, **fields)


def test_references_that_go_unnamed_are_told():
    references = [{"image": "a"}, {"image": "b"}, {"video": "v", "soundtrack": True}, {"audio": "s"}]
    told = resolve(parsed(prompt="<Picture 2> does as <Video 1> with <Audio 2>", references=references), measured={})
    assert told.notes == ("the prompt does not name <Picture 1>, <Audio 1>",)
    every = "<Picture 1> <Picture 2> <Video 1> <Audio 1> <Audio 2>"
    assert resolve(parsed(prompt=every, references=references), measured={}).notes == ()
    near = resolve(parsed(prompt="<image 1> and <Video1>, <d>", first_frame="a"))
    assert near.notes == (
        "<image 1> in the prompt names nothing; the name would be <Picture 1>",
        "<Video1> in the prompt names nothing; the name would be <Video 1>",
    )


def test_keyframes_stand_in_the_order_of_their_frames():
    guides = [{"video": "g.mp4", "frame": 60}, {"image": "c.png", "frame": 7}]
    made = resolve(parsed(first_frame="a.png", last_frame="b.png", keyframes=guides, frames=121))
    found = [(item.source, item.frame, item.kind, item.fit, item.where) for item in made.keyframes]
    assert found == [
        ("a.png", 0, "image", "stretch", "first_frame"),
        ("c.png", 7, "image", "cover", "keyframes[1]"),
        ("g.mp4", 60, "film", "cover", "keyframes[0]"),
        ("b.png", 123, "image", "cover", "last_frame"),
    ]


def test_a_lone_last_frame_is_cropped_and_under_the_official_contract_stretched():
    lone, both = parsed(last_frame="b.png"), parsed(first_frame="a.png", last_frame="b.png")
    assert resolve(lone).keyframes[0].fit == "cover"
    assert resolve(lone, contract="official").keyframes[0].fit == "stretch"
    assert [item.fit for item in resolve(both, contract="official").keyframes] == ["stretch", "cover"]
    same = parsed(first_frame="a.png", last_frame="a.png")
    assert [item.fit for item in resolve(same, contract="official").keyframes] == ["stretch", "cover"]


def test_paths_are_relative_to_where_they_are_said(tmp_path, monkeypatch):
    folder = tmp_path / "requests"
    folder.mkdir()
    inline = base64.b64encode(b"x" * 120).decode()
    fields = {
        "references": [
            {"image": "a.png"},
            {"video": "../v.mp4", "soundtrack": "s.wav"},
            {"video": "/v.mp4", "soundtrack": True},
            {"image": "data:image/png;base64,AAAA"},
            {"image": inline},
        ]
    }
    (folder / "r.json").write_text(json.dumps(fields | {"prompt": "x"}))
    monkeypatch.chdir(tmp_path)
    found = gather_request({}, "requests/r.json")["references"]
    assert found[0] == {"image": str(folder / "a.png")}
    assert found[1] == {"video": str(folder / "../v.mp4"), "soundtrack": str(folder / "s.wav")}
    assert found[2:] == fields["references"][2:]
    assert gather_request({"first_frame": "a.png"})["first_frame"] == str(tmp_path / "a.png")
    assert gather_request({"first_frame": 5, "keyframes": "x"})["first_frame"] == 5


def test_a_path_may_look_like_anything(tmp_path):
    for name in ("data.png", "base64.png", "a,b=c;d.png", "你.png", "c:d.png"):
        request = tmp_path / "r.json"
        request.write_text(json.dumps({"prompt": "x", "first_frame": name}))
        assert parse_request(gather_request({}, str(request))).first_frame == str(tmp_path / name)


def test_bytes_and_paths_from_python():
    made = parse_request({"prompt": "x", "first_frame": b"abc", "last_frame": Path("a.png")})
    assert made.first_frame == "data:;base64,YWJj" and made.last_frame == "a.png"
    with pytest.raises(RequestError, match="JSON values only: set is none"):
        parse_request({"prompt": "x", "first_frame": {1}})


# The schema.


def test_the_schema_in_the_package_is_current():
    """Otherwise: h3dist tasks --json > h3dist/request/schema.json"""
    kept = Path(h3dist.request.__file__).with_name("schema.json").read_text()
    assert kept == json.dumps(json_schema(), indent=2) + "\n"


def test_the_schema_agrees_with_the_validator():
    schema = json_schema()
    names = [part["$ref"].rpartition("/")[2] for part in schema["anyOf"]]
    assert len(names) == 5 and {schema["$defs"][name]["properties"]["task"]["const"] for name in names} == {
        "t2va",
        "i2va",
        "l2va",
        "fl2va",
        "ref2va",
    }
    for name in names:
        assert schema["$defs"][name]["additionalProperties"] is False
    jsonschema = pytest.importorskip("jsonschema")
    for fields, good in [
        ({}, True),
        (MEDIA | {"references": None}, False),
        ({"first_frame": "a"}, True),
        ({"references": [{"video": "a", "soundtrack": "b"}]}, True),
        ({"references": [{"video": "a"}], "first_frame": "a"}, False),
        ({"task": "fl2va"}, False),
        ({"width": 33}, False),
    ]:
        valid = jsonschema.Draft202012Validator(schema).is_valid({"prompt": "x"} | fields)
        assert valid == good, fields


# The media themselves.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of media: pictures, films of several lengths, and a sound."""
    folder = tmp_path_factory.mktemp("media")
    Image.new("RGB", (160, 90), (9, 9, 9)).save(folder / "wide.png")
    Image.new("RGB", (90, 160), (9, 9, 9)).save(folder / "tall.png")
    Image.new("RGB", (500, 100), (9, 9, 9)).save(folder / "strip.png")
    Image.new("RGBA", (160, 90), (9, 9, 9, 9)).save(folder / "glass.png")
    for count in (4, 5, 30, 47, 48, 362, 363):
        pictures = [np.full((32, 64, 3), 99, np.uint8)] * count
        write_film(folder / f"f{count}.mp4", pictures, sound=tone(count / 24) if count in (48, 30) else None)
    write_sound(folder / "voice.wav", tone(20, 8000, 1), 8000, "pcm_s16le")
    (folder / "broken.png").write_bytes(b"hello")
    return folder


@pytest.fixture
def ask(files):
    """Read a request whose media are in `files`."""
    config = compose(["model.denoiser=/models/h3.safetensors"])

    def read(**fields):
        fields = h3dist.request.absolute_media(fields, files)
        return read_request(config, {"prompt": "a fox", "seed": 1} | fields)

    return read


@pytest.fixture
def denied(ask):
    def read(**fields):
        with pytest.raises(RequestError) as caught:
            ask(**fields)
        return str(caught.value)

    return read


@pytest.mark.parametrize(("name", "canvas"), [("wide.png", (1344, 768)), ("tall.png", (768, 1344))])
def test_the_canvas_takes_the_first_keyframes_aspect(ask, name, canvas):
    made = ask(first_frame=name)
    assert (made.width, made.height) == canvas
    assert f"canvas {canvas[0]} x {canvas[1]}, after first_frame of" in made.notes[0]
    assert ask(last_frame=name).width == canvas[0]
    assert ask(first_frame=name, last_frame="wide.png").width == canvas[0]
    both = ask(first_frame=name, width=512, height=320)
    assert (both.width, both.height) == (512, 320)
    assert ask(references=[{"image": name}]).width == 1344


def test_no_medium_is_replaced_by_an_output(files):
    config = compose(["model.denoiser=h3"])
    fields = {"prompt": "x", "references": [{"video": "f362.mp4", "soundtrack": "voice.wav"}]}
    fields = h3dist.request.absolute_media(fields, files)
    for name in ("f362.mp4", "voice.wav"):
        with pytest.raises(OutputError, match=f"reads .*{name}"):
            make_job(config, fields, {"path": str(files / name)})


def test_an_extreme_aspect_is_refused(denied):
    assert "500 x 100" in denied(first_frame="strip.png")
    assert denied(references=[{"image": "strip.png"}]).startswith("references[0]: a picture of 500 x 100")


def test_a_file_is_refused_with_the_field_that_names_it(denied, files):
    assert denied(first_frame="broken.png").startswith(f"first_frame: {files}/broken.png: not a picture")
    assert "keyframes[0].video: " in denied(keyframes=[{"video": "wide.png", "frame": 0}])
    assert "references[1].audio: " in denied(references=[{"image": "wide.png"}, {"audio": "f5.mp4"}])
    assert "references[0].soundtrack: " in denied(references=[{"video": "f48.mp4", "soundtrack": "no.wav"}])


def test_what_files_have_to_say_is_told(ask):
    assert any("laid on white" in note for note in ask(first_frame="glass.png").notes)


def test_reference_videos_last_2_to_15_seconds(ask, denied):
    assert ask(references=[{"video": "f48.mp4"}]).references[0].facts.frames == 48
    assert ask(references=[{"video": "f362.mp4"}], frames=362).notes[-1] == "the prompt does not name <Video 1>"
    assert "references[0]: a video of 1.96 s; 2 to 15 s are allowed, 48 to 362 frames" in denied(
        references=[{"video": "f47.mp4"}]
    )
    assert "a video of 15.12 s" in denied(references=[{"video": "f363.mp4"}])


def test_a_soundtrack_is_decided_by_what_the_film_has(ask, denied):
    assert ask(references=[{"video": "f48.mp4"}]).references[0].soundtrack is True
    assert ask(references=[{"video": "f48.mp4", "soundtrack": False}]).references[0].samples == 0
    silent = ask(references=[{"video": "f362.mp4"}])
    assert silent.references[0].soundtrack is False
    assert silent.as_request()["references"][0]["soundtrack"] is False
    assert "has no sound" in denied(references=[{"video": "f362.mp4", "soundtrack": True}])
    other = ask(references=[{"video": "f362.mp4", "soundtrack": "voice.wav"}], frames=362)
    assert other.references[0].samples == 20 * 32000 and other.references[0].heard
    assert ask(prompt="<Audio 1> <Video 1>", references=[{"video": "f48.mp4"}]).notes == ()
    assert "<Audio 1>" in denied(prompt="<Audio 1>", references=[{"video": "f48.mp4", "soundtrack": False}])


def test_what_is_longer_than_the_clip_is_cut_and_told(ask):
    notes = ask(references=[{"video": "f362.mp4"}, {"audio": "voice.wav"}]).notes
    assert "references[0]: of 362 frames the first 124 are used, the clip's length" in notes
    assert "references[1]: of 20.00 s of sound the first 5.17 s are used, the clip's length" in notes


def test_guides_have_17k_and_5_frames(ask, denied):
    guide = lambda name, frame=0: {"video": name, "frame": frame}  # noqa: E731
    assert ask(keyframes=[guide("f5.mp4")]).keyframes[0].facts.frames == 5
    assert "keyframes[0]: of 30 frames the first 22 are used (17k + 5)" in ask(keyframes=[guide("f30.mp4")]).notes
    assert "keyframes[0]: 4 frames at 24 a second; a film has at least 5" in denied(keyframes=[guide("f4.mp4")])
    assert ask(keyframes=[guide("f30.mp4", 102)])
    assert "22 frames from frame 103 on end at 124; the clip's last is 123" in denied(keyframes=[guide("f30.mp4", 103)])
    assert "both hold frame 4" in denied(keyframes=[guide("f5.mp4"), {"image": "wide.png", "frame": 4}])
    assert ask(keyframes=[guide("f5.mp4"), {"image": "wide.png", "frame": 5}])


@pytest.mark.parametrize(
    ("said", "name", "task", "message"),
    [
        ("auto", "minimax_h3_fl2va_pruned.safetensors", "ref2va", "task ref2va needs a ref2va denoiser"),
        ("auto", "H3_Ref2VA.safetensors", "i2va", "by its name H3_Ref2VA.safetensors, for ref2va"),
        ("auto", "H3_Ref2VA.safetensors", "t2va", "override with model.partition=fl2va"),
        ("ref2va", "minimax_h3_fl2va.safetensors", "fl2va", "by model.partition=ref2va"),
        ("auto", "minimax_h3_fl2va.safetensors", "l2va", None),
        ("ref2va", "minimax_h3_fl2va.safetensors", "ref2va", None),
        ("auto", "denoiser.safetensors", "ref2va", None),
        ("auto", "merged_fl2va_ref2va.safetensors", "ref2va", None),
    ],
)
def test_the_denoiser_must_be_of_the_tasks_partition(said, name, task, message):
    if message is None:
        check_partition(said, f"/ref2va/fl2va/{name}", task)
        return
    with pytest.raises(RequestError, match=message):
        check_partition(said, f"/models/{name}", task)
