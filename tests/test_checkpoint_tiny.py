"""Tiny sets: the same bytes each time, weights that a model can live with; the VAEs in diffusers' names."""

import json
from pathlib import Path

import oracle
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from safefiles import parse
from transformers import AutoTokenizer

from h3dist.checkpoint import tiny
from h3dist.checkpoint.comfy import open_audio_vae, open_denoiser, open_text_encoder, open_video_vae
from h3dist.checkpoint.vae_names import audio_state, video_state
from h3dist.errors import ConfigError, OutputError

H3_TOKENS = (
    "<d>", "</d>", "<|cutoff|>", "<|lyrics_start|>", "<|lyrics_end|>", "<|caption_start|>", "<|caption_end|>",
)  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return tiny.write_tiny(tmp_path_factory.mktemp("tiny"), "full", seed=5)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_seed_gives_its_bytes_and_no_others(paths, tmp_path):
    again = tiny.write_tiny(tmp_path / "again" / "deep", "full", seed=5)
    other = tiny.write_tiny(tmp_path / "other", "full", seed=6)
    first, second, third = (contents(found["overrides"].parent) for found in (paths, again, other))
    assert first == second
    assert {name for name in first if first[name] == third[name]} == {
        "overrides.txt", "text_encoder_config.json",
        "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
    }  # fmt: skip


def test_the_overrides_name_every_file(paths):
    lines = paths["overrides"].read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines)
    for slot, path in paths.items():
        if slot != "overrides":
            assert given[f"model.{slot}"] == f"@/{path.name}"
            assert path.exists()
    assert (given["runtime.device"], given["runtime.dtype"]) == ("cpu", "float32")


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write tiny checkpoints"):
        tiny.write_tiny(tmp_path / "file")
    with pytest.raises(ConfigError, match="did you mean 'curve'"):
        tiny.write_tiny(tmp_path, "curved")


