"""Whether SageAttention 2 is there and right: an import, and with a GPU one call against PyTorch's attention.

    python sage.py [--import-only]

Exits 0 when it is, 1 when it is not. Called while the image is built (import only) and when a pod starts.
"""

import sys

LIMIT = 0.05  # relative error of INT8 scores and FP8 values on normal data; a wrong kernel is far above


def import_fault() -> str:
    """Empty when the compiled package is there; the one on the package index is the older Triton version."""
    try:
        from importlib.metadata import version

        import sageattention
    except ImportError as error:
        return f"sageattention does not import: {error}"
    if not version("sageattention").startswith("2."):
        return f"sageattention {version('sageattention')} is not version 2"
    return "" if hasattr(sageattention, "sageattn") else "sageattention has no sageattn"


def call_fault() -> str:
    """Empty when one call on the first GPU agrees with PyTorch's own attention."""
    import torch
    from sageattention import sageattn
    from torch.nn.functional import scaled_dot_product_attention

    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 2, 512, 128, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    right = scaled_dot_product_attention(q, k, v).float()
    error = (sageattn(q, k, v, tensor_layout="HND").float() - right).norm() / right.norm()
    return "" if error < LIMIT else f"relative error {error:.3g} against scaled_dot_product_attention"


def main() -> int:
    fault = import_fault()
    if not fault and "--import-only" not in sys.argv:
        fault = call_fault()
    print(f"sageattention: {fault or 'ok'}")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
