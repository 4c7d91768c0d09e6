"""What a file is, what it must hold, and every refusal before a tensor is read."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safefiles import edited, parse, scalar, text, write
from safetensors.torch import save_file

from h3dist.checkpoint import audio_names, text_names, tiny, video_names
from h3dist.checkpoint.comfy import (
    StateFile,
    open_audio_vae,
    open_denoiser,
    open_part,
    open_slots,
    open_text_encoder,
    open_video_vae,
)
from h3dist.checkpoint.denoiser_names import DenoiserDims, denoiser_table
from h3dist.checkpoint.file import ITEM_BYTES, TensorFile
from h3dist.checkpoint.inspect import describe
from h3dist.checkpoint.kinds import find_parts, identify
from h3dist.checkpoint.quantise import to_int8
from h3dist.checkpoint.storage import Spec, storage_of
from h3dist.errors import CheckpointError, ConfigError

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "t2va"
QKV = "blocks.1.attn.qkv_proj"


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, dict[str, Path]]:
    return {form: tiny.write_tiny(tmp_path_factory.mktemp(form), form) for form in ("full", "curve")}


@pytest.fixture(scope="module")
def paths(sets) -> dict[str, Path]:
    return sets["full"]


def refused(path: Path, words: str, opener=open_denoiser) -> str:
    with pytest.raises(CheckpointError, match=words) as caught:
        opener(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# --- names and sizes


@pytest.mark.parametrize("form", ["full", "curve"])
def test_sizes_come_from_the_shapes(sets, form):
    state = open_denoiser(sets[form]["denoiser"])
    assert state.dims == tiny.FORMS[form]
    assert state.notes == ()
    assert open_text_encoder(sets[form]["text_encoder"]).dims == tiny.TEXT
    assert open_video_vae(sets[form]["video_vae"]).dims == tiny.VIDEO
    assert open_audio_vae(sets[form]["audio_vae"]).dims == tiny.AUDIO


RELEASED = DenoiserDims(
    hidden=5376, heads=56, head_dim=128, ffn=14336, layers=50, refiner_layers=2, text_dim=5120,
    video_channels=24, audio_channels=32, rope_freqs=16, form="full", curve_grid=0, curve_rank=0,
    time_freq=256, time_hidden=5376, time_dim=2688,
)  # fmt: skip
PRUNED = replace(RELEASED, form="curve", curve_grid=1025, curve_rank=8, time_freq=0, time_hidden=0, time_dim=8)


def payload(table: dict[str, Spec], dtype, config=lambda layer: None) -> tuple[int, int]:
    """Tensors and bytes of a file, with markers; `dtype(name)` and `config(layer)` say how each is kept."""
    count = size = 0
    for name, spec in table.items():
        layer = name.removesuffix(".weight")
        marker = config(layer) if spec.linear else None
        if marker is None:
            count, size = count + 1, size + prod(spec.shape) * ITEM_BYTES[dtype(name)]
            continue
        parts = storage_of(spec.shape, {"full_precision_matrix_mult": False} | marker, {}).parts()
        count += len(parts) + 1
        size += len(json.dumps(marker))
        size += sum(prod(part.shape) * ITEM_BYTES[part.dtypes[0]] for part in parts.values())
    return count, size


def released_dtype(name: str) -> str:
    return "F32" if name.startswith(tiny.FLOAT32) else "BF16"


def four(layer: str):
    return {"format": "nvfp4"} if f"{layer}.weight".startswith("blocks.") and "adaln" not in layer else None


def test_the_released_denoisers_have_these_tensors_and_bytes():
    """Published: tensor counts of the files, and their sizes less the header."""
    assert payload(denoiser_table(RELEASED), released_dtype) == (535, 66_280_430_144)
    assert payload(denoiser_table(PRUNED), released_dtype) == (532, 40_225_668_192)
    assert payload(denoiser_table(PRUNED), released_dtype, four) == (1132, 12_528_520_792)


def test_the_released_encoder_and_vaes_have_these_tensors_and_bytes():
    video = video_names.video_table(video_names.RELEASED)
    assert payload(video, lambda name: "F16") == (561, 5_207_742_160 - 2 * 2048)  # less the unused mask token
    assert payload(audio_names.audio_table(audio_names.RELEASED), lambda name: "F32") == (917, 605_149_280)

    def marker(layer):
        if layer == "model.embed_tokens":
            return {"format": "int8_tensorwise"}
        quantised = layer.startswith("model.layers.")
        return {"format": "nvfp4", "full_precision_matrix_mult": True} if quantised else None

    count, size = payload(text_names.text_table(text_names.RELEASED), lambda name: "BF16", marker)
    scales = 50 * 2 * (8192 + 25600)  # bytes of pre_quant_scale
    assert (count + 100, size + scales) == (2054, 15_686_911_143)


# --- prefixes and merged files


def prefixed(source: Path, prefix: str) -> dict:
    return {prefix + name: tensor for name, tensor in parse(source)[0].items()}


def same_state(first: StateFile, second: StateFile) -> bool:
    assert first.dims == second.dims
    assert first.table == second.table
    return all(torch.equal(first.tensor(name), second.tensor(name)) for name in first.table)


def test_a_prefix_is_taken_off(paths, tmp_path):
    path = write(tmp_path / "prefixed", prefixed(paths["denoiser"], "model.diffusion_model."))
    assert same_state(open_denoiser(path), open_denoiser(paths["denoiser"]))


def test_a_merged_file_holds_all_four(paths, tmp_path):
    prefixes = {
        "denoiser": "model.diffusion_model.",
        "text_encoder": "text_encoders.qwen3vl_32b.transformer.",
        "video_vae": "vae.",
        "audio_vae": "audio_vae.",
    }
    merged = {}
    for slot, prefix in prefixes.items():
        merged |= prefixed(paths[slot], prefix)
    merged["note.of.a.tool"] = text("hello")
    path = write(tmp_path / "merged", merged)
    file = TensorFile.open(path)
    assert find_parts(file) == prefixes
    assert identify(file) == "merged"
    for slot in prefixes:
        assert same_state(open_part(file, slot), open_part(TensorFile.open(paths[slot]), slot))
    described = describe(path)
    assert "denoiser, full form, names after 'model.diffusion_model.'" in described
    assert "1 tensors belong to no part" in described


def test_a_plain_denoiser_with_a_vae_merged_in(paths, tmp_path):
    path = write(tmp_path / "both", prefixed(paths["denoiser"], "") | prefixed(paths["video_vae"], "vae."))
    assert same_state(open_denoiser(path), open_denoiser(paths["denoiser"]))
    assert same_state(open_video_vae(path), open_video_vae(paths["video_vae"]))


def test_a_model_that_is_there_twice_is_refused(paths, tmp_path):
    twice = prefixed(paths["denoiser"], "model.diffusion_model.") | prefixed(paths["denoiser"], "model_ema.")
    refused(write(tmp_path / "twice", twice), "2 times, under 'model.diffusion_model.', 'model_ema.'")


# --- formats, layer by layer


def unmarked(source: Path, path: Path, layers: dict[str, object], prefix: str = "") -> Path:
    """A copy whose markers stand in the header's metadata instead."""
    tensors, metadata = parse(source)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("comfy_quant")}
    named = {prefix + layer: value for layer, value in layers.items()}
    metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": named})
    return write(path, {prefix + name: tensor for name, tensor in tensors.items()}, metadata)