def test_the_sizes_bite():
    dims = tiny.FULL
    assert all(dims.heads % ranks for ranks in (4, 6, 8))
    assert dims.hidden not in (dims.inner, 64 * (dims.hidden // 64))
    assert all(rows % 128 for rows in (3 * dims.inner, 2 * dims.ffn, dims.hidden))
    assert dims.ffn // 16 >= 8
    assert dims.ffn // 16 % 8


def test_the_tokenizer_has_h3s_tokens_in_order(paths):
    tokenizer = AutoTokenizer.from_pretrained(paths["tokenizer"])
    ids = tokenizer.convert_tokens_to_ids(list(H3_TOKENS))
    assert ids == list(range(ids[0], ids[0] + 7))
    assert ids[-1] < tiny.TEXT.vocab
    prompt = '<d>[English] Hi.</d>  "quoted"\n 雨の窓 🌧 ${oops} ???'
    found = tokenizer(prompt)["input_ids"]
    assert found[0] == ids[0] and ids[1] in found
    assert tokenizer.decode(found, clean_up_tokenization_spaces=False) == prompt
    config = json.loads(paths["text_encoder_config"].read_text())
    assert config["image_token_id"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")


@pytest.mark.parametrize("form", ["full", "curve"])
def test_every_block_can_be_seen_in_the_output(form, tmp_path):
    torch.manual_seed(0)
    state = open_denoiser(tiny.write_tiny(tmp_path, form)["denoiser"])
    model, dims = oracle.transformer(state), state.dims
    text, audio, video = 9, 14, 60
    tags = torch.tensor([1] * text + [2] * audio + [0] * video)
    places = torch.arange(len(tags))
    inputs = {
        "hidden_states": torch.randn(1, video, 4 * dims.video_channels),
        "audio_hidden_states": torch.randn(1, audio, dims.audio_channels),
        "encoder_hidden_states": 5 * torch.randn(1, text, dims.text_dim),
        "timestep": torch.tensor([0.2, 0.6]),
        "timestep_indices": (tags == 2).long(),
        "token_tags": tags,
        "position_ids": 30 * torch.rand(len(tags), 3),
        "text_indices": places[tags == 1],
        "audio_indices": places[tags == 2],
        "video_indices": places[tags == 0],
    }

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            found = model(**inputs)
        return torch.cat([found.sample.flatten(), found.audio_sample.flatten()])

    due = outputs()
    assert due.isfinite().all()
    assert 0.3 < due.std() < 3
    names = [
        name
        for name, _ in model.named_parameters()
        if name.endswith(("to_q.weight", "to_out.0.weight", "net.2.weight"))
    ]
    assert len(names) == 3 * (dims.layers + dims.refiner_layers)
    for name in names:
        weight = model.get_parameter(name)
        kept = weight.clone()
        weight.zero_()
        change = ((outputs() - due).norm() / due.norm()).item()
        weight.copy_(kept)
        assert change > 0.01, name


def test_the_curve_is_read_between_its_rows():
    table = torch.tensor([[0.0, 1.0], [2.0, 5.0], [4.0, -3.0]])
    found = oracle.Curve(table)(torch.tensor([0.0, 0.25, 0.5, 1.0, 2.0]))
    assert torch.equal(found, torch.tensor([[0.0, 1.0], [1.0, 3.0], [2.0, 5.0], [4.0, -3.0], [4.0, -3.0]]))


def test_the_oracle_reads_what_we_read(paths):
    state = open_denoiser(paths["denoiser"])
    theirs = oracle.dense_state(state)
    for name in state.table:
        assert torch.equal(state.tensor(name).float(), theirs[name]), name


def test_awq_scales_are_undone_by_the_activations(paths):
    """W / s is stored and s kept, so that (W / s)(s x) is W x again to within the 4 bits."""
    state = open_text_encoder(paths["text_encoder"])
    weight = state.linear("model.layers.3.mlp.down_proj")
    scaled = weight.dense(torch.float32) * weight.pre_quant_scale.float()
    assert weight.full_precision
    assert weight.pre_quant_scale.float().std() > 0.1
    assert abs(scaled.std().item() * tiny.TEXT.ffn**0.5 - 0.7) < 0.05, "columns are even again"
    assert state.linear("model.layers.3.self_attn.q_proj").pre_quant_scale is None


# --- the VAEs in diffusers' modules


def config(path: Path) -> dict:
    return json.loads(path.read_text())


def test_the_video_vaes_names_are_diffusers(paths):
    state = open_video_vae(paths["video_vae"], paths["video_vae_config"])
    model = AutoencoderKLMiniMaxH3(**config(paths["video_vae_config"])).eval()
    model.load_state_dict({name: part.float() for name, part in video_state(state).items()}, strict=True)
    mean, std = (torch.tensor(model.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    assert torch.equal(state.tensor("latents_mean"), mean.flatten())
    with torch.no_grad():
        frames = model.decode(torch.randn(1, 24, 7, 2, 2) * std + mean).sample
    assert frames.shape == (1, 3, 22, 32, 32)
    assert 0.3 < frames.std() < 3


def test_the_video_vaes_orders(paths):
    """q, k and v of one head after another; the gate's rows first: row by row, from the file's own bytes."""
    state = video_state(open_video_vae(paths["video_vae"]))
    _, shape, data = parse(paths["video_vae"])[0]["decoder.transformer_blocks.1.attn.to_qkv.weight"]
    rows = torch.frombuffer(bytearray(data), dtype=torch.float16).view(shape)
    for head in range(2):
        for part, letter in enumerate("qkv"):
            due = rows[(3 * head + part) * 64 : (3 * head + part + 1) * 64]
            found = state[f"decoder.transformer_blocks.1.attn.to_{letter}.weight"]
            assert torch.equal(found[64 * head : 64 * (head + 1)], due)
    _, shape, data = parse(paths["video_vae"])[0]["decoder.transformer_blocks.0.ff.w1.bias"]
    gate, up = torch.frombuffer(bytearray(data), dtype=torch.float16).chunk(2)
    assert torch.equal(state["decoder.transformer_blocks.0.ff.net.0.proj.bias"], torch.cat([up, gate]))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_the_audio_vaes_names_are_diffusers(paths):
    state = open_audio_vae(paths["audio_vae"], paths["audio_vae_config"])
    model = AutoencoderKLMiniMaxH3Audio(**config(paths["audio_vae_config"])).eval()
    filters = {name: part.clone() for name, part in model.state_dict().items() if name.endswith("filter")}
    found = audio_state(state)
    model.load_state_dict(found, strict=True)
    for name, due in filters.items():
        assert torch.allclose(found[name], due, atol=1e-7), "the filters are no free weights"
    mean, std = (torch.tensor(model.config[name]).view(1, -1, 1) for name in ("latents_mean", "latents_std"))
    with torch.no_grad():
        sound = model.decode(torch.randn(2, 32, 6) * std + mean).sample
        model.decoder.ups[2][0](torch.zeros(1, 32, 4))  # makes its weight from magnitude and direction
    assert sound.shape == (2, 1, 4800)
    assert 0.1 < sound.std() < 1
    assert (sound.abs() == 1).float().mean() < 0.2
    folded = state.tensor("decoder.ups.2.0.weight")
    assert torch.allclose(model.decoder.ups[2][0].weight, folded, atol=1e-6)
