"""The encoder, read from checkpoint files, against transformers' whole Qwen3-VL on the same weights."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import comfy_kitchen
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLConfig, Qwen3VLModel

from h3dist.checkpoint.comfy import open_text_encoder
from h3dist.checkpoint.formats import Int8Weight
from h3dist.checkpoint.nvfp4 import Nvfp4Weight
from h3dist.errors import CheckpointError, ConfigError, NumericsError
from h3dist.text.encoder import LAYERS, TextEncoder, file_name, skeleton
from h3dist.text.layers import StoredEmbedding, StoredLinear
from h3dist.text.presentation import Presentation
from h3dist.text.released import RELEASED_CONFIG
from h3dist.text.tokenizer import count_tokens, load_tokenizer, present_t2va

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "t2va"
CONFIG = {
    "model_type": "qwen3_vl",
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 52,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl_vision",
        "depth": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1, 2],
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    },
}
MARKERS = {
    "nvfp4": {"format": "nvfp4", "full_precision_matrix_mult": True},
    "int8": {"format": "int8_tensorwise"},
}
IDS = (3, 17, 60, 5, 5, 41, 0, 62, 8, 59, 23, 33, 12)  # special ids of the vision block are plain text here
PRESENTATION = Presentation(IDS, (1,) * len(IDS))


def reference() -> Qwen3VLModel:
    """The whole model, 52 layers and a norm, with random weights that bfloat16 holds exactly."""
    torch.manual_seed(5)
    with torch.device("meta"):
        model = Qwen3VLModel(Qwen3VLConfig(**CONFIG))
    model = Qwen3VLModel(model.config)
    for name, parameter in model.named_parameters():
        scale = 0.15 if parameter.ndim > 1 else 0.3
        base = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.data = (base + scale * torch.randn_like(parameter)).bfloat16().float()
    return model.eval().requires_grad_(False)


def marker(kind: str) -> torch.Tensor:
    return torch.tensor(list(json.dumps(MARKERS[kind]).encode()), dtype=torch.uint8)


def nvfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix's NVFP4 tensors by comfy-kitchen, and what it makes of them in float32."""
    scale = weight.abs().amax() / (448 * 6)
    codes, scales = comfy_kitchen.quantize_nvfp4(weight, scale, pad_16x=True)
    dense = comfy_kitchen.dequantize_nvfp4(codes, scale, scales, torch.float32)
    parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": scale, "comfy_quant": marker("nvfp4")}
    return parts, dense[: weight.shape[0], : weight.shape[1]]


def int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale, "comfy_quant": marker("int8")}, codes.float() * scale


def kept(model: Qwen3VLModel) -> dict[str, torch.Tensor]:
    """The tensors that the file has, by its names: no layers past the 50th, no final norm."""
    left_out = ("language_model.norm.", *(f"language_model.layers.{i}." for i in range(LAYERS, 52)))
    return {file_name(n): t for n, t in model.state_dict().items() if not n.startswith(left_out)}


def write_bf16(path: Path, model: Qwen3VLModel) -> None:
    save_file({name: tensor.bfloat16() for name, tensor in kept(model).items()}, path)


def write_quantised(path: Path, model: Qwen3VLModel) -> None:
    """Writes the NVFP4-AWQ form, and gives the model the weights that the file's form stands for."""
    tensors, own = {}, model.state_dict()
    for name, tensor in kept(model).items():
        own_name = name.replace("model.", "language_model.", 1) if name.startswith("model.") else name
        layer = name.removesuffix(".weight")
        if name.startswith("visual.") or tensor.ndim < 2:
            tensors[name] = tensor.bfloat16()
            continue
        parts, dense = (int8 if "embed" in name else nvfp4)(tensor)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parts["pre_quant_scale"] = (1 + 0.3 * torch.randn(tensor.shape[1])).bfloat16()
            dense = dense * parts["pre_quant_scale"].float()
        own[own_name].copy_(dense)
        tensors |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, path)


