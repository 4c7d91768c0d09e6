"""The one validator: what it refuses, in which words, and how the parts of a request merge."""

import json

import pytest

from h3dist.errors import RequestError
from h3dist.request import describe, gather_request, parse_request, read_prompt_file, resolve
from tests.prompts import PROMPTS


def refused(**fields):
    with pytest.raises(RequestError) as caught:
        resolve(parse_request({"prompt": "a fox"} | fields))
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        (1, 5),
        (4, 5),
        (5, 5),
        (22, 22),
        (121, 124),
        (122, 124),
        (123, 124),
        (124, 124),
        (125, 141),
        (361, 362),
        (362, 362),
    ],
)
def test_frames_are_snapped_up_and_both_numbers_said(asked, made):
    resolved = resolve(parse_request({"prompt": "a fox", "frames": asked, "seed": 1}))
    assert (resolved.frames_asked, resolved.frames) == (asked, made)
    said = [note for note in resolved.notes if str(asked) in note and str(made) in note]
    assert len(said) == (asked != made)


@pytest.mark.parametrize(
    ("frames", "nearest"),
    [(0, "5"), (-5, "5"), (363, "362"), ("124", "124"), (124.5, "124"), (124.0, "124"), ("380", "362")],
)
def test_other_frames_are_refused_naming_the_nearest(frames, nearest):
    message = refused(frames=frames)
    assert message.startswith(f"frames={json.dumps(frames)}: ")
    assert f"the nearest is {nearest}" in message


def test_a_side_that_is_no_multiple_is_refused_naming_two():
    assert "the nearest are 480 and 512" in refused(width=496)
    assert "the nearest are 1056 and 1088" in refused(height=1080)
    assert "the nearest is 32" in refused(width=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"mux_audio": "false"},
        {"mux_audio": 0},
        {"steps": float("inf")},
        {"steps": 0},
        {"steps": 201},
        {"steps": 12.0},
        {"seed": True},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": "7"},
        {"width": True},
        {"width": [512]},
        {"frames": None, "duration": True},
        {"duration": 0},
        {"duration": float("nan")},
        {"duration": "5"},
        {"task": "T2VA"},
        {"task": ["t2va"]},
        {"prompt": ""},
        {"prompt": " \n"},
        {"prompt": 5},
    ],
    ids=repr,
)
def test_wrong_types_and_ranges_are_refused(fields):
    field = list(fields)[-1]
    message = refused(**fields)
    assert message.startswith(f"{field}=")
    assert describe(field) in message


@pytest.mark.parametrize("field", ["upscale", "turbo", "cache_mode", "first_picture", "Prompt"])
def test_unknown_fields_are_refused(field):
    assert f"unknown request field {field!r}" in refused(**{field: True})


def test_an_unknown_field_names_the_nearest():
    assert "did you mean 'frames'" in refused(frame=5)
    assert "did you mean 'mux_audio'" in refused(muxaudio=True)


@pytest.mark.parametrize("field", ["negative_prompt", "guidance", "guidance_scale", "cfg"])
def test_guidance_is_refused_with_the_reason(field):
    assert "guidance-distilled" in refused(**{field: ""})


def test_every_problem_is_said_at_once():
    message = refused(width=496, steps=0, frame=1)
    assert all(part in message for part in ("width=496", "steps=0", "'frame'"))


def test_a_request_without_prompt():
    with pytest.raises(RequestError, match="prompt is missing"):
        parse_request({})


@pytest.mark.parametrize("number", [10**400, 1e308, 10**30])
@pytest.mark.parametrize("field", ["width", "height", "frames", "duration", "seed", "steps"])
def test_numbers_beyond_all_measure_are_refused_in_few_words(field, number):
    with pytest.raises(RequestError) as caught:
        resolve(parse_request({"prompt": "a fox", field: number}), allow_untrained=True)
    assert str(caught.value).startswith(f"{field}=") and len(str(caught.value)) < 200


def test_a_side_that_no_mp4_can_have_names_the_largest():
    assert "the nearest is 16384" in refused(width=16416)
    assert resolve(parse_request({"prompt": "a fox", "width": 16384, "height": 32})).width == 16384


def test_a_great_many_problems_are_counted():
    message = refused(**{f"field_{number}_{'x' * 500}": 1 for number in range(500)})
    assert message.endswith("and 490 more") and len(message) < 3000


def test_a_value_that_is_nested_too_deep_is_called_that():
    deep = json.loads("[" * 400 + "]" * 400)
    assert refused(seed=deep) == "a value in the request is nested too deep"


@pytest.mark.parametrize("number", ["9" * 3000, "\u0661"], ids=["3000 digits", "another script's digit"])
def test_a_name_that_no_medium_can_have_is_text(number):
    assert resolve(parse_request({"prompt": f"<Picture {number}> <picture {number}>", "seed": 1})).notes == ()


def test_a_prompt_has_at_most_7000_characters_unless_more_are_admitted():
    long = parse_request({"prompt": "雨" * 7001, "seed": 1})
    with pytest.raises(RequestError, match="prompt: 7001 characters; at most 7000 are read, and --allow-untrained"):
        resolve(long)
    assert resolve(long, allow_untrained=True).prompt == "雨" * 7001
    assert resolve(parse_request({"prompt": "雨" * 7000, "seed": 1})).prompt == "雨" * 7000


