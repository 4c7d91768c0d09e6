"""Short tasks of a child: the machine's recording, what torch was built for, one encoded frame."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIDE = 64  # pixels of the frame that is encoded


def machine() -> Iterator[dict[str, Any]]:
    """The recording of this machine. A driver that hangs, hangs here."""
    from h3dist.topology import record

    yield {"recording": record()}


def torch() -> Iterator[dict[str, Any]]:
    """torch's version and those that it was built with, and the devices it finds."""
    import torch

    cuda = torch.version.cuda is not None
    yield {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "archs": torch.cuda.get_arch_list() if cuda else [],
        "available": torch.cuda.is_available(),
        "devices": torch.cuda.device_count(),
    }


def encoders() -> Iterator[dict[str, Any]]:
    """Bytes of a film of one frame with its sound, by libx264 and aac, written as a run writes it."""
    import av
    import numpy as np

    from h3dist.geometry import audio_samples
    from h3dist.media.mp4 import write_mp4

    random = np.random.default_rng(0)
    frame = random.integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8)
    sound = random.uniform(-0.1, 0.1, (2, audio_samples(1))).astype(np.float32)
    with tempfile.TemporaryDirectory(prefix="h3dist-doctor-") as folder:
        path = Path(folder, "frame.mp4")
        write_mp4(path, [frame], sound, width=SIDE, height=SIDE, frames=1, metadata={})
        yield {"encoded": path.stat().st_size, "av": av.__version__}