WRITERS = {"bf16": write_bf16, "nvfp4_awq": write_quantised}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(scope="module", params=WRITERS)
def case(request, config, tmp_path_factory):
    """(opened file, loaded encoder, reference model) of each form of file."""
    model = reference()
    path = tmp_path_factory.mktemp("encoder") / f"{request.param}.safetensors"
    WRITERS[request.param](path, model)
    state = open_text_encoder(str(path), config)
    return state, TextEncoder.load(state, config, "cpu"), model


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def test_states_are_the_full_models_hidden_state_50(case):
    _, encoder, model = case
    with torch.no_grad():
        ids = torch.tensor([IDS])
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    states, tags = encoder.encode(PRESENTATION)
    assert len(outputs.hidden_states) == 53 and states.shape == (len(IDS), 48)
    assert relative(states, outputs.hidden_states[50][0]) < 1e-5
    assert relative(states, outputs.hidden_states[49][0]) > 1e-2
    assert relative(states, model.language_model.norm(outputs.hidden_states[50][0])) > 0.5
    assert states.dtype == torch.float32 and not states.requires_grad
    assert tags.dtype == torch.int64 and tags.tolist() == [1] * len(IDS)


def test_the_vision_tower_is_the_full_models(case):
    _, encoder, model = case
    pixels, grid = torch.randn(2 * 16, 3 * 2 * 16 * 16), torch.tensor([[1, 4, 4], [1, 4, 4]])
    with torch.no_grad():
        theirs = model.visual(pixels, grid_thw=grid)
        ours = encoder.model.visual(pixels, grid_thw=grid)
    assert relative(ours.pooler_output, theirs.pooler_output) < 1e-5
    for a, b in zip(ours.deepstack_features, theirs.deepstack_features, strict=True):
        assert relative(a, b) < 1e-5


def test_every_byte_but_the_markers_is_asked_of_the_file_once(case):
    state, _, _ = case
    payload = {name: info for name, info in state.file.tensors.items() if not name.endswith(".comfy_quant")}
    assert state.file.bytes_read == sum(info.stop - info.start for info in payload.values())


def test_matrices_stay_as_they_are_stored(case):
    state, encoder, _ = case
    stored = [m.stored for m in encoder.model.modules() if isinstance(m, StoredLinear | StoredEmbedding)]
    language = [m for m in encoder.model.language_model.modules() if isinstance(m, StoredLinear)]
    assert len(language) == 7 * LAYERS
    assert all(p.ndim == 1 for p in encoder.model.language_model.parameters())
    in_file = sum(info.stop - info.start for info in state.file.tensors.values())
    assert sum(weight.nbytes for weight in stored) < in_file
    if "nvfp4" in str(state.file.path):
        assert all(isinstance(m.stored, Nvfp4Weight) for m in language)
        assert isinstance(encoder.model.get_input_embeddings().stored, Int8Weight)


def test_nothing_is_left_without_storage(case):
    _, encoder, _ = case
    held = [*encoder.model.parameters(), *encoder.model.buffers()]
    assert held and not any(tensor.is_meta for tensor in held)
    assert all(tensor.dtype == torch.float32 for tensor in held)


def test_an_embedding_makes_only_its_rows_dense(case):
    _, encoder, model = case
    ids = torch.tensor([[63, 0, 7, 7]])
    table = encoder.model.get_input_embeddings()
    assert torch.equal(table(ids), table.stored.dense(torch.float32)[ids])
    assert torch.equal(table(ids), model.get_input_embeddings()(ids))


def test_an_embedding_in_4_bits_is_refused():
    parts, _ = nvfp4(torch.randn(32, 32))
    scales = parts["weight_scale"].view(torch.uint8)
    weight = Nvfp4Weight(parts["weight"], scales, parts["weight_scale_2"], (32, 32))
    with pytest.raises(CheckpointError, match=r"Nvfp4Weight.*int8_tensorwise"):
        StoredEmbedding(weight)


def test_a_token_id_past_the_embedding_is_refused(case):
    with pytest.raises(CheckpointError, match=r"token id 64.*64 rows"):
        case[1].encode(Presentation((1, 64), (1, 1)))


def test_states_that_are_not_finite_are_refused(case):
    weight = case[1].model.language_model.layers[30].input_layernorm.weight
    before = weight[3].item()
    weight[3] = float("nan")
    try:
        with pytest.raises(NumericsError, match="text encoder"):
            case[1].encode(PRESENTATION)
    finally:
        weight[3] = before


def test_release_lets_the_weights_go(case, config):
    encoder = TextEncoder.load(case[0], config, "cpu")
    weight = weakref.ref(encoder.model.language_model.layers[0].mlp.up_proj.stored)
    encoder.release()
    gc.collect()
    assert weight() is None and encoder.model is None


def test_two_encodings_are_the_same_to_the_last_bit(case):
    assert torch.equal(case[1].encode(PRESENTATION)[0], case[1].encode(PRESENTATION)[0])