def test_a_prompt_with_a_nul_is_refused():
    assert (
        refused(prompt="a\0fox")
        == "prompt: holds a NUL character, which no text has; the file may be no text, or UTF-16"
    )


def test_text_that_is_not_unicode():
    assert "not valid Unicode" in refused(prompt="\udcff")


def test_steps_of_the_beta_schedule_end_at_138():
    assert resolve(parse_request({"prompt": "a fox", "steps": 138})).steps == 138
    assert "the nearest is 138" in refused(steps=139)
    assert resolve(parse_request({"prompt": "a fox", "steps": 200}), schedule="simple").steps == 200


def test_more_frames_where_allowed():
    request = parse_request({"prompt": "a fox", "frames": 363})
    assert resolve(request, allow_untrained=True).frames == 379


def test_duration():
    resolved = resolve(parse_request({"prompt": "a fox", "duration": 5}))
    assert (resolved.frames_asked, resolved.frames) == (120, 124)
    assert "the nearest is 362" in refused(duration=16)
    assert "give one of them" in refused(duration=5, frames=124)


def test_defaults():
    resolved = resolve(parse_request({"prompt": "a fox"}))
    assert (resolved.width, resolved.height, resolved.frames, resolved.steps) == (1344, 768, 124, 12)
    assert (resolved.task, resolved.mux_audio) == ("t2va", True)


def test_a_seed_is_drawn_once_and_said():
    first, second = (resolve(parse_request({"prompt": "a fox"})) for _ in range(2))
    assert first.seed != second.seed
    assert f"seed {first.seed} (drawn)" in first.notes
    again = resolve(parse_request(first.as_request()))
    assert again.seed == first.seed
    assert again.notes == ()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_passes_untouched(prompt):
    resolved = resolve(parse_request({"prompt": prompt}))
    assert resolved.prompt == prompt
    assert resolve(parse_request(resolved.as_request())).prompt == prompt


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_file_loses_one_newline_alone(prompt, tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(prompt.encode() + b"\n")
    assert read_prompt_file(str(path)) == prompt
    path.write_bytes(prompt.encode() + b"\r\n")
    assert read_prompt_file(str(path)) == prompt


def test_a_prompt_file_without_a_final_newline(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"a fox\n\n")
    assert read_prompt_file(str(path)) == "a fox\n"
    path.write_bytes(b"a fox ")
    assert read_prompt_file(str(path)) == "a fox "


def test_a_prompt_file_that_is_not_utf8(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(RequestError, match="not UTF-8"):
        read_prompt_file(str(path))


def test_later_parts_win(tmp_path):
    request, prompt = tmp_path / "r.json", tmp_path / "p.txt"
    request.write_text(json.dumps({"prompt": "file", "width": 64, "seed": 1, "steps": None}))
    prompt.write_text("prompt file\n")
    overrides = {"seed": 3, "width": None, "mux_audio": False, "file": None}
    gathered = gather_request(overrides, str(request), str(prompt))
    assert gathered == {"prompt": "prompt file", "width": 64, "seed": 3, "mux_audio": False}
    assert gather_request(overrides, str(request))["prompt"] == "file"
    assert gather_request(overrides | {"prompt": "override"}, None, str(prompt))["prompt"] == "override"
    assert gather_request(overrides, prompt="typed")["prompt"] == "typed"


def test_files_can_be_named_by_the_configuration(tmp_path):
    request = tmp_path / "r.json"
    request.write_text('{"prompt": "file", "seed": 1}')
    assert gather_request({"file": str(request)}) == {"prompt": "file", "seed": 1}
    with pytest.raises(RequestError, match="named twice"):
        gather_request({"file": str(request)}, str(request))


def test_a_later_length_replaces_an_earlier_one(tmp_path):
    request = tmp_path / "r.json"
    request.write_text('{"prompt": "x", "frames": 124}')
    assert gather_request({"duration": 2}, str(request)) == {"prompt": "x", "duration": 2}


def test_a_sidecar_is_a_request_file(tmp_path):
    sidecar = tmp_path / "out.json"
    made = resolve(parse_request({"prompt": "${oops} ???", "seed": 5}))
    sidecar.write_text(json.dumps({"request": made.as_request(), "plan": {"world": 2}, "seconds": {}}))
    assert resolve(parse_request(gather_request({}, str(sidecar)))) == made


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "one JSON object"),
        ('{"seed": 1, "seed": 2}', "'seed' stands twice"),
        ("[" * 100_000, "not JSON"),
        ('{"request": {"prompt": "x"}, "frames": 5}', 'frames must stand inside "request"'),
    ],
    ids=["empty", "cut off", "a list", "a field twice", "deep", "a field beside the request"],
)
def test_request_files_that_are_refused(text, why, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=why):
        gather_request({}, str(path))


def test_a_null_does_not_hide_an_unknown_field(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"prompt": "x", "negative_prompt": null, "seed": null}')
    with pytest.raises(RequestError, match="guidance-distilled"):
        parse_request(gather_request({}, str(path)))


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(RequestError, match=r"no\.json: No such file"):
        gather_request({}, str(tmp_path / "no.json"))
    with pytest.raises(RequestError, match="Is a directory"):
        gather_request({}, None, str(tmp_path))


def test_numbers_beyond_json(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"prompt": "x", "steps": 1e999}')
    with pytest.raises(RequestError, match="steps="):
        parse_request(gather_request({}, str(path)))
