"""Presentations with pictures against diffusers' own, pixels against transformers' processor, states against both."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import encoders
from diffusers.modular_pipelines.minimax_h3.references import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from official import components, image_processor
from PIL import Image
from text_oracle import whole_text_model
from torch.nn import functional

from h3dist.checkpoint.comfy import open_text_encoder
from h3dist.checkpoint.tiny import write_tiny
from h3dist.conditions import Condition
from h3dist.errors import CheckpointError, RequestError
from h3dist.fitting import fit_keyframe, fit_reference, pair_seconds, sampled_frames
from h3dist.text.encoder import TextEncoder
from h3dist.text.presentation import Presentation, VisionBlock, pieces, present
from h3dist.text.tokenizer import count_tokens, load_tokenizer, tokenize
from h3dist.text.vision import look, patches_of

PROMPT = "The woman of <Picture 1> walks <d>slowly</d> by the sea."
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> SimpleNamespace:
    paths = write_tiny(tmp_path_factory.mktemp("tiny"))
    config = str(paths["text_encoder_config"])
    model = whole_text_model(paths["text_encoder"], config)
    tokenizer = load_tokenizer(str(paths["tokenizer"]))
    encoder = TextEncoder.load(open_text_encoder(str(paths["text_encoder"]), config), config, "cpu")
    return SimpleNamespace(paths=paths, tokenizer=tokenizer, encoder=encoder, parts=components(tokenizer, model))


def noise(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def ours(tiny, shown) -> tuple[Presentation, torch.Tensor]:
    """Our presentation of fitted (condition, frames), and its states."""
    found = pieces(PROMPT, [condition for condition, _ in shown], "official")
    presentation = present(found, lambda text: tokenize(tiny.tokenizer, text))
    assert count_tokens(str(tiny.paths["tokenizer"]), *found) == len(presentation.ids)
    pictures = look([part for part in shown if part[1] is not None], "official")
    return presentation, tiny.encoder.encode(presentation, pictures)[0]


def run_step(step, parts, **inputs) -> SimpleNamespace:
    """A block of diffusers' pipeline by itself."""
    state = SimpleNamespace(prompt=PROMPT, **inputs)
    step.get_block_state = lambda _: state
    step.set_block_state = lambda *_: None
    step(parts, None)
    return state


def agree(found: tuple[Presentation, torch.Tensor], official: SimpleNamespace) -> None:
    presentation, states = found
    assert presentation.tags == tuple(official.text_token_tags.tolist())
    wanted = official.prompt_embeds[0]
    assert states.shape == wanted.shape
    assert (states - wanted).norm() / wanted.norm() <= 1e-5


def test_states_with_keyframes_are_those_of_diffusers(tiny) -> None:
    frames = [noise(1, 64, 96), noise(1, 64, 96, 1)]
    shown = [(fit_keyframe((96, 64), 1, 0, place), pixels) for place, pixels in zip((0, 123), frames, strict=True)]
    step = encoders.MiniMaxH3FL2VATextEncoderStep()
    agree(ours(tiny, shown), run_step(step, tiny.parts, keyframes=[Image.fromarray(f[0]) for f in frames]))


def test_states_with_references_are_those_of_diffusers(tiny) -> None:
    sound = torch.zeros(2, 32000)
    film, silent, picture = noise(39, 64, 96), noise(53, 32, 128, 1), noise(1, 64, 64, 2)
    references = [
        MiniMaxH3AudioReference(sound),
        MiniMaxH3VideoReference(film, audio=sound),
        MiniMaxH3ImageReference(Image.fromarray(picture[0])),
        MiniMaxH3VideoReference(silent),
    ]
    shown = [
        (Condition("audio", samples=32000), None),
        (Condition("video", 96, 64, frames=39, samples=32000, shown=39), film),
        (Condition("image", 64, 64, frames=1, shown=1), picture),
        (Condition("video", 128, 32, frames=39, shown=53), silent),  # 5 sampled frames: the last one twice
    ]
    step = encoders.MiniMaxH3Ref2VATextEncoderStep()
    agree(ours(tiny, shown), run_step(step, tiny.parts, normalized_references=references))
    labels = [
        piece for piece in pieces("", [condition for condition, _ in shown], "official") if isinstance(piece, str)
    ]
    assert labels == [
        "<Audio 1>: ", "<Audio 2>: ", "<Video 1>: ", "<0.2 seconds>", "<1.2 seconds>", "<Picture 1>: ",
        "<Video 2>: ", "<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>", "",
    ]  # fmt: skip