@pytest.mark.parametrize("value", [{"format": "nvfp4"}, "nvfp4"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_markers_may_stand_in_the_metadata(paths, tmp_path, value, prefix):
    plain = open_denoiser(paths["denoiser"])
    path = unmarked(paths["denoiser"], tmp_path / "meta", dict.fromkeys(plain.formats, value), prefix)
    state = open_denoiser(path)
    assert state.formats == plain.formats
    assert same_state(state, plain)


def replaced(layer: str, parts: dict[str, torch.Tensor], marker: object):
    """An edit that stores a layer in another way."""
    kinds = {torch.int8: "I8", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

    def edit(tensors):
        for name in [name for name in tensors if name.startswith(f"{layer}.")]:
            del tensors[name]
        for part, value in parts.items():
            data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            tensors[f"{layer}.{part}"] = (kinds[value.dtype], list(value.shape), data)
        if marker:
            tensors[f"{layer}.comfy_quant"] = text(marker)

    return edit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_may_be_plain(paths, tmp_path, dtype):
    matrix = open_denoiser(paths["denoiser"]).linear(QKV).dense(dtype)
    path = edited(paths["denoiser"], tmp_path / "mixed", replaced(QKV, {"weight": matrix}, None))
    state = open_denoiser(path)
    assert QKV not in state.formats
    assert torch.equal(state.linear(QKV).dense(torch.float32), matrix.float())


@pytest.mark.parametrize("layer", [QKV, "condition_proj", "blocks.2.adaln_proj.linear"])
def test_a_layer_may_be_int8(paths, tmp_path, layer):
    tensors = open_denoiser(paths["denoiser"])
    matrix = tensors.linear(layer).dense(torch.float32)
    parts = to_int8(matrix)
    if f"{layer}.bias" in tensors.table:
        parts["bias"] = tensors.tensor(f"{layer}.bias").clone()
    path = edited(paths["denoiser"], tmp_path / "mixed", replaced(layer, parts, {"format": "int8_tensorwise"}))
    state = open_denoiser(path)
    assert state.dims == tensors.dims
    dense = parts["weight"].float() * parts["weight_scale"]
    assert torch.equal(state.tensor(f"{layer}.weight"), dense), "a tensor is what it means, not its codes"
    before = state.file.bytes_read
    state.tensor(f"{layer}.weight")
    assert state.file.bytes_read - before == state.tensor_bytes(f"{layer}.weight")


def test_full_precision_is_read_from_each_marker(paths, tmp_path):
    marker = {"format": "nvfp4", "full_precision_matrix_mult": True}
    state = open_denoiser(marked(paths, tmp_path, marker))
    assert state.linear(QKV).full_precision
    assert not state.linear("blocks.0.attn.qkv_proj").full_precision


def marked(paths: dict[str, Path], folder: Path, marker: object, layer: str = QKV) -> Path:
    return edited(paths["denoiser"], folder / "marked", lambda t: t.update({f"{layer}.comfy_quant": text(marker)}))


UNSUPPORTED = {
    "mxfp8": {"format": "mxfp8"},
    "float8_e4m3fn": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
    "awq_w4a16": "awq_w4a16",
    "int8_tensorwise with convrot": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
    "nvfp4 with convrot": {"format": "nvfp4", "params": {"convrot": True}},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_format_that_is_not_built_is_named(paths, tmp_path, name):
    message = refused(marked(paths, tmp_path, UNSUPPORTED[name]), f"the format {name} is not supported yet")
    assert f"1 layers: {QKV}" in message
    assert "bf16, fp16, fp32, nvfp4, int8_tensorwise" in message


def test_the_older_fp8_files_are_named(paths, tmp_path):
    path = edited(paths["denoiser"], tmp_path / "old", lambda t: t.update(scaled_fp8=("F8_E4M3", [1], b"\0")))
    refused(path, "format float8_e4m3fn")


MARKERS = {
    "no format": ({"fmt": "nvfp4"}, "names no format"),
    "a list": (["nvfp4"], "names no format"),
    "a number": ({"format": 4}, "names no format"),
    "a word for a truth": (
        {"format": "nvfp4", "full_precision_matrix_mult": "false"},
        "neither true nor false",
    ),
}


@pytest.mark.parametrize("kind", MARKERS)
def test_a_marker_that_says_nothing_is_refused(paths, tmp_path, kind):
    marker, words = MARKERS[kind]
    refused(marked(paths, tmp_path, marker), words)


def test_a_marker_that_is_no_json_is_refused(paths, tmp_path):
    path = edited(paths["denoiser"], tmp_path / "x", lambda t: t.update({f"{QKV}.comfy_quant": ("U8", [3], b"{a:")}))
    refused(path, "is no JSON")


def test_unknown_fields_of_a_marker_are_told(paths, tmp_path):
    state = open_denoiser(marked(paths, tmp_path, {"format": "nvfp4", "colour": "blue"}))
    assert state.notes == ("markers of formats have fields that are not known here: colour",)


# --- faults


def without(*names: str):
    return lambda tensors: [tensors.pop(name) for name in names]


def test_missing_tensors_are_counted_and_five_named(paths, tmp_path):
    names = [f"blocks.{block}.norm{norm}.weight" for block in range(3) for norm in (1, 2)]
    message = refused(edited(paths["denoiser"], tmp_path / "x", without(*names)), "6 tensors are missing: ")
    assert ", ".join(names[:5]) + " and 1 more" in message


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2", "weight"])
def test_an_absent_scale_is_refused(paths, tmp_path, part):
    refused(edited(paths["denoiser"], tmp_path / "x", without(f"{QKV}.{part}")), f"missing: {QKV}.{part}")


def test_an_absent_marker_is_refused(paths, tmp_path):
    refused(
        edited(paths["denoiser"], tmp_path / "x", without(f"{QKV}.comfy_quant")),
        f"unexpected: {QKV}.weight_scale",
    )


@pytest.mark.parametrize("name", ["rope.inv_freq", "condition_proj.weight", "time_embedder.proj_out.weight"])
def test_a_tensor_that_sizes_come_from_is_missed_by_name(paths, tmp_path, name):
    refused(edited(paths["denoiser"], tmp_path / "x", without(name)), f"{name} is missing")


def test_a_block_in_the_middle_is_missed(paths, tmp_path):
    path = edited(
        paths["denoiser"],
        tmp_path / "x",
        lambda t: [t.pop(name) for name in list(t) if name.startswith("blocks.1.")],
    )
    refused(path, "tensors are missing: blocks.1.")


def test_unexpected_tensors_are_refused_and_the_ignorable_noted(paths, tmp_path):
    gates = {f"blocks.{block}.attn.to_gate_compress.weight": ("BF16", [1, 2], bytes(4)) for block in range(3)}
    gates["blocks.0.attn.to_gate_compress.comfy_quant"] = text({"format": "mxfp8"})
    state = open_denoiser(edited(paths["denoiser"], tmp_path / "gates", lambda t: t.update(gates)))
    assert len(state.notes) == 1
    assert "blocks.2.attn.to_gate_compress.weight" in state.notes[0]
    path = edited(paths["denoiser"], tmp_path / "odd", lambda t: t.update({"blocks.0.attn.odd": scalar(1.0)}))
    refused(path, "1 tensors are unexpected: blocks.0.attn.odd")


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (
            "blocks.0.norm1.weight",
            ("BF16", [207], bytes(414)),
            r"blocks.0.norm1.weight is BF16 \[207\], not .* \[208\]",
        ),
        ("blocks.0.norm1.weight", ("F64", [208], bytes(1664)), r"is F64 \[208\], not BF16/F16/F32 \[208\]"),
        ("blocks.0.norm1.weight", ("I8", [208], bytes(208)), "is I8"),
        ("rope.inv_freq", ("BF16", [4], bytes(8)), r"rope.inv_freq is BF16 \[4\], not F32"),
        (f"{QKV}.weight_scale", ("F8_E4M3", [1408, 12], bytes(1408 * 12)), r"not F8_E4M3/U8 \[1408, 16\]"),
        (f"{QKV}.weight_scale", ("BF16", [1408, 16], bytes(2 * 1408 * 16)), "weight_scale is BF16"),
        (f"{QKV}.weight", ("I8", [1344, 104], bytes(1344 * 104)), "weight is I8"),
        (f"{QKV}.weight_scale_2", ("BF16", [], bytes(2)), "weight_scale_2 is BF16"),
        (f"{QKV}.weight_scale_2", ("F32", [2], bytes(8)), r"weight_scale_2 is F32 \[2\]"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused(paths, tmp_path, name, tensor, words):
    refused(edited(paths["denoiser"], tmp_path / "x", lambda t: t.update({name: tensor})), words)


def test_scales_as_plain_bytes_are_accepted(paths, tmp_path):
    def edit(tensors):
        _, shape, data = tensors[f"{QKV}.weight_scale"]
        tensors[f"{QKV}.weight_scale"] = ("U8", shape, data)

    state = open_denoiser(edited(paths["denoiser"], tmp_path / "x", edit))
    assert same_state(state, open_denoiser(paths["denoiser"]))


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -1e-4])
@pytest.mark.parametrize("part", ["weight_scale_2", "input_scale"])
def test_a_scalar_scale_that_cannot_be_is_refused_at_once(paths, tmp_path, part, value):
    path = edited(paths["denoiser"], tmp_path / "x", lambda t: t.update({f"{QKV}.{part}": scalar(value)}))
    refused(path, f"{QKV}.{part} holds")


def test_a_latent_deviation_of_zero_is_refused(paths, tmp_path):
    for dtype, size in (("F32", 4), ("F16", 2), ("BF16", 2)):
        deviation = (dtype, [24], bytes(24 * size))
        path = edited(paths["video_vae"], tmp_path / dtype, lambda t, new=deviation: t.update(latents_std=new))
        refused(path, "latents_std holds 0.0", open_video_vae)


def test_a_bank_of_heads_is_named(paths, tmp_path):
    def edit(tensors):
        tensors["final_layer.video_out.weight"] = ("F32", [8 * 96, 208], bytes(8 * 96 * 208 * 4))

    refused(edited(paths["denoiser"], tmp_path / "x", edit), "a bank of 8 heads")


# --- other files, other slots


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("double_blocks.0.img_attn.qkv.weight", "FLUX"),
        ("model.diffusion_model.input_blocks.0.0.weight", "Stable Diffusion model"),
        ("blocks.0.self_attn.q.weight", "Wan"),
        ("diffusion_model.blocks.0.attn.qkv_proj.lora_A.weight", "LoRA"),
        ("transformer_blocks.0.adaln_proj.linear.weight", "diffusers' form"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "whole Qwen-VL"),
        ("blocks.0.attn.qkv_proj.weight", "a shard of an H3 denoiser"),
        ("something.else", "no model known here .something.else."),
    ],
)
def test_another_models_file_is_named(tmp_path, name, words):
    save_file({name: torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    refused(tmp_path / "other.safetensors", words)
    with pytest.raises(CheckpointError, match=words):
        describe(tmp_path / "other.safetensors")


def test_a_file_of_no_tensors(tmp_path):
    refused(write(tmp_path / "none", {}), "it has none")


def test_a_whole_language_model_is_refused(paths, tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.49.")]:
            tensors[name.replace(".49.", ".50.")] = tensors[name]

    refused(edited(paths["text_encoder"], tmp_path / "x", edit), "51 decoder layers where", open_text_encoder)
    path = edited(paths["text_encoder"], tmp_path / "y", lambda t: t.update({"lm_head.weight": scalar(1.0)}))
    refused(path, "unexpected: lm_head.weight", open_text_encoder)


def model(paths: dict[str, Path], **changes) -> SimpleNamespace:
    chosen = {name: str(path) for name, path in paths.items()} | {"qkv_order": "bands"} | changes
    return SimpleNamespace(**chosen)


def test_four_files_in_their_slots(paths):
    slots = open_slots(model(paths))
    kinds = [state.kind for state in slots[:4]]
    assert kinds == ["denoiser", "text_encoder", "video_vae", "audio_vae"]
    assert slots.notes == ("left out, as not used here: decoder.mask_token",)


def test_swapped_vaes_are_put_right_and_said(paths):
    slots = open_slots(model(paths, video_vae=str(paths["audio_vae"]), audio_vae=str(paths["video_vae"])))
    assert slots.video_vae.file.path == paths["video_vae"]
    assert slots.audio_vae.file.path == paths["audio_vae"]
    assert slots.notes[0].startswith("the two VAEs were swapped")


@pytest.mark.parametrize(
    ("slot", "other", "words"),
    [
        ("denoiser", "text_encoder", "is not the denoiser: it is the text encoder"),
        ("text_encoder", "denoiser", "is not the text encoder: it is the denoiser"),
        ("video_vae", "audio_vae", "is not the video VAE: it is the audio VAE"),
        ("audio_vae", "video_vae", "is not the audio VAE: it is the video VAE"),
        ("video_vae", "denoiser", "is not the video VAE: it is the denoiser"),
    ],
)
def test_a_file_in_a_wrong_slot_is_refused(paths, slot, other, words):
    with pytest.raises(CheckpointError, match=words):
        open_slots(model(paths, **{slot: str(paths[other])}))


@pytest.mark.parametrize("slot", ["text_encoder", "video_vae", "audio_vae"])
def test_another_size_needs_its_config(paths, slot, tmp_path):
    with pytest.raises(CheckpointError, match=rf"released sizes \(for another size give model.{slot}_config\)"):
        open_slots(model(paths, **{f"{slot}_config": None}))
    for bad in ("{", "[]", "null", "[" * 100_000, '{"text_config": []}'):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(CheckpointError, match=r"cannot be used as a config|is not of the sizes"):
            open_slots(model(paths, **{f"{slot}_config": str(tmp_path / "bad.json")}))
    with pytest.raises(CheckpointError, match="cannot be used as a config"):
        open_slots(model(paths, **{f"{slot}_config": str(tmp_path / "absent.json")}))


@pytest.mark.parametrize(
    ("slot", "change", "words"),
    [
        ("video_vae", {"decoder_num_layers": 3}, "layers 2, not 3"),
        ("audio_vae", {"decoder_dim": 256}, "decoder 128, not 256"),
        ("text_encoder", {"vision_config": {"depth": 9}}, "vision.layers 4, not 9"),
    ],
)
def test_a_config_must_be_the_files(paths, tmp_path, slot, change, words):
    config = json.loads(paths[f"{slot}_config"].read_text())
    for key, value in change.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        open_slots(model(paths, **{f"{slot}_config": str(tmp_path / "config.json")}))


def test_a_mistyped_order_of_rows(paths):
    with pytest.raises(ConfigError, match="did you mean 'interleaved'"):
        open_denoiser(paths["denoiser"], "interleave")


# --- the published example, and what opening costs


@pytest.mark.skipif(not GOLDEN.exists(), reason="no golden set beside the checkout")
def test_the_golden_set():
    slots = open_slots(
        SimpleNamespace(
            denoiser=GOLDEN / "h3_tiny_nvfp4.safetensors",
            text_encoder=GOLDEN / "qwen3vl_tiny_nvfp4_awq.safetensors",
            text_encoder_config=GOLDEN / "text_encoder_config.json",
            video_vae=GOLDEN / "video_vae_tiny_fp16.safetensors",
            video_vae_config=GOLDEN / "video_vae_config.json",
            audio_vae=GOLDEN / "audio_vae_tiny_fp32.safetensors",
            audio_vae_config=GOLDEN / "audio_vae_config.json",
            qkv_order="bands",
        )
    )
    dims = slots.denoiser.dims
    assert (dims.hidden, dims.heads, dims.head_dim, dims.ffn, dims.layers) == (160, 14, 32, 1024, 3)
    for state in slots[:4]:
        for name in state.table:
            assert state.tensor(name).float().isfinite().all(), name
        assert state.file.bytes_read == sum(state.tensor_bytes(name) for name in state.table)


@pytest.mark.skipif(not GOLDEN.exists(), reason="no golden set beside the checkout")
def test_tiny_files_are_like_the_golden_ones(paths):
    def pattern(name: str) -> str:
        return ".".join("*" if part.isdigit() else part for part in name.split("."))

    for slot in ("denoiser", "text_encoder", "video_vae", "audio_vae"):
        mine = TensorFile.open(paths[slot])
        theirs = TensorFile.open(GOLDEN / paths[slot].name)
        found, due = (
            {(pattern(name), info.dtype, len(info.shape)) for name, info in file.tensors.items()}
            for file in (mine, theirs)
        )
        assert found == due
        assert mine.metadata.keys() == theirs.metadata.keys()


def test_opening_needs_no_torch_and_reads_no_tensor(paths):
    code = f"""
import sys
from h3dist.checkpoint import comfy, shard, inspect
state = comfy.open_denoiser({str(paths["denoiser"])!r})
shard.rank_file_bytes(state, (0, 14), (0, 336), refiner=True)
inspect.describe({str(paths["text_encoder"])!r})
sys.exit("torch" in sys.modules or state.file.bytes_read)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("slot", "words"),
    [
        ("denoiser", "3 x blocks.*.attn.qkv_proj: nvfp4 [1344, 208]"),
        ("text_encoder", "50 x model.layers.*.mlp.down_proj: nvfp4 (full precision) [112, 144]"),
        ("text_encoder", "1 x model.embed_tokens: int8_tensorwise [512, 112]"),
        ("video_vae", "note: left out, as not used here: decoder.mask_token"),
        ("audio_vae", "other tensors: 917 F32"),
    ],
)
def test_a_file_in_words(paths, slot, words):
    described = describe(paths[slot])
    assert words in described
    assert str(paths[slot]) in described
