"""Encoding with both VAEs against diffusers' own, and the two contracts' choice of the posterior."""

import math

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition
from test_vae import audio, video  # noqa: F401 (fixtures)

from h3dist.conditions import Condition
from h3dist.errors import NumericsError
from h3dist.vae import AudioVae, VideoVae
from h3dist.vae.encode import encode_clip, encode_frames, to_pixels
from h3dist.vae.frames import PIXEL_MEAN, PIXEL_STD

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
]


def picture(frames: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def channels_first(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames).permute(3, 0, 1, 2)[None]


@pytest.mark.parametrize(
    ("frames", "height", "width"),
    [
        (1, 64, 96),
        (1, 288, 320),  # 2 x 2 tiles
        (1, 480, 64),  # 3 rows
        (5, 32, 32),
        (10, 32, 32),
        (17, 32, 32),
        (22, 32, 288),
        (39, 64, 32),
    ],
)
def test_official_latents_are_those_of_diffusers(video, frames, height, width):  # noqa: F811
    theirs, ours, _ = video
    pixels = picture(frames, height, width)
    with torch.no_grad():
        wanted = encode_vae_condition(theirs, channels_first(pixels), PIXEL_MEAN, PIXEL_STD)
    found = encode_frames(ours, pixels, "official")
    condition = Condition("video", width, height, frames)
    assert found.shape == wanted.shape == (1, 24, condition.latent_t, condition.latent_h, condition.latent_w)
    # rounded to float16 before they are normalised: a value near a tie may fall one step away
    step = wanted.abs().max() * 2**-10
    assert (found - wanted).abs().max() <= step
    assert ((found - wanted).abs() > 1e-5).float().mean() <= 1e-3


def test_the_comfy_contract_takes_the_mean(video):  # noqa: F811
    theirs, ours, _ = video
    pixels = picture(22, 32, 288)
    with torch.no_grad():
        posterior = theirs.encode(to_pixels(pixels, torch.device("cpu")), return_dict=False)[0]
    mean, std = (torch.tensor(theirs.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    found = encode_frames(ours, pixels, "comfy")
    torch.testing.assert_close(found, (posterior.mode() - mean) / std, rtol=1e-5, atol=1e-5)
    assert (found - encode_frames(ours, pixels, "official")).abs().max() > 0.1


def test_encoding_repeats_itself_and_a_still_is_no_clip_of_copies(video):  # noqa: F811
    pixels = picture(1, 32, 64)
    first = encode_frames(video[1], pixels, "official")
    assert torch.equal(first, encode_frames(video[1], pixels, "official"))
    clip = encode_frames(video[1], np.repeat(pixels, 5, axis=0), "comfy")
    assert clip.shape[2] == 2 and first.shape[2] == 1


def test_tiles_are_faded_into_each_other(video):  # noqa: F811
    pixels = picture(1, 32, 288)
    whole = encode_clip(video[1], pixels)
    alone = encode_clip(video[1], pixels[:, :, :256])
    overlap = (2 * 256 - 288) // 16
    assert torch.equal(whole[..., : 18 - 16], alone[..., : 18 - 16])
    assert not torch.equal(whole[..., 2 : 2 + overlap], alone[..., 2:16])


def test_the_half_that_is_not_asked_for_is_not_there(video, audio):  # noqa: F811
    encoder = VideoVae.from_state(video[0].state_dict(), video[2], "cpu", encoder=True, decoder=False)
    assert set(encoder.parts) == {"quant_conv", "encoder"}
    pixels = picture(1, 32, 32)
    assert torch.equal(encode_frames(encoder, pixels, "comfy"), encode_frames(video[1], pixels, "comfy"))
    assert set(AudioVae.from_state(audio[0].state_dict(), audio[2], "cpu", encoder=True).parts) == {
        "encoder",
        "pre_block",
        "mean_proj",
    }


@pytest.mark.parametrize("samples", [800, 801, 4000, 12345])
def test_audio_latents_are_those_of_diffusers(audio, samples):  # noqa: F811
    theirs, _, settings = audio
    ours = AudioVae.from_state(theirs.state_dict(), settings, "cpu", encoder=True)
    sound = torch.rand(2, samples, generator=torch.Generator().manual_seed(samples)) * 2 - 1
    mean, std = (torch.tensor(theirs.config[key]).view(1, 1, -1) for key in ("latents_mean", "latents_std"))
    with torch.no_grad():
        posterior = theirs.encode(sound[:, None], return_dict=False)[0]
    wanted = (posterior.mode().transpose(1, 2) - mean) / std  # [2, A, 32]
    found = ours.encode(sound)
    assert found.shape == (1, 32, 2, math.ceil(samples / 800))
    assert found.shape[3] == Condition("audio", samples=samples).audio_latents
    assert (found[0].permute(1, 2, 0) - wanted).abs().max() <= 1e-5
    assert wanted.std() > 1e-3


def test_what_is_not_finite_is_named(video, audio):  # noqa: F811
    broken = VideoVae.from_state(video[0].state_dict(), video[2], "cpu", encoder=True, decoder=False)
    broken.parts["quant_conv"].bias[0] = float("nan")
    with pytest.raises(NumericsError, match="keyframe or a reference"):
        encode_frames(broken, picture(1, 32, 32), "comfy")
    deaf = AudioVae.from_state(audio[0].state_dict(), audio[2], "cpu", encoder=True)
    with pytest.raises(NumericsError, match="sound"):
        deaf.encode(torch.full((2, 800), float("inf")))
