"""The first call of a run, held against exact attention on a few of its heads: real q, k and v show what random ones
do not, and a kernel built for another GPU may give noise.

Shape letters: S all rows, h heads of one call, c those that are compared, D head size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h3dist.attention.backend import Attention, Backend
from h3dist.attention.sdpa import sdpa
from h3dist.errors import NumericsError

TILE = 128  # rows that kernels pad to: the last, partial one is compared by itself too
TAIL_SLACK = 2.0  # by how much that one's error may exceed the bound, being of few rows

Collect = Callable[[str, str], list[str]]  # (what, this rank's text) -> the texts of all ranks, on every rank


class Finding(NamedTuple):
    """One rank's comparison: relative 2-norms of the error over all rows and over the last tile; what is wrong."""

    error: float
    tail: float
    wrong: str | None


class Checked:
    """An attention whose first call is compared; every rank takes the same decision, since all call `collect` in it.

    Past the bound all raise NumericsError, or with `fallback` all go on with exact attention, this call included.
    `told` takes the largest errors of any rank, the bound, and why exact attention took over (None: it did not).
    """

    def __init__(
        self, backend: Backend, attention: Attention, collect: Collect, told: dict[str, Any], *, fallback: bool
    ) -> None:
        self._backend, self._attention, self._collect = backend, attention, collect
        self._told, self._fallback, self._fresh = told, fallback, True

    def __call__(self, q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        if self._fresh:
            self._fresh = False
            return self._first(q_ShD, k_ShD, v_ShD)
        return self._attention(q_ShD, k_ShD, v_ShD)

    def _first(self, q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor) -> Tensor:
        given = (q_ShD, k_ShD, v_ShD)
        kept = tuple(x.clone() for x in given) if self._fallback else None
        o_ShD, finding = compare(self._attention, *given, self._backend.bound or 0.0)
        texts = self._collect(f"the check of attention={self._backend.name}", json.dumps(finding))
        findings = [Finding(*json.loads(text)) for text in texts]
        wrong = next((f"rank {rank}: {found.wrong}" for rank, found in enumerate(findings) if found.wrong), None)
        self._told |= {
            "error": max(found.error for found in findings),
            "tail_error": max(found.tail for found in findings),
            "bound": self._backend.bound,
            "fell_back": wrong,
        }
        if wrong is None:
            assert o_ShD is not None
            return o_ShD
        if kept is None:
            raise NumericsError(
                f"attention={self._backend.name} is refused, {wrong}; attention=sdpa is exact, and "
                "attention.fallback=true goes on with it"
            )
        self._attention = sdpa
        return self._attention(*kept)


def compare(
    attention: Attention, q_ShD: Tensor, k_ShD: Tensor, v_ShD: Tensor, bound: float
) -> tuple[Tensor | None, Finding]:
    """The attention's output, None where it raised, and how far it is from exact on the first, middle and last head."""
    heads = sorted({0, q_ShD.shape[1] // 2, q_ShD.shape[1] - 1})
    given = (q_ShD, k_ShD, v_ShD)
    kept = [x[:, heads].contiguous() for x in given]
    exact_ScD = sdpa(*kept).float()
    try:
        o_ShD = attention(*given)
        found_ScD = o_ShD[:, heads].float()
    except Exception as error:  # of whatever class a kernel raises: the other ranks wait for the finding
        return None, Finding(-1.0, -1.0, f"it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    if o_ShD.shape != q_ShD.shape or o_ShD.dtype != q_ShD.dtype:
        return o_ShD, Finding(-1.0, -1.0, f"it gave {o_ShD.dtype} {list(o_ShD.shape)} for {list(q_ShD.shape)}")
    changed = [name for name, x, old in zip("qkv", given, kept, strict=True) if not _same(x[:, heads], old)]
    if changed:
        return o_ShD, Finding(-1.0, -1.0, f"it changes its input {', '.join(changed)} in place")
    if not bool(torch.isfinite(o_ShD).all()):
        return o_ShD, Finding(-1.0, -1.0, "its output holds NaN or infinity")
    last = q_ShD.shape[0] % TILE or min(TILE, q_ShD.shape[0])
    error = _relative(found_ScD, exact_ScD)
    tail = _relative(found_ScD[-last:], exact_ScD[-last:])
    return o_ShD, Finding(error, tail, _beyond(error, tail, bound))


def _beyond(error: float, tail: float, bound: float) -> str | None:
    """Names what is past the bound."""
    if not error <= bound:  # so that NaN is beyond it
        return f"its first call is {error:.3g} from exact attention (relative 2-norm), and {bound:g} is allowed"
    if not tail <= TAIL_SLACK * bound:
        return f"the last rows of its first call are {tail:.3g} from exact; {TAIL_SLACK * bound:g} is allowed"
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, so that NaN is itself: one in the input is not the backend's doing."""
    return torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8))


def _relative(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny)).item()
