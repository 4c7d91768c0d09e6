"""Tensor files that a run leaves behind: latents, intermediates, traces. Each is written whole, then renamed."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from h3dist.errors import OutputError, RequestError
from h3dist.outputs import remove

REQUEST_KEY = "h3dist_request"


def save_tensors(path: Path | str, tensors: Mapping[str, torch.Tensor], request: Mapping[str, object]) -> None:
    """Write tensors to `path` as safetensors with the request as JSON metadata. Raises `OutputError` on any failure."""
    # safetensors refuses tensors that share storage, as slices of one another do
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        Path(path).touch()
        mode = Path(path).stat().st_mode  # as the umask has it: safetensors' file would be ours alone to read
        save_file(whole, str(path), metadata={REQUEST_KEY: json.dumps(request, ensure_ascii=False)})
        Path(path).chmod(mode)
    except (OSError, SafetensorError) as error:
        remove([path])
        raise OutputError(f"cannot write {path}: {error}") from error


def latents(video_CThw: torch.Tensor, audio_C2A: torch.Tensor) -> dict[str, torch.Tensor]:
    """The two latents by the names they have in files: f32 [1, 24, T, h, w] and f32 [1, 32, 2, A]."""
    return {"video_latents": video_CThw.float(), "audio_latents": audio_C2A.float()}


def load_latents(path: Path | str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Read back what `output.latents` or a failed decode left: the two latents and the request that made them.

    Raises `RequestError` where the file is not one of ours.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in ("video_latents", "audio_latents")}
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path} holds no video_latents and audio_latents: {error}") from error
    if REQUEST_KEY not in metadata:
        raise RequestError(f"{path} does not say which request made it (no {REQUEST_KEY} in its metadata)")
    try:
        request = json.loads(metadata[REQUEST_KEY])
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise RequestError(f"{path}: {REQUEST_KEY} in its metadata is no JSON object")
    return found, request


def sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes as float32, row-major."""
    return hashlib.sha256(tensor.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()