@pytest.mark.parametrize("frames", [13, 24, 25, 36, 90, 361])
def test_frames_and_their_times_are_sampled_as_diffusers_does(frames: int) -> None:
    step = encoders.MiniMaxH3Ref2VATextEncoderStep
    picked, seconds = step._sample_video_condition_frames(np.arange(frames), 24.0, 2.0, 2)
    assert [int(index) for index in picked] == list(sampled_frames(frames))
    assert list(pair_seconds(frames)) == seconds


@pytest.mark.parametrize("size", [(96, 64), (256, 256), (640, 352), (50, 300)])
def test_official_patches_are_those_of_transformers(size: tuple[int, int]) -> None:
    picture = noise(1, size[1], size[0])
    wanted = image_processor()(images=[Image.fromarray(picture[0])], return_tensors="pt")
    found = patches_of(picture, "official", still=True)
    assert [list(found.shape[:3])] == wanted["image_grid_thw"].tolist()
    assert (found.flatten(0, 2) - wanted["pixel_values"]).abs().max() <= 1e-6


def test_the_comfy_contract_resizes_bilinearly_without_antialiasing() -> None:
    picture = noise(1, 50, 300)
    found = patches_of(picture, "comfy", still=True)  # 300 x 50 is rounded to 288 x 64: enough pixels already
    assert found.shape == (1, 4, 18, 1536)
    pixels = torch.from_numpy(picture).permute(0, 3, 1, 2).float() / 255
    resized = functional.interpolate(pixels, (64, 288), mode="bilinear", align_corners=False)[0] * 2 - 1
    tokens = found.view(2, 9, 2, 2, 3, 2, 16, 16)  # token row and column, patch in it, channel, frame, pixels
    assert torch.equal(tokens[..., 0, :, :], tokens[..., 1, :, :])
    back = tokens[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 64, 288)
    torch.testing.assert_close(back, resized, rtol=0, atol=1e-6)
    assert patches_of(noise(1, 64, 96), "official", still=True).shape[1:3] != (4, 6)  # enlarged to 65536 pixels
    assert patches_of(noise(1, 64, 96), "comfy", still=True).shape[1:3] == (4, 6)


def test_a_whole_vision_block_is_tagged_as_video_and_guides_are_not_shown(tiny) -> None:
    still, guide = fit_keyframe((96, 64), 1, 0, 0), fit_keyframe((96, 64), 22, 22 * 32000 // 24, 60)
    found = pieces("go", [still, guide], "comfy")
    assert found == ["<Picture 1>: ", VisionBlock("image", 6), "go"]
    presentation = present(found, lambda text: tokenize(tiny.tokenizer, text))
    label = len(tokenize(tiny.tokenizer, "<Picture 1>: "))
    assert presentation.tags[: label + 9] == (1,) * label + (0,) * 8 + (1,)


def test_comfy_shows_the_frames_that_are_encoded_and_official_all_of_the_clips_length() -> None:
    sizes = {"canvas": (96, 64), "clip_frames": 90}
    official = fit_reference("video", (96, 64), 80, 0, contract="official", **sizes)
    comfy = fit_reference("video", (96, 64), 80, 0, contract="comfy", **sizes)
    assert (official.frames, official.shown) == (73, 80)
    assert (comfy.frames, comfy.shown) == (73, 73)


def test_a_prompt_that_holds_what_stands_for_pictures_is_refused(tiny) -> None:
    found = ["<Picture 1>: ", VisionBlock("image", 6), "a <|image_pad|> there"]
    with pytest.raises(RequestError, match=r"<\|image_pad\|>"):
        present(found, lambda text: tokenize(tiny.tokenizer, text))


def test_tokens_that_are_not_the_encoders_are_refused(tiny) -> None:
    still = fit_keyframe((96, 64), 1, 0, 0)
    pictures = look([(still, noise(1, 64, 96))], "comfy")
    with pytest.raises(CheckpointError, match="do not belong together"):
        tiny.encoder.encode(Presentation((3, 4, 5), (1, 1, 1)), pictures)
