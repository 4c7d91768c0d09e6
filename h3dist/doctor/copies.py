"""The task of a child: does each GPU compute, and does what one GPU copies to another arrive?

On some PCIe machines copies between GPUs hang, or arrive as zeros with no error. Every byte is compared, and each
step is announced before it begins, so that the parent can name the one that hangs.
"""

import time
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

MIB = 1 << 20
CUDA_BYTES, CPU_BYTES = 16 * MIB, MIB
TIMES = 8  # copies that are timed
Copy = Callable[[Tensor, Tensor], object]  # from, into


def copies(*names: str) -> Iterator[dict[str, Any]]:
    """For each device that torch sees, or that `names` say, and for each ordered pair: what was wrong, and how fast."""
    devices = [torch.device(name) for name in names] or [
        torch.device("cuda", index) for index in range(torch.cuda.device_count())
    ]
    yield from check_copies(devices, lambda source, into: into.copy_(source))


def check_copies(devices: list[torch.device], copy: Copy) -> Iterator[dict[str, Any]]:
    """The same with `copy` as the way to fill one tensor from another."""
    for place, device in enumerate(devices):
        yield {"begin": [place]}
        yield {"device": place} | _outcome(lambda device=device: {"right": _computes(device)})
    sent = _random(CUDA_BYTES if any(device.type == "cuda" for device in devices) else CPU_BYTES)
    for a, b in permutations(range(len(devices)), 2):
        yield {"begin": [a, b]}
        yield {"pair": [a, b]} | _outcome(lambda a=a, b=b: _moves(sent, devices[a], devices[b], copy))


def _outcome(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` gives, or in words why it could not: a broken GPU must not hide the next one."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return {"full": True}
    except RuntimeError as error:
        return {"error": str(error).strip().splitlines()[0]}


def _computes(device: torch.device) -> bool:
    """Whether a small product is right: the first kernel shows a torch that is not built for the GPU."""
    whole = torch.arange(64.0, device=device).view(8, 8)
    return torch.equal((whole @ whole).cpu(), whole.cpu() @ whole.cpu())


def _random(size: int) -> Tensor:
    """Bytes of which none is zero."""
    return torch.randint(1, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def _moves(sent: Tensor, a: torch.device, b: torch.device, copy: Copy) -> dict[str, Any]:
    """Bytes that arrive wrong, whether nothing arrives, gigabytes a second. What was there before is zero."""
    source, into = sent.to(a), torch.zeros_like(sent, device=b)
    copy(source, into)
    came = into.cpu()
    wrong = int((came != sent).sum())
    return {"wrong": wrong, "zero": not came.any().item(), "size": sent.numel(), "gb_s": _rate(source, into, copy)}


def _rate(source: Tensor, into: Tensor, copy: Copy) -> float:
    begun = _now(source, into)
    for _ in range(TIMES):
        copy(source, into)
    return TIMES * source.nbytes / (_now(source, into) - begun) / 1e9


def _now(*tensors: Tensor) -> float:
    for tensor in tensors:
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
