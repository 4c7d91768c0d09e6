"""The noise of conditions: diffusers' one generator, and the Comfy formula, in which each starts again."""

from types import SimpleNamespace

import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareConditionLatentsStep,
    MiniMaxH3PrepareLatentsStep,
)

from h3dist.conditions import Condition
from h3dist.geometry import Geometry
from h3dist.packing import audio_to_rows, patchify
from h3dist.sampling.noise import blur, draw, draw_conditions

GEOMETRY = Geometry(96, 64, 22)
CONDITIONS = (
    Condition("image", 64, 64, frames=1),
    Condition("audio", samples=9000),
    Condition("video", 32, 96, frames=22, samples=800),
    Condition("image", 64, 64, frames=1),
)
VISUAL = [condition for condition in CONDITIONS if condition.frames]
SEED = 440420


def clean(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 24, c.latent_t, c.latent_h, c.latent_w, generator=generator) for c in VISUAL]


def ours(contract: str, latents: list[torch.Tensor]) -> list[torch.Tensor]:
    noise = draw_conditions(contract, SEED, CONDITIONS)
    return [blur(patchify(rows), noisy) for rows, noisy in zip(latents, noise, strict=True)]


def run_step(step, **inputs) -> SimpleNamespace:
    state = SimpleNamespace(**inputs)
    step.get_block_state = lambda _: state
    step.set_block_state = lambda *_: None
    parts = SimpleNamespace(
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        keyframe_noise_aug=0.999,
        patch_size=(1, 2, 2),
        vae_latent_channels=24,
        audio_channels=2,
        audio_latent_channels=32,
        _execution_device=torch.device("cpu"),
    )
    step(parts, None)
    return state


def test_official_noise_is_diffusers_from_one_generator() -> None:
    generator, latents = torch.Generator().manual_seed(SEED), clean()
    rows = sum(condition.video_rows for condition in CONDITIONS)
    step = MiniMaxH3PrepareConditionLatentsStep()
    found = run_step(step, generator=generator, condition_latents=latents, num_condition_video_rows=rows)
    assert torch.equal(torch.cat(ours("official", latents)), found.condition_rows)
    wanted = run_step(
        MiniMaxH3PrepareLatentsStep(),
        generator=generator,
        latents=None,
        audio_latents=None,
        num_latent_frames=GEOMETRY.latent_t,
        latent_height=GEOMETRY.latent_h,
        latent_width=GEOMETRY.latent_w,
        num_audio_latents=GEOMETRY.audio_latents,
    )
    video, audio = draw("official", SEED, GEOMETRY, conditions=CONDITIONS)
    assert torch.equal(patchify(video), wanted.latents)
    assert torch.equal(audio_to_rows(audio), wanted.audio_latents)


def test_official_conditions_do_not_share_noise_and_move_the_clips() -> None:
    first, _, last = draw_conditions("official", SEED, CONDITIONS)
    assert not torch.equal(first, last)
    assert not torch.equal(
        draw("official", SEED, GEOMETRY, conditions=CONDITIONS)[0], draw("official", SEED, GEOMETRY)[0]
    )


def test_comfy_starts_the_seed_again_for_each_condition_and_for_the_clip() -> None:
    latents = clean()
    for rows, condition, latent in zip(ours("comfy", latents), VISUAL, latents, strict=True):
        generator = torch.Generator("cpu").manual_seed(SEED)
        wanted = 0.999 * patchify(latent) + 0.001 * torch.randn(condition.video_rows, 96, generator=generator)
        torch.testing.assert_close(rows, wanted, rtol=0, atol=3e-7)
    first, _, last = draw_conditions("comfy", SEED, CONDITIONS)
    assert torch.equal(first, last)
    with_conditions, without = draw("comfy", SEED, GEOMETRY, conditions=CONDITIONS), draw("comfy", SEED, GEOMETRY)
    assert all(torch.equal(a, b) for a, b in zip(with_conditions, without, strict=True))
