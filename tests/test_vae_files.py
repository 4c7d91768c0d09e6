"""VAEs read from Comfy-format files, written here from diffusers' modules by the format's rules."""

import json

import pytest
import torch
from safetensors.torch import save_file

from h3dist.checkpoint.comfy import open_audio_vae, open_video_vae
from h3dist.errors import CheckpointError, ConfigError
from h3dist.tiles import cut_video
from h3dist.vae import AudioVae, VideoVae
from h3dist.vae.blend import blend

STATISTICS = ("latents_mean", "latents_std")
VIDEO = {
    "block_out_channels": [8, 8, 8, 16, 16, 16],
    "norm_num_groups": 4,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 3,
    "decoder_attention_head_dim": 16,
    "latents_mean": [0.25 * index for index in range(24)],
    "latents_std": [1 + index / 8 for index in range(24)],
}
AUDIO = {
    "encoder_dim": 4,
    "latent_dim": 64,
    "decoder_dim": 128,
    "num_attention_heads": 2,
    "latents_mean": [0.125 * index for index in range(32)],
    "latents_std": [1 + index / 16 for index in range(32)],
}
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
]


def shaken(model):
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.half().float().eval()


def comfy_video(state, head_dim):
    """The format's video names: q, k, v fused head by head, the gate first, other names for the encoder."""
    found = {"decoder.mask_token": torch.zeros(1, 1, state["decoder.norm_out.weight"].numel())}
    for name, tensor in state.items():
        if ".to_k." in name or ".to_v." in name:
            continue
        if ".to_q." in name:
            parts = [state[name.replace("to_q", f"to_{part}")].unflatten(0, (-1, head_dim)) for part in "qkv"]
            name, tensor = name.replace("to_q", "to_qkv"), torch.stack(parts, 1).flatten(0, 2)
        if ".net.0.proj." in name:
            up, gate = tensor.chunk(2)
            name, tensor = name.replace("net.0.proj", "w1"), torch.cat([gate, up])
        for theirs, comfy in (
            ("proj_in", "x_embedder"),
            ("to_out.0", "to_out"),
            ("net.2", "w2"),
            ("down_blocks", "down"),
            ("resnets", "block"),
            ("conv_shortcut", "nin_shortcut"),
            ("downsamplers.0", "downsample"),
        ):
            name = name.replace(f"{theirs}.", f"{comfy}.")
        found[name] = tensor
    return found


def comfy_audio(state):
    """The format's audio names: diffusers', with magnitude and direction folded into one weight."""
    found = {name: tensor for name, tensor in state.items() if not name.endswith(("weight_g", "weight_v"))}
    for name in state:
        if name.endswith("weight_v"):
            v, g = state[name], state[name.replace("weight_v", "weight_g")]
            found[name.removesuffix("_v")] = v * (g / v.norm(dim=tuple(range(1, v.ndim)), keepdim=True))
    return found


def save(folder, state, settings, dtype):
    state = {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
    save_file(state | {name: torch.tensor(settings[name]) for name in STATISTICS}, folder / "vae.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder / "vae.safetensors", folder / "config.json"


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    from diffusers import AutoencoderKLMiniMaxH3

    torch.manual_seed(0)
    theirs = shaken(AutoencoderKLMiniMaxH3(**VIDEO))
    state = comfy_video(theirs.state_dict(), VIDEO["decoder_attention_head_dim"])
    return theirs, *save(tmp_path_factory.mktemp("video"), state, VIDEO, torch.float16)


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    from diffusers import AutoencoderKLMiniMaxH3Audio

    torch.manual_seed(0)
    theirs = shaken(AutoencoderKLMiniMaxH3Audio(**AUDIO))
    return theirs, *save(tmp_path_factory.mktemp("audio"), comfy_audio(theirs.state_dict()), AUDIO, torch.float32)


def test_a_video_file_decodes_as_diffusers_does(video):
    theirs, path, config = video
    ours = VideoVae.load(open_video_vae(path, config), config, "cpu")
    latents = torch.randn(1, 24, 7, 2, 20, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(VIDEO[name]).view(1, -1, 1, 1, 1) for name in STATISTICS)
    restored = ours.statistics.restore(latents)
    assert torch.equal(restored, latents * std + mean)
    cuts = cut_video(7, 2, 20)
    found = torch.cat(list(blend((ours.decode_job(restored, job) for job in cuts.jobs()), cuts)), dim=1)
    with torch.no_grad():
        wanted = theirs.decode(restored, return_dict=False)[0][0]
    assert wanted.std() > 0.05 and (found - wanted).abs().max() <= 1e-5


def test_the_encoder_is_not_read_unless_asked_for(video):
    theirs, path, config = video
    file = open_video_vae(path, config)
    encoder = sum(info.nbytes for name, info in file.tensors.items() if name.startswith(("encoder.", "quant_conv.")))
    before = file.file.bytes_read
    VideoVae.load(file, config, "cpu")
    decoder_read = file.file.bytes_read - before
    whole = VideoVae.load(file, config, "cpu", encoder=True)
    assert file.file.bytes_read - before - decoder_read == decoder_read + encoder
    pixels = torch.randn(1, 3, 5, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.allclose(whole.encode_job(pixels), theirs.quant_conv(theirs.encoder(pixels)), atol=1e-5)


def test_an_audio_file_decodes_as_diffusers_does(audio):
    theirs, path, config = audio
    ours = AudioVae.load(open_audio_vae(path, config), config, "cpu")
    latents = torch.randn(1, 32, 2, 2, generator=torch.Generator().manual_seed(3))
    mean, std = (torch.tensor(AUDIO[name]).view(1, -1, 1) for name in STATISTICS)
    with torch.no_grad():
        wanted = theirs.decode(latents[0].transpose(0, 1) * std + mean, return_dict=False)[0][:, 0]
    assert wanted.std() > 1e-3 and (ours.decode(latents) - wanted).abs().max() <= 1e-5


def test_a_configuration_with_other_statistics_than_the_file_is_refused(video, tmp_path):
    _, path, config = video
    other = tmp_path / "other.json"
    other.write_text(json.dumps(VIDEO | {"latents_std": [2.0] * 24}))
    with pytest.raises(CheckpointError, match=r"vae\.safetensors: the file's latents_std"):
        VideoVae.load(open_video_vae(path, config), other, "cpu")


def test_a_configuration_of_another_size_than_the_file_is_refused(video, tmp_path):
    _, path, config = video
    other = tmp_path / "other.json"
    other.write_text(json.dumps(VIDEO | {"decoder_num_layers": 3}))
    with pytest.raises(CheckpointError, match="tensors do not fit"):
        VideoVae.load(open_video_vae(path, config), other, "cpu")
    other.write_text(json.dumps(VIDEO | {"decoder_head_dim": 16}))
    with pytest.raises(ConfigError, match="no setting 'decoder_head_dim'"):
        VideoVae.load(open_video_vae(path, config), other, "cpu")
