"""float32 convolutions that are float32."""

from contextlib import AbstractContextManager

import torch


def exact_convolutions() -> AbstractContextManager[None]:
    """While it lasts convolutions are computed as such: by default cuDNN would round their inputs to TF32."""
    return torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
