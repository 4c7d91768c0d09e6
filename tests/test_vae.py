"""Both VAEs against diffusers' own decoding, from random weights of a small size."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from h3dist.errors import CheckpointError, ConfigError, NumericsError, RequestError
from h3dist.geometry import latent_frames, legal_frames
from h3dist.tiles import cut_video
from h3dist.vae import AudioVae, VideoVae, released
from h3dist.vae.blend import blend
from h3dist.vae.frames import PIXEL_MEAN, PIXEL_STD, to_levels
from h3dist.vae.video import _half_dtype
from h3dist.vae.weights import read_config, read_statistics

VIDEO = {
    "block_out_channels": (8, 8, 8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 16,
    "decoder_ffn_mult": 2,
}
AUDIO = {"encoder_dim": 4, "latent_dim": 64, "decoder_dim": 128, "num_attention_heads": 2}
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
]


def randomise(model):
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.ndim > 1 else 0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        if name.endswith(("norm1.weight", "norm2.weight", "norm_out.weight", "weight_g")):
            parameter.data = 1 + 0.2 * parameter.data
    return model.eval()


def statistics(channels):
    generator = torch.Generator().manual_seed(channels)
    mean = torch.randn(channels, generator=generator)
    std = 1 + torch.rand(channels, generator=generator)
    return {"latents_mean": mean.tolist(), "latents_std": std.tolist()}


def write_config(folder, settings):
    path = folder / "config.json"
    path.write_text(json.dumps({"_class_name": "AutoencoderKL", **settings}))
    return path


def settings_of(model, folder, given):
    return read_config(write_config(folder, given), model)


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """A random diffusers video VAE, and ours with the same weights."""
    from diffusers import AutoencoderKLMiniMaxH3

    settings = VIDEO | statistics(24)
    theirs = randomise(AutoencoderKLMiniMaxH3(**settings))
    settings = settings_of(AutoencoderKLMiniMaxH3, tmp_path_factory.mktemp("video"), settings)
    return theirs, VideoVae.from_state(theirs.state_dict(), settings, "cpu", encoder=True), settings


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    from diffusers import AutoencoderKLMiniMaxH3Audio

    settings = AUDIO | statistics(32)
    theirs = randomise(AutoencoderKLMiniMaxH3Audio(**settings))
    for name, parameter in theirs.named_parameters():
        if name.endswith(("alpha", "beta")):
            parameter.data = parameter.data * 0.1
    settings = settings_of(AutoencoderKLMiniMaxH3Audio, tmp_path_factory.mktemp("audio"), settings)
    return theirs, AudioVae.from_state(theirs.state_dict(), settings, "cpu"), settings


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def raw_frames(vae, z):
    """Decoded and blended, before the colours are restored: [3, F, H, W], from restored latents."""
    cuts = cut_video(*z.shape[2:])
    return torch.cat(list(blend((vae.decode_job(z, job) for job in cuts.jobs()), cuts)), dim=1)


@pytest.mark.parametrize(
    ("frames", "height", "width"),
    [
        (22, 64, 96),  # one tile
        (22, 256, 288),  # 1 x 2, almost all overlap
        (22, 320, 416),  # 2 x 2
        (22, 480, 544),  # 3 x 3
        (22, 768, 32),  # 4 rows with overlaps of 96, 80, 80
        (39, 288, 64),
        (124, 64, 32),
    ],
)
def test_frames_are_those_of_diffusers(video, frames, height, width):
    theirs, ours, _ = video
    z = draw(1, 24, latent_frames(frames), height // 16, width // 16)
    with torch.no_grad():
        wanted = theirs.decode(z, return_dict=False)[0][0]
    found = raw_frames(ours, z)
    assert found.shape == wanted.shape == (3, frames, height, width)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= 1e-5


def test_five_frames_which_diffusers_cannot_decode(video):
    theirs, ours, _ = video
    z = draw(1, 24, 2, 4, 4)
    with torch.no_grad():
        whole = theirs._decode_clip(z[:, :, [0, 1, 1, 1, 1, 1, 1]])[0]
    assert torch.allclose(raw_frames(ours, z), whole[:, 3:8], atol=1e-5, rtol=0)


@pytest.mark.parametrize("frames", legal_frames())
def test_every_legal_length_has_exactly_its_frames(video, frames):
    chunks = list(video[1].decode(draw(1, 24, latent_frames(frames), 2, 2)))
    assert sum(len(chunk) for chunk in chunks) == frames
    assert all(chunk.dtype == torch.uint8 and chunk.shape[1:] == (32, 32, 3) for chunk in chunks)


def test_levels_are_those_of_the_diffusers_decode_step(video):
    from diffusers.video_processor import VideoProcessor

    theirs, ours, _ = video
    latents = draw(1, 24, 7, 4, 6, seed=1) * 2
    stats = theirs.config
    mean, std = (torch.tensor(stats[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    with torch.no_grad():
        decoded = theirs.decode(latents * std + mean, return_dict=False)[0]
    pixel_mean, pixel_std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD))
    pixels = (decoded.float() * pixel_std + pixel_mean).clamp(0, 1)
    processor = VideoProcessor(vae_scale_factor=16, do_normalize=False)
    wanted = (processor.postprocess_video(pixels, output_type="np")[0] * 255).round().astype("uint8")
    found = torch.cat(list(ours.decode(latents))).numpy()
    difference = np.abs(found.astype(int) - wanted)
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-4
    assert found.std() > 20


def test_levels_are_clamped_and_rounded_not_truncated():
    mean, std = torch.tensor(PIXEL_MEAN), torch.tensor(PIXEL_STD)
    wanted = torch.tensor([-0.5, 0.0, 0.4 / 255, 0.6 / 255, 100.4 / 255, 100.6 / 255, 1.0, 7.0])
    raw = (wanted.view(1, -1) - mean.view(3, 1)) / std.view(3, 1)
    levels = to_levels(raw.view(3, -1, 1, 1))
    assert levels[:, 0, 0].tolist() == [[v] * 3 for v in (0, 0, 0, 1, 100, 101, 255, 255)]


def test_jobs_may_be_done_anywhere_in_any_order(video):
    ours = video[1]
    z = draw(1, 24, 12, 18, 20)
    cuts = cut_video(12, 18, 20)
    jobs = list(cuts.jobs())
    done = {index: ours.decode_job(z, jobs[index]) for index in reversed(range(len(jobs)))}
    blended = torch.cat(list(blend((done[index] for index in range(len(jobs))), cuts)), dim=1)
    assert torch.equal(blended, raw_frames(ours, z))


def test_chunks_are_decoded_only_when_asked_for(video):
    calls = []
    hook = video[1].parts["decoder"].register_forward_hook(lambda *_: calls.append(1))
    try:
        frames = video[1].decode(draw(1, 24, 22, 18, 2))  # two tiles, four chunks
        assert not calls
        assert len(next(frames)) == 17 and len(calls) == 2
        assert len(next(frames)) == 17 and len(calls) == 4
    finally:
        hook.remove()


def test_half_precision_is_close_and_keeps_norms_in_float32(video):
    theirs, ours, settings = video
    z = draw(1, 24, 7, 4, 4)
    half = VideoVae.from_state(theirs.state_dict(), settings, "cpu")
    for name, parameter in half.parts.named_parameters():
        parameter.data = parameter.data.to(_half_dtype(name))
    kept = {name.split(".")[-2:][0] for name, p in half.parts.named_parameters() if p.dtype == torch.float32}
    assert kept == {"norm1", "norm2", "norm_out", "0"}  # "0": scale1 and scale2 of block 0
    with torch.autocast("cpu", torch.float16):
        found = raw_frames(half, z)
    wanted = raw_frames(ours, z)
    assert found.dtype == torch.float32
    assert 0 < (found - wanted).norm() / wanted.norm() < 1e-2


def test_the_encoder_is_loaded_only_where_asked_for(video):
    theirs, with_encoder, settings = video
    decoder_only = {k: v for k, v in theirs.state_dict().items() if not k.startswith(("encoder.", "quant_conv."))}
    assert set(VideoVae.from_state(decoder_only, settings, "cpu").parts) == {"decoder", "post_quant_conv"}
    pixels = draw(1, 3, 17, 32, 48)
    with torch.no_grad():
        wanted = theirs.quant_conv(theirs.encoder(pixels))
    assert torch.equal(with_encoder.encode_job(pixels), wanted)


def test_latent_statistics_the_files_own_come_first():
    config = dict.fromkeys(("latents_mean", "latents_std"))
    own = {"latents_mean": torch.arange(24).half(), "latents_std": torch.full((24,), 2.0)}
    cpu = torch.device("cpu")
    found = read_statistics(own, config, released.VIDEO, source="x", device=cpu)
    assert found.mean.dtype == torch.float32 and found.mean[23] == 23 and found.std[0] == 2
    fallback = read_statistics({}, config, released.VIDEO, source="x", device=cpu)
    assert fallback.std[16] == torch.tensor(2.961095094680786)
    given = {"latents_mean": [0.0] * 24, "latents_std": [3.0] * 24}
    assert read_statistics({}, given, released.VIDEO, source="x", device=cpu).std[0] == 3
    with pytest.raises(CheckpointError, match="latents_mean is not the configuration's"):
        read_statistics(own, given, released.VIDEO, source="x", device=cpu)
    with pytest.raises(CheckpointError, match="above zero"):
        read_statistics(own | {"latents_std": torch.zeros(24)}, config, released.VIDEO, source="x", device=cpu)
    with pytest.raises(CheckpointError, match="32 finite numbers"):
        read_statistics(own, config, released.AUDIO, source="x", device=cpu)


def test_nan_is_named_by_stream(video, audio):
    latents = draw(1, 24, 12, 2, 2)
    latents[0, 3, 4, 1, 1] = float("nan")
    with pytest.raises(NumericsError, match="video latents"):
        video[1].decode(latents)
    with pytest.raises(NumericsError, match="audio latents"):
        audio[1].decode(torch.full((1, 32, 2, 4), float("inf")))


def test_nan_from_the_decoders_is_named_by_stream_and_frames(video, audio):
    theirs, _, settings = video
    broken = VideoVae.from_state(theirs.state_dict(), settings, "cpu")
    calls = []

    def spoil(module, args, output):
        calls.append(1)
        return output * float("nan") if len(calls) == 2 else output

    broken.parts["decoder"].register_forward_hook(spoil)
    frames = broken.decode(draw(1, 24, 12, 2, 2))
    assert len(next(frames)) == 17
    with pytest.raises(NumericsError, match="video VAE gave NaN or infinity in frames 17 to 38"):
        next(frames)
    silent = AudioVae.from_state(audio[0].state_dict(), audio[2], "cpu")
    silent.parts["decoder"].register_forward_hook(lambda module, args, output: output * float("nan"))
    with pytest.raises(NumericsError, match="audio VAE gave NaN"):
        silent.decode(draw(1, 32, 2, 2))


def test_latents_of_another_shape_are_refused(video, audio):
    with pytest.raises(RequestError, match=r"\[1, 24, T, h, w\]"):
        video[1].decode(draw(1, 16, 7, 2, 2))
    with pytest.raises(RequestError, match="32 or 37"):
        video[1].decode(draw(1, 24, 36, 2, 2))
    with pytest.raises(RequestError, match=r"\[1, 32, 2, A\]"):
        audio[1].decode(draw(1, 32, 4))


def test_tensors_that_do_not_fit_are_counted_and_named(video):
    theirs, _, settings = video
    state = theirs.state_dict()
    state.pop("decoder.proj_in.weight")
    state["decoder.extra"] = torch.zeros(1)
    state["decoder.norm_out.bias"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="3 tensors do not fit") as error:
        VideoVae.from_state(state, settings, "cpu", source="vae.safetensors")
    for part in (
        "vae.safetensors",
        "proj_in.weight (missing)",
        "extra (unexpected)",
        "bias [3] (expected [32])",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoder_num_layer": 3}, "did you mean 'decoder_num_layers'"),
        ({"clip_length": 13}, "only .17, 3, 16, 4. can be decoded"),
        ({"temporal_downsample_factors": [1, 2, 1, 1, 1, 1]}, "only .17, 3, 16, 4. can be decoded"),
    ],
)
def test_configurations_that_cannot_be_meant(tmp_path, settings, message):
    from diffusers import AutoencoderKLMiniMaxH3

    with pytest.raises(ConfigError, match=message):
        VideoVae.from_state({}, settings_of(AutoencoderKLMiniMaxH3, tmp_path, settings), "cpu")


@pytest.mark.parametrize("text", ["[1, 2]", "{", None])
def test_a_configuration_that_is_no_json_object(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(path, object)


def test_without_a_configuration_the_sizes_are_the_released_ones():
    from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio

    video, audio = (read_config(None, kind) for kind in (AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio))
    assert (video["decoder_num_layers"], video["decoder_num_attention_heads"], video["latents_mean"]) == (
        36,
        32,
        None,
    )
    assert (audio["latent_dim"], audio["decoder_dim"], audio["latents_std"]) == (2048, 1024, None)


def test_another_sample_rate_is_refused(audio):
    with pytest.raises(ConfigError, match="44100 samples a second"):
        AudioVae.from_state({}, audio[2] | {"sampling_rate": 44100}, "cpu")


def test_sound_is_that_of_diffusers(audio):
    theirs, ours, _ = audio
    latents = draw(1, 32, 2, 9)
    mean, std = (torch.tensor(theirs.config[key]).view(1, -1, 1) for key in ("latents_mean", "latents_std"))
    with torch.no_grad():
        wanted = theirs.decode(latents[0].permute(1, 0, 2) * std + mean, return_dict=False)[0][:, 0]
    found = ours.decode(latents)
    assert found.shape == (2, 7200) and found.dtype == torch.float32
    assert found.abs().max() <= 1 and wanted.std() > 1e-3
    assert (found - wanted).abs().max() <= 1e-6
    assert not torch.equal(found[0], found[1])


def test_stereo_channels_do_not_mix(audio):
    latents = draw(1, 32, 2, 4)
    left, right = audio[1].decode(latents)
    swapped = audio[1].decode(latents.flip(2))
    assert torch.allclose(swapped, torch.stack([right, left]), atol=1e-6)


@pytest.mark.gpu
def test_on_cuda_the_picture_is_half_and_the_sound_full_precision(video, audio):
    latents = draw(1, 24, 7, 18, 4)
    wanted = torch.cat(list(video[1].decode(latents))).int()
    half = VideoVae.from_state(video[0].state_dict(), video[2], "cuda")
    found = torch.cat(list(half.decode(latents.cuda()))).int()
    assert found.device.type == "cpu" and (found - wanted).abs().float().mean() < 1
    linears = (m for m in half.parts["decoder"].modules() if isinstance(m, torch.nn.Linear))
    assert {linear.weight.dtype for linear in linears} == {torch.float16}
    latents = draw(1, 32, 2, 9)
    full = AudioVae.from_state(audio[0].state_dict(), audio[2], "cuda")
    found, wanted = full.decode(latents.cuda()), audio[1].decode(latents)
    relative = ((found - wanted).norm() / wanted.norm()).item()
    assert relative < 1e-4, relative  # TF32 would give 1e-3


def test_importing_brings_in_neither_diffusers_nor_av():
    code = "import sys, h3dist.vae, h3dist.media; sys.exit(bool({'diffusers', 'av'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
