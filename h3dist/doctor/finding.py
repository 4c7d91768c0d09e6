"""One thing that the doctor found."""

from collections.abc import Iterable
from dataclasses import dataclass

LEVELS = ("ok", "note", "warning", "error")
EXIT_CODES = {"ok": 0, "note": 0, "warning": 1, "error": 2}


@dataclass(frozen=True)
class Finding:
    """What was found by a check, and what to do about it.

    error: a run as configured will fail or hang. warning: it may, or is slower than it need be. note: worth knowing.
    """

    check: str
    level: str
    what: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.level in LEVELS and bool(self.remedy) >= (self.level in ("warning", "error")), self


def exit_code(findings: Iterable[Finding]) -> int:
    """0: no problem; 1: warnings; 2: errors."""
    return max((EXIT_CODES[finding.level] for finding in findings), default=0)
