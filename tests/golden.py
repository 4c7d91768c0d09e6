"""Expected results that other software made, beside the checkout where there are any, and how near we must come."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "t2va"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden set is not beside this checkout")


def check_golden(intermediates: Path) -> None:
    """Floats to 1e-4 in the 2-norm, frames to 4 levels and 999 of 1000 values to 1, all else equal."""
    found = load_file(intermediates)
    for name, want in load_file(GOLDEN / "expected.safetensors").items():
        got = found[name]
        assert got.shape == want.shape, name
        if name == "frames":
            levels = (got.int() - want.int()).abs()
            assert levels.max() <= 4 and (levels <= 1).float().mean() >= 0.999
        elif want.is_floating_point():
            assert (got.double() - want.double()).norm() <= 1e-4 * want.double().norm(), name
        else:
            assert torch.equal(got, want), name
