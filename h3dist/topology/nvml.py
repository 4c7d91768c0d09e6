"""What NVML, the driver's library of facts about GPUs, answers: asked live, written down, or read from a recording.

Everything that is known of GPUs and their links goes through `Nvml.ask`, so that a recording of another machine
replays through the same code as the driver. GPUs are named "gpu0", their MIG slices "gpu0.0".
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from h3dist.errors import ConfigError

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND = 2, 3, 4, 6, 13
UNKNOWN_HERE = (INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND)
PLAIN: Mapping[str, Callable[[Any], Any]] = {  # answers that are no JSON values as they come
    "nvmlDeviceGetMemoryInfo": lambda memory: {"total": memory.total, "free": memory.free},
    "nvmlDeviceGetPciInfo": lambda info: _text(info.busId),
    "nvmlDeviceGetNvLinkRemotePciInfo": lambda info: _text(info.busId),
    "nvmlDeviceGetMemoryAffinity": list,
    "nvmlDeviceGetMigMode": list,
    "nvmlDeviceGetCudaComputeCapability": list,
}


class NvmlError(Exception):
    """NVML refuses an answer; `code` is its error code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Nvml(Protocol):
    """Whoever answers for NVML."""

    def ask(self, function: str, *arguments: str | int) -> Any:
        """The answer of NVML's `function` as JSON values. Raises NvmlError."""
        ...


def ask_maybe(nvml: Nvml, function: str, *arguments: str | int) -> Any:
    """The same, None where this GPU or driver does not know it. Raises NvmlError for what is really wrong."""
    try:
        return nvml.ask(function, *arguments)
    except NvmlError as error:
        if error.code in UNKNOWN_HERE:
            return None
        raise


class Driver:
    """The driver of this machine, by the binding `pynvml`."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding
        self._handles: dict[str, Any] = {}

    def ask(self, function: str, *arguments: str | int) -> Any:
        """As `Nvml.ask`. P2P indices go as plain numbers: the binding's NVML_P2P_CAPS_INDEX_READ is a tuple."""
        try:
            passed = [self._handle(a) if isinstance(a, str) else a for a in arguments]
            answer = getattr(self._binding, function)(*passed)
        except self._binding.NVMLError as error:
            raise NvmlError(error.value, str(error)) from None
        return PLAIN.get(function, _text)(answer)

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            self._handles[name] = self._find(*map(int, re.findall(r"\d+", name)))
        return self._handles[name]

    def _find(self, gpu: int, place: int | None = None) -> Any:
        if place is None:
            return self._binding.nvmlDeviceGetHandleByIndex(gpu)
        return self._binding.nvmlDeviceGetMigDeviceHandleByIndex(self._handle(f"gpu{gpu}"), place)


@contextmanager
def driver() -> Iterator[Driver]:
    """This machine's NVML, which is started by the first question, "nvmlInit"."""
    import pynvml

    try:
        yield Driver(pynvml)
    finally:
        with suppress(pynvml.NVMLError):  # it was never started
            pynvml.nvmlShutdown()


class Recorder:
    """Asks another and keeps every answer, refusals too, in `answers`: function -> arguments -> answer."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self.answers: dict[str, dict[str, Any]] = {}

    def ask(self, function: str, *arguments: str | int) -> Any:
        """As `Nvml.ask`."""
        kept = self.answers.setdefault(function, {})
        key = " ".join(map(str, arguments))
        try:
            kept[key] = self._nvml.ask(function, *arguments)
        except NvmlError as error:
            kept[key] = {"error": error.code, "text": error.text}
            raise
        return kept[key]


class Recording:
    """Answers as a `Recorder` kept them."""

    def __init__(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        self._answers = answers

    def ask(self, function: str, *arguments: str | int) -> Any:
        """As `Nvml.ask`. Raises ConfigError for a question that was not asked when the recording was made."""
        key = " ".join(map(str, arguments))
        try:
            answer = self._answers[function][key]
            if isinstance(answer, Mapping) and "error" in answer:
                raise NvmlError(answer["error"], answer["text"])
        except (KeyError, TypeError, AttributeError):
            raise ConfigError(f"the recording has no answer of {function} for {key!r}; record it again") from None
        return answer


def _text(answer: Any) -> Any:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
