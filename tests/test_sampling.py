"""Noise and samplers: diffusers for "official", plain double-precision formulas for "comfy"."""

import math

import numpy as np
import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLatentsStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from h3dist.errors import ConfigError, NumericsError
from h3dist.geometry import Geometry
from h3dist.packing import audio_to_rows, patchify
from h3dist.sampling.noise import draw
from h3dist.sampling.samplers import sample
from h3dist.sampling.schedules import Schedule, make_schedule

GEOMETRY = Geometry(96, 64, 22)
SHIFT_V, SHIFT_A, GAIN = 12.0, 3.0, 4.0


# --- noise


def test_official_noise_is_what_diffusers_draws():
    class Components:
        _execution_device, patch_size = torch.device("cpu"), (1, 2, 2)
        vae_latent_channels, audio_channels, audio_latent_channels = 24, 2, 32

    state = PipelineState()
    state.set("generator", torch.Generator().manual_seed(440420))
    sizes = (GEOMETRY.latent_t, GEOMETRY.latent_h, GEOMETRY.latent_w, GEOMETRY.audio_latents)
    for name, size in zip(("latent_frames", "latent_height", "latent_width", "audio_latents"), sizes, strict=True):
        state.set(name if name.startswith("latent_") and name != "latent_frames" else f"num_{name}", size)
    _, state = MiniMaxH3PrepareLatentsStep()(Components(), state)

    video, audio = draw("official", 440420, GEOMETRY)
    assert torch.equal(patchify(video), state.get("latents"))
    assert torch.equal(audio_to_rows(audio), state.get("audio_latents"))


def test_comfy_noise_is_one_flat_draw_video_then_audio():
    video, audio = draw("comfy", 7, GEOMETRY)
    assert video.shape == (1, 24, 7, 4, 6) and audio.shape == (1, 32, 2, 37)
    assert video.dtype == audio.dtype == torch.float32
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(video, torch.randn(1, 24, 7, 4, 6, generator=generator))
    assert torch.equal(audio, torch.randn(1, 32, 2, 37, generator=generator))


def test_the_contracts_differ_in_where_the_audio_numbers_go():
    (video, audio), (official_video, official_audio) = (
        draw("comfy", 7, GEOMETRY),
        draw("official", 7, GEOMETRY),
    )
    assert torch.equal(video, official_video) and not torch.equal(audio, official_audio)
    assert torch.equal(audio.flatten().sort().values, official_audio.flatten().sort().values)


def test_noise_depends_on_the_seed_alone():
    torch.manual_seed(1)
    before = draw("comfy", 2**63 - 1, GEOMETRY)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(before, draw("comfy", 2**63 - 1, GEOMETRY), strict=True))
    assert not torch.equal(before[0], draw("comfy", 0, GEOMETRY)[0])


# --- samplers: a toy model whose velocities mix both streams and both times


def toy(video, audio, time_v, time_a):
    """Curved data-ward velocities from either torch tensors or numpy arrays of one value each."""
    tanh = torch.tanh if isinstance(video, torch.Tensor) else np.tanh
    clean_video = 0.8 * tanh(video) + 0.3 * audio.mean() + 0.1 * time_v
    clean_audio = -0.5 * tanh(2 * audio) + 0.2 * video.mean() - 0.2 * time_a
    return (clean_video - video) / max(1 - time_v, 1e-3), (clean_audio - audio) / max(1 - time_a, 1e-3)


def toy_velocity(schedule: Schedule):
    return lambda video, audio, step: toy(video, audio, schedule.times_v[step], schedule.times_a[step])


def start() -> tuple[torch.Tensor, torch.Tensor]:
    return draw("official", 3, GEOMETRY)


def run(name: str, steps: int, sampler: str, contract: str, **kw) -> tuple[torch.Tensor, torch.Tensor]:
    schedule = make_schedule(name, steps)
    return sample(toy_velocity(schedule), *start(), schedule, sampler=sampler, contract=contract, **kw)


