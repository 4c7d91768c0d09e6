"""Ways out where memory does not do: computed from the request, each with its need, and legal as it stands."""

import re
from copy import deepcopy
from dataclasses import replace

import pytest

from h3dist.config import compose
from h3dist.errors import PlanError
from h3dist.intake import check_keyframes, check_references
from h3dist.material import conditions_of
from h3dist.plan import Layout, check_memory
from h3dist.plan.fit import GIB
from h3dist.plan.plan import relayout
from h3dist.preflight import facts_ahead, plan_on, read_aloud
from h3dist.relief import cuts
from h3dist.request import MediaFacts, parse_request, resolve

ONE = Layout()
CONFIG = compose(["model.denoiser=/models/h3.safetensors"])
FACTS = {
    "photo": MediaFacts("image", 1344, 768, 1),
    "film": MediaFacts("film", 1344, 768, 200, 200 * 32000 // 24),
    "voice": MediaFacts("sound", samples=32000 * 4),
}
SOURCES = {
    (kind, name): facts for name, facts in FACTS.items() for kind in ("image", "film", "sound") if facts.kind == kind
}


def resolved_of(**fields):
    return resolve(parse_request({"prompt": "A boat", "seed": 1} | fields), measured=SOURCES)


def plan_of(resolved, layout=ONE):
    facts = facts_ahead(CONFIG, read_aloud(CONFIG, resolved))
    return plan_on(CONFIG, resolved, facts, layout, device="cuda", capability=(9, 0)), facts


def told(resolved, free, layout=ONE):
    """The refusal, and the ways out that it names: words and GiB."""
    plan, facts = plan_of(resolved, layout)
    with pytest.raises(PlanError) as caught:
        check_memory(plan, [int(free * GIB)] * layout.world, cuts(resolved, "comfy", facts.text_rows))
    ways = re.findall(r"(?:the nearest that fits is|what fits is|or) ([^;]+), ([\d.]+) GiB(?=;|$)", str(caught.value))
    return str(caught.value), [(words, float(need)) for words, need in ways]


def changed(resolved, words):
    """The request with what a way out says done to it, as a user would."""
    fields = deepcopy(resolved.as_request())
    films = dict(SOURCES)
    for name, value in re.findall(r"request\.(\w+)=(\d+)", words):
        fields[name] = int(value)
    for field, place in sorted(re.findall(r"(references|keyframes)\[(\d+)\](?! cut)", words), reverse=True):
        del fields[field][int(place)]
        fields = {name: value for name, value in fields.items() if value != []}
    for name in re.findall(r"first_frame|last_frame", words):
        del fields[name]
    if shorter := re.search(r"cut to its first ([\d.]+) s", words):
        frames = round(float(shorter[1]) * 24)
        films["film", "film"] = replace(FACTS["film"], frames=frames, samples=frames * 32000 // 24)
    fields.pop("task")
    return resolve(parse_request(fields), measured=films)


REQUESTS = {
    "references": {"references": [{"image": "photo"}, {"video": "film"}, {"audio": "voice"}], "frames": 243},
    "keyframes": {
        "first_frame": "photo",
        "last_frame": "photo",
        "keyframes": [{"video": "film", "frame": 30}, {"image": "photo", "frame": 5}],
        "frames": 277,
    },
    "text": {"frames": 243},
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("less", [0.3, 1.0, 3.0])
def test_every_way_out_is_legal_and_fits_with_what_it_says(name, less):
    """On one rank, with `less` GiB than it needs: what is named, done by hand, needs what was said, and fits."""
    resolved = resolved_of(**REQUESTS[name])
    free = max(plan_of(resolved)[0].peaks) / GIB - less
    message, ways = told(resolved, free)
    assert len(ways) == 3 and ways[0][0].startswith("--gpus 2 "), message
    rows = []
    for words, need in ways[1:]:
        smaller = changed(resolved, words)
        assert check_keyframes(smaller) is not None and check_references(smaller) is not None
        plan = plan_of(smaller)[0]
        assert max(plan.peaks) / GIB == pytest.approx(need, abs=0.06) and need <= free
        rows.append(plan.rows)
    assert rows == sorted(rows, reverse=True), "the fewest rows given up come first"


def test_of_each_kind_the_smallest_that_fits_is_named():
    resolved = resolved_of(references=[{"video": "film"}, {"video": "film"}], frames=243)
    plan, _ = plan_of(resolved)
    _, ways = told(resolved, max(plan.peaks) / GIB - 0.05)
    words = [words for words, _ in ways[1:]]
    assert sorted(words) == ["references[0] cut to its first 7.29 s", "request.frames=226"]  # 175 of 192 frames


def test_a_reference_that_is_seen_stays():
    """Without its one picture a request with a voice is no request: that is never a way out."""
    resolved = resolved_of(references=[{"image": "photo"}, {"audio": "voice"}])
    kinds = [[cut.words for cut in kind] for kind in cuts(resolved, "comfy", 100)]
    assert kinds[0] == ["without references[1]"] and kinds[1] == []


def test_keyframes_keep_their_places_in_a_shorter_clip():
    resolved = resolved_of(**REQUESTS["keyframes"])
    frames = [int(cut.words.removeprefix("request.frames=")) for cut in list(cuts(resolved, "comfy", 100))[2]]
    assert frames[0] == 260 and frames[-1] == 226  # the film's 192 frames end at 221, and a last frame follows
    least = resolved_of(keyframes=[{"image": "photo", "frame": 123}])
    assert list(cuts(least, "comfy", 100))[2] == []


def test_fewer_vision_tokens_are_counted():
    resolved = resolved_of(references=[{"image": "photo"}, {"image": "photo"}])
    _, facts = plan_of(resolved)
    without = next(iter(cuts(resolved, "comfy", facts.text_rows)))[0]
    assert without.text_rows == facts.text_rows - (1344 // 32 * (768 // 32) + 2)
    assert without.conditions == conditions_of(resolved, "comfy")[1:]


def test_where_a_conditions_encoder_is_too_large_leaving_it_out_is_the_way():
    """The video VAE's encoder does not fit, the text encoder does: no layout helps, the same clip from text does."""
    resolved = resolved_of(first_frame="photo", frames=22, width=256, height=256)
    plan, facts = plan_of(resolved, Layout(tp=8))
    plan = relayout(replace(plan, stored=replace(plan.stored, video_vae=6 * GIB, text_encoder=3 * GIB)), plan.layout)
    assert plan.memory[0]["encode"] > 9 * GIB > plan.memory[0]["decode"]
    with pytest.raises(PlanError, match=r"to encode .* no layout changes that; what fits is without first_frame, 8"):
        check_memory(plan, [9 * GIB] * 8, cuts(resolved, "comfy", facts.text_rows))