def test_convolutions_of_the_vision_tower_are_not_rounded_to_tf32(case):
    """cuDNN would, by default, even where products are exact."""
    allowed = []
    hook = case[1].model.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cudnn.allow_tf32))
    before = torch.backends.cudnn.allow_tf32
    case[1].encode(PRESENTATION)
    hook.remove()
    assert allowed == [False] and torch.backends.cudnn.allow_tf32 == before


@pytest.mark.gpu
def test_a_gpu_holds_the_stored_form_and_gives_the_cpus_states(case, config, capsys):
    """The first product of a process makes torch keep cuBLAS's work space, 32 MiB on Hopper, which is not ours."""
    torch.ones(16, 16, device="cuda") @ torch.ones(16, 16, device="cuda")
    before = torch.cuda.memory_allocated()
    encoder = TextEncoder.load(case[0], config, "cuda")
    states, _ = encoder.encode(PRESENTATION)
    assert states.is_cuda and encoder.model.get_input_embeddings().stored.shape == (64, 48)
    error = relative(states.cpu(), case[1].encode(PRESENTATION)[0])
    encoder.release()
    del states
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    with capsys.disabled():
        print(f"\ntext encoder on a GPU, {case[0].file.path.stem}: {error:.1e} from the CPU, {left} bytes left")
    assert error < 1e-5, f"the GPU's states are {error:.2e} from the CPU's"
    assert left < 1 << 20, f"{left} bytes are left after release"


@pytest.mark.parametrize(
    ("text", "message"),
    [("<html>", "no readable JSON"), ("[]", "found 'list'"), ('{"model_type": "llama"}', "found 'llama'")],
)
def test_a_config_of_another_model_is_refused(case, tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"text_encoder_config.*{message}"):
        TextEncoder.load(case[0], str(tmp_path / "config.json"), "cpu")


def test_the_released_model_has_the_published_tensors():
    shapes = {file_name(n): tuple(t.shape) for n, t in skeleton(RELEASED_CONFIG).state_dict().items()}
    assert len(shapes) == 902 and sum(n.startswith("visual.") for n in shapes) == 351
    published = {
        "model.embed_tokens.weight": (151936, 5120),
        "model.layers.49.input_layernorm.weight": (5120,),
        "model.layers.0.self_attn.q_norm.weight": (128,),
        "model.layers.0.self_attn.q_proj.weight": (8192, 5120),
        "model.layers.0.self_attn.v_proj.weight": (1024, 5120),
        "model.layers.0.self_attn.o_proj.weight": (5120, 8192),
        "model.layers.49.mlp.gate_proj.weight": (25600, 5120),
        "model.layers.49.mlp.down_proj.weight": (5120, 25600),
        "visual.patch_embed.proj.weight": (1152, 3, 2, 16, 16),
        "visual.pos_embed.weight": (2304, 1152),
        "visual.blocks.26.attn.qkv.weight": (3456, 1152),
        "visual.blocks.0.mlp.linear_fc1.weight": (4304, 1152),
        "visual.merger.norm.weight": (1152,),
        "visual.merger.linear_fc2.weight": (5120, 4608),
        "visual.deepstack_merger_list.2.norm.weight": (4608,),
        "visual.deepstack_merger_list.2.linear_fc1.weight": (4608, 4608),
    }
    assert {name: shapes[name] for name in published} == published
    assert not {"model.norm.weight", "model.layers.50.mlp.up_proj.weight"} & shapes.keys()


def test_a_rank_that_encodes_nothing_imports_no_transformers():
    code = "import sys, h3dist.text.encoder\nsys.exit(bool({'transformers', 'diffusers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden set beside the checkout")
def test_the_golden_prompt_gives_the_golden_states():
    config, folder = str(GOLDEN / "text_encoder_config.json"), str(GOLDEN / "tokenizer")
    prompt = json.loads((GOLDEN / "request.json").read_text())["prompt"]
    expected = load_file(GOLDEN / "expected.safetensors")
    state = open_text_encoder(str(GOLDEN / "qwen3vl_tiny_nvfp4_awq.safetensors"), config)
    states, tags = TextEncoder.load(state, config, "cpu").encode(present_t2va(prompt, load_tokenizer(folder)))
    assert relative(states, expected["text_states"]) < 1e-5
    assert torch.equal(tags, expected["text_tags"]) and count_tokens(folder, prompt) == len(tags)