@pytest.mark.parametrize("steps", [1, 4, 12, 50])
def test_official_steps_are_diffusers_steps_over_a_whole_loop(steps):
    video, audio = start()
    schedulers = MiniMaxH3Scheduler(shift=SHIFT_V), MiniMaxH3Scheduler(shift=SHIFT_A)
    trace = []
    for scheduler in schedulers:
        scheduler.set_timesteps(steps + 1)
    for time_v, time_a in zip(*(scheduler.timesteps for scheduler in schedulers), strict=True):
        v_video, v_audio = toy(video, audio, float(time_v), float(time_a))
        video = schedulers[0].step(v_video, time_v, video, return_dict=False)[0]
        audio = schedulers[1].step(v_audio, time_a, audio, return_dict=False)[0]
        trace.append((video, audio))

    seen = []
    ours = run("official", steps, "euler", "official", on_step=lambda i, *latents: seen.append((i, *latents)))
    assert [i for i, *_ in seen] == list(range(steps))
    for (_, our_video, our_audio), (their_video, their_audio) in zip(seen, trace, strict=True):
        torch.testing.assert_close(our_video, their_video, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(our_audio, their_audio, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[0], seen[-1][1]) and torch.equal(ours[1], seen[-1][2])


def test_official_steps_are_diffusers_to_the_last_bit():
    """On the same sigmas, below 0.5 too: there 1 - t is not the grid's sigma to the last bit."""
    schedule, latents = make_schedule("official", 50), start()
    velocities = torch.sin(9 * latents[0]), torch.cos(9 * latents[1])
    ours = sample(lambda *_: velocities, *latents, schedule, sampler="euler", contract="official")
    for x, v, sigmas, got in zip(
        latents, velocities, (schedule.video_sigmas, schedule.audio_sigmas), ours, strict=True
    ):
        scheduler = MiniMaxH3Scheduler()
        scheduler.set_timesteps(sigmas=list(sigmas))
        for time in scheduler.timesteps:
            x = scheduler.step(v, time, x, return_dict=False)[0]
        assert torch.equal(got, x)


def reference_comfy(sampler: str, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Comfy's loop in double precision on one flat vector: noise-ward velocities, audio carried as y."""
    video, carried = (x.double().numpy() for x in start())
    split = video.size
    state, old_denoised = np.concatenate([video.ravel(), carried.ravel()]), None
    sigmas = schedule.video_sigmas
    for i, sigma in enumerate(sigmas[:-1]):
        base = sigma / (SHIFT_V + sigma * (1 - SHIFT_V))
        sigma_a = SHIFT_A * base / (1 + (SHIFT_A - 1) * base)
        x_v, x_a = state[:split], state[split:] * (sigma_a / sigma)
        v_v, v_a = (-v for v in toy(x_v, x_a, 1 - sigma, 1 - sigma_a))
        u = (1 - GAIN) * x_a + (1 + (GAIN - 1) * sigma_a) * v_a
        denoised = state - sigma * np.concatenate([v_v, u])
        state = reference_step(sampler, sigmas, i, state, denoised, old_denoised)
        old_denoised = denoised
    return state[:split].reshape(video.shape), state[split:].reshape(carried.shape) / GAIN


def reference_step(sampler, sigmas, i, x, denoised, old_denoised):
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    if sampler == "euler" or i == 0 or sigma_next == 0:
        return x + (x - denoised) / sigma * (sigma_next - sigma)
    t_old, t, t_next = -math.log(sigmas[i - 1]), -math.log(sigma), -math.log(sigma_next)
    h, c2 = t_next - t, (t_old - t) / (t_next - t)
    phi1 = (math.exp(-h) - 1) / -h
    phi2 = (phi1 - 1) / -h
    b2 = phi2 / c2
    return math.exp(-h) * x + h * ((phi1 - b2) * denoised + b2 * old_denoised)


def relative(ours: torch.Tensor, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours.double().numpy() - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("sampler", ["euler", "res_multistep"])
@pytest.mark.parametrize(("name", "steps"), [("beta", 12), ("simple", 20), ("simple", 1), ("beta", 50)])
def test_comfy_steps_follow_the_formulas_in_double_precision(sampler, name, steps):
    video, audio = run(name, steps, sampler, "comfy")
    want_video, want_audio = reference_comfy(sampler, make_schedule(name, steps))
    assert video.dtype == audio.dtype == torch.float32
    assert relative(video, want_video) < 3e-6 and relative(audio, want_audio) < 3e-6


def test_euler_on_the_carried_audio_is_euler_on_its_own_sigmas():
    video, audio = run("beta", 12, "euler", "comfy")
    own_video, own_audio = run("beta", 12, "euler", "official")
    assert relative(audio, own_audio.double().numpy()) < 3e-6
    assert relative(video, own_video.double().numpy()) < 3e-6


def test_res_multistep_on_the_carried_audio_is_not_res_multistep_on_its_own_sigmas():
    schedule = make_schedule("beta", 12)
    video, audio = (x.double().numpy() for x in start())
    old = (None, None)
    for i in range(schedule.evaluations):
        v_video, v_audio = toy(video, audio, schedule.times_v[i], schedule.times_a[i])
        clean = video + schedule.video_sigmas[i] * v_video, audio + schedule.audio_sigmas[i] * v_audio
        video = reference_step("res_multistep", schedule.video_sigmas, i, video, clean[0], old[0])
        audio = reference_step("res_multistep", schedule.audio_sigmas, i, audio, clean[1], old[1])
        old = clean
    assert relative(run("beta", 12, "res_multistep", "comfy")[1], audio) > 1e-4


def test_a_straight_flow_reaches_its_clean_latents_by_every_road():
    (noise_v, noise_a), (clean_v, clean_a) = start(), draw("official", 4, GEOMETRY)
    roads = [
        ("beta", "res_multistep", "comfy"),
        ("simple", "euler", "comfy"),
        ("official", "euler", "official"),
    ]
    for name, sampler, contract in roads:
        schedule = make_schedule(name, 12)
        seen = []
        video, audio = sample(
            lambda *_: (clean_v - noise_v, clean_a - noise_a),
            noise_v,
            noise_a,
            schedule,
            sampler=sampler,
            contract=contract,
            on_step=lambda i, v, a, seen=seen: seen.append((v, a)),
        )
        torch.testing.assert_close(video, clean_v, rtol=0, atol=5e-6)
        torch.testing.assert_close(audio, clean_a, rtol=0, atol=5e-6)
        for (v, a), sigma_v, sigma_a in zip(
            seen, schedule.video_sigmas[1:], schedule.audio_sigmas[1:], strict=True
        ):  # after each step the latents stand at the next sigma of their own stream
            torch.testing.assert_close(v, sigma_v * noise_v + (1 - sigma_v) * clean_v, rtol=0, atol=5e-6)
            torch.testing.assert_close(a, sigma_a * noise_a + (1 - sigma_a) * clean_a, rtol=0, atol=5e-6)


def test_the_model_first_sees_the_noise_itself():
    seen = []

    def velocity(video, audio, step):
        seen.append((video, audio, step))
        return -video, -audio

    sample(velocity, *start(), make_schedule("beta", 2), sampler="res_multistep", contract="comfy")
    assert torch.equal(seen[0][0], start()[0]) and torch.equal(seen[0][1], start()[1])
    assert [step for *_, step in seen] == [0, 1]


def test_the_inputs_are_left_alone_and_half_precision_velocities_are_lifted():
    video, audio = start()
    kept = video.clone(), audio.clone()
    schedule = make_schedule("simple", 3)
    ours = sample(
        lambda v, a, i: (-v.bfloat16(), -a.bfloat16()),
        video,
        audio,
        schedule,
        sampler="euler",
        contract="comfy",
    )
    assert torch.equal(video, kept[0]) and torch.equal(audio, kept[1])
    assert ours[0].dtype == ours[1].dtype == torch.float32


@pytest.mark.parametrize("contract", ["comfy", "official"])
@pytest.mark.parametrize(("stream", "bad"), [("video", float("nan")), ("audio", float("inf"))])
def test_a_velocity_that_is_not_finite_names_stream_and_step(contract, stream, bad):
    def velocity(video, audio, step):
        latents = {"video": video.clone(), "audio": audio.clone()}
        if step == 2:
            latents[stream].view(-1)[5] = bad
        return latents["video"], latents["audio"]

    schedule = make_schedule("simple", 4)
    with pytest.raises(NumericsError, match=rf"step 3 of 4: 1 of \d+ .*{stream} velocity"):
        sample(velocity, *start(), schedule, sampler="euler", contract=contract)


def test_unknown_and_illegal_choices_are_refused():
    with pytest.raises(ConfigError, match=r"'res_2s'.*euler, res_multistep"):
        run("beta", 2, "res_2s", "comfy")
    with pytest.raises(ConfigError, match=r"'res_multistep'.*'comfy'.*'euler'"):
        run("official", 2, "res_multistep", "official")
    with pytest.raises(ConfigError, match=r"'offical'.*'official'"):
        run("official", 2, "euler", "offical")
    with pytest.raises(ConfigError, match=r"'comfyui'.*comfy, official"):
        draw("comfyui", 1, GEOMETRY)
