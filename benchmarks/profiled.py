"""The profiler's account of a device's work as plain records: each kernel, and in which part of a step it was launched.

The parts are ranges of the host, put around a denoiser's own calls; what the denoiser does stays as it is.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from kernel_times import ATTENTION, EXCHANGE, Kernel
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from h3dist.bench.timing import Clock
from h3dist.model.denoiser import Denoiser
from h3dist.model.exchange import Exchange

TURN = "trace.turn"
PARTS = (ATTENTION, EXCHANGE)  # the innermost first
CALL = re.compile(r"cu(da)?[A-Z]\w*$")  # cudaLaunchKernel, cuLaunchKernelEx


def mark(denoiser: Denoiser) -> None:
    """Puts the host's ranges around the exchange and, inside it, attention."""
    view = denoiser.view
    attention = ranged(ATTENTION, view.attention)
    denoiser.view = replace(view, attention=attention, exchange=Ranged(view.exchange))


class Ranged:
    """An exchange whose calls are ranges of the profiler."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return ranged(EXCHANGE, getattr(self._exchange, name))


def ranged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call inside a range."""

    def within(*arguments: Any) -> Any:
        with record_function(name):
            return call(*arguments)

    return within


def traced(work: Callable[[int], object], clock: Clock, times: int) -> profile:
    """The profile of work done so many times; it is told how often it was done before."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (clock.device.type == "cuda")
    clock.settle()
    with profile(activities=activities) as found:
        for turn in range(times):
            with record_function(TURN):
                work(turn)
        clock.settle()
    return found


def events_of(found: profile) -> Sequence[Any]:
    """A profile's events, of the host and of the device, as the profiler's library gives them."""
    return found.profiler.kineto_results.events()


def kernels_of(events: Sequence[Any], device: str, parts: Sequence[str] = PARTS) -> list[Kernel]:
    """The kernels and copies of a "cuda" device; of a "cpu" the operators that no other one calls. Each is within one
    of `parts`, the innermost first, or within none but the turn.

    The first turn of the work is left out: ranks begin it one after the other, and end it together.
    """
    host = [event for event in events if event.device_type() == DeviceType.CPU]
    ranges = {name: sorted(_span(event) for event in host if event.name() == name) for name in (*parts, TURN)}
    launched = outermost(host, ranges) if device == "cpu" else launches(events, host, ranges)
    begun = ranges[TURN][1][0]
    placed = [(event, inside(at, ranges)) for event, at in launched if at >= begun]
    own = busiest(placed) if device == "cuda" else None
    return [
        Kernel(event.name(), *(time / 1000 for time in _span(event)), within, own not in (None, _stream(event)))
        for event, within in placed
    ]


def busiest(placed: Sequence[tuple[Any, str | None]]) -> int | None:
    """The stream with the most time of kernels that are none of the exchange's."""
    busy: Counter[int] = Counter()
    for event, within in placed:
        if within != EXCHANGE:
            busy[_stream(event)] += event.end_ns() - event.start_ns()
    return max(busy, key=busy.__getitem__, default=None)


def _stream(event: Any) -> int:
    return event.device_resource_id()


def _span(event: Any) -> tuple[int, int]:
    """Nanoseconds."""
    return event.start_ns(), event.end_ns()


def outermost(host: Sequence[Any], ranges: Container[str]) -> Iterator[tuple[Any, int]]:
    """Of the host's operators those that lie in no other one of their thread, each with its beginning."""
    ends: dict[int, int] = {}
    operators = (event for event in host if event.name() not in ranges)
    for event in sorted(operators, key=lambda event: (event.start_ns(), -event.end_ns())):
        if event.start_ns() >= ends.get(event.start_thread_id(), 0):
            ends[event.start_thread_id()] = event.end_ns()
            yield event, event.start_ns()


def launches(events: Sequence[Any], host: Sequence[Any], ranges: Container[str]) -> Iterator[tuple[Any, int]]:
    """The device's events that are work, each with the time at which the host launched it.

    A kernel shares its correlation id with the call of CUDA that launched it, inside an operator or, as Triton's, in
    none; failing that, it names the operator around it, or its own beginning has to do. Operators count for themselves.
    """
    calls = {event.correlation_id(): event.start_ns() for event in host if called(event)}
    operators = {event.correlation_id(): event.start_ns() for event in host if not called(event)}
    for event in events:
        drawn = event.is_user_annotation() or event.name() in ranges or event.name().startswith("nccl:")
        if event.device_type() == DeviceType.CUDA and not drawn:
            linked = event.linked_correlation_id()  # 0 where it names none
            around = operators.get(linked, event.start_ns()) if linked else event.start_ns()
            yield event, calls.get(event.correlation_id(), around)


def called(event: Any) -> bool:
    """Whether it is a call of CUDA's runtime or driver: such a call may name no operator."""
    return bool(event.linked_correlation_id()) or CALL.match(event.name()) is not None


def inside(at: int, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> str | None:
    """The innermost range that a time lies in; ranges of one name do not overlap."""
    for name, spans in ranges.items():
        after = bisect_right(spans, (at, inf))
        if after and at <= spans[after - 1][1]:
            return name
    return None
