"""transformers' whole Qwen3-VL with one of our files' weights, in float32, read by safetensors."""

import json
from pathlib import Path

import comfy_kitchen
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLModel


def dense_text_state(path: str | Path) -> dict[str, Tensor]:
    """transformers' name -> float32 tensor: quantised weights made dense, pre-scales multiplied in."""
    state = {}
    with safe_open(path, framework="pt") as file:
        keys = set(file.keys())
        extra = (".weight_scale", ".weight_scale_2", ".comfy_quant", ".pre_quant_scale")
        for key in keys:
            if key.endswith(extra):
                continue
            tensor, layer = file.get_tensor(key), key.removesuffix(".weight")
            if f"{layer}.weight_scale_2" in keys:
                scales = file.get_tensor(f"{layer}.weight_scale").view(torch.float8_e4m3fn)
                tensor = comfy_kitchen.dequantize_nvfp4(
                    tensor, file.get_tensor(f"{layer}.weight_scale_2"), scales, torch.float32
                )
            elif tensor.dtype == torch.int8:
                tensor = tensor.float() * file.get_tensor(f"{layer}.weight_scale")
            tensor = tensor.float()
            if f"{layer}.pre_quant_scale" in keys:
                tensor = tensor * file.get_tensor(f"{layer}.pre_quant_scale").float()
            state["language_model." + key.removeprefix("model.") if key.startswith("model.") else key] = tensor
    return state


def whole_text_model(path: str | Path, config: str | Path) -> Qwen3VLModel:
    """The model of the config's own depth; layers past the file's have random weights, which nothing reads."""
    torch.manual_seed(0)
    model = Qwen3VLModel(Qwen3VLConfig(**json.loads(Path(config).read_text())))
    state, own = dense_text_state(path), model.state_dict()
    cropped = {name: tensor[tuple(slice(side) for side in own[name].shape)] for name, tensor in state.items()}
    missing, unexpected = model.load_state_dict(cropped, strict=False)
    assert not unexpected, unexpected
    assert all(".layers.5" in name or "norm.weight" in name for name in missing), missing
    return model.float().eval().requires_grad_(False)
