"""Decides a run before it starts: the layout, its GPUs and what that costs, on this machine or one that is not here.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from h3dist.conditions import as_told
from h3dist.config import Config
from h3dist.errors import PlanError
from h3dist.intake import read_request
from h3dist.plan import Layout, Plan, check_memory, make_layout
from h3dist.plan.choose import Choice, Option, Weigher, choose
from h3dist.plan.compare import TABLE_COUNTS, table_dict, table_text
from h3dist.plan.exchange import open_exchanges
from h3dist.plan.explain import as_dict, count_words, reasons
from h3dist.plan.machine import Machine
from h3dist.plan.rates import load_rates
from h3dist.preflight import Facts, encoders, facts_ahead, facts_of, plan_on, read_aloud, worth_telling
from h3dist.relief import cuts
from h3dist.request import Resolved
from h3dist.text.presentation import vision_rows
from h3dist.text.tokenizer import count_tokens
from h3dist.topology import free_host_memory, load_topology, read_topology, visible_devices


@dataclass(frozen=True)
class Decision:
    """The plan of a run, the choice behind it, and what to tell the user. The plan alone is what ranks agree on."""

    plan: Plan
    choice: Choice
    notes: tuple[str, ...]

    @property
    def visible(self) -> str | None:
        """A value for CUDA_VISIBLE_DEVICES that gives each rank its GPU; None where each takes the next one anyway."""
        seats, gpus = self.choice.taken.seats, self.choice.machine.gpus
        if not gpus or seats == self.choice.machine.seats(len(seats)):
            return None
        return ",".join(gpus[seat].uuid for seat in seats)

    def text(self) -> str:
        """The plan as a table for people, and why."""
        return "\n".join([self.plan.text(), "why", *(f"- {line}" for line in reasons(self.choice))])

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values, with the rows and bytes of each condition, and the choice."""
        channels = self.plan.dims.video_channels, self.plan.dims.audio_channels
        conditions = [as_told(condition, *channels) for condition in self.plan.conditions]
        told = {"conditions": conditions, "digest": self.plan.digest, "choice": as_dict(self.choice)}
        return self.plan.as_dict() | told


@dataclass(frozen=True)
class Comparison:
    """The best layout of several numbers of ranks."""

    options: tuple[Option, ...]
    title: str
    notes: tuple[str, ...]

    def text(self) -> str:
        """A Markdown table under a title."""
        return f"{self.title}\n\n{table_text(self.options)}"

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {"title": self.title, "rows": table_dict(self.options)}


@dataclass(frozen=True)
class Ahead:
    """A machine to plan for: GPUs of a class by name, bytes of each, their links in a file, how many ranks."""

    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: int | None = None
    links: str | None = None

    @property
    def imagined(self) -> bool:
        """Whether it is another machine than this one."""
        return not (self.gpu is None and self.gpu_memory is None and self.links is None)


def decide_run(config: Config, request: Mapping[str, Any], gpus: int | None = None) -> Decision:
    """The decision for a run that is about to start on this machine.

    Every file must be there and whole; the memory that is free must do. Raises `CheckpointError`, `PlanError` and
    what a bad request raises.
    """
    from h3dist.checkpoint.comfy import open_slots

    resolved = read_request(config, request)
    slots = open_slots(config.model)
    facts = facts_of(slots, count_tokens(config.model.tokenizer, *read_aloud(config, resolved)))
    machine = this_machine(config)
    decision = _decide(config, resolved, facts, machine, counts(config, gpus, machine))
    fewer = count_words(decision.choice) if decision.plan.layout.world < len(machine.gpus) and gpus is None else ()
    return replace(decision, notes=(*worth_telling(slots), *fewer))


def decide_ahead(config: Config, request: Mapping[str, Any], ahead: Ahead) -> Decision:
    """The decision for a run on a machine one may not have: no weights and no GPUs are needed.

    Files that are there are used; for others the released sizes stand in, which `notes` say. Where memory is known, a
    plan that does not fit raises `PlanError`.
    """
    resolved, facts, machine = _foresee(config, request, ahead)
    decision = _decide(config, resolved, facts, machine, counts(config, ahead.gpus, machine))
    return replace(decision, notes=(*decision.notes, *facts.notes))


def compare_ahead(config: Config, request: Mapping[str, Any], ahead: Ahead) -> Comparison:
    """The best layout of 1, 2, 4, 6 and 8 ranks, as many as the machine has. Raises as `decide_ahead`."""
    most = ahead.gpus or max(TABLE_COUNTS)
    resolved, facts, machine = _foresee(config, request, replace(ahead, gpus=most))
    if machine.gpus:
        most = min(most, len(machine.gpus))
    numbers = [count for count in TABLE_COUNTS if count <= most]
    plan = partial(plan_on, config, resolved, facts, device=machine.device, capability=machine.capability)
    weigher = Weigher(plan(Layout()), machine, load_rates(), open_exchanges(**vars(config.exchange)))
    options = tuple(choose(weigher, [count], _fixed(config, count, facts)).taken for count in numbers)
    geometry, gpu = resolved.geometry, machine.gpus[0].name if machine.gpus else machine.device
    size = f"{geometry.width}x{geometry.height}, {geometry.frames} frames, {weigher.base.rows} rows"
    return Comparison(options, f"{gpu}: {size}, attention {weigher.base.attention}, predicted", facts.notes)


def this_machine(config: Config) -> Machine:
    """The GPUs that the configuration and CUDA_VISIBLE_DEVICES show, or the processor."""
    gpus = () if config.runtime.device == "cpu" else visible_devices()
    if not gpus:
        return Machine(host_free=free_host_memory())
    shown = {gpu.index for gpu in gpus}
    links = read_topology().links if len(gpus) > 1 else ()
    return Machine(gpus, tuple(link for link in links if {link.a, link.b} <= shown))


def foreseen_machine(config: Config, ahead: Ahead) -> Machine:
    """The machine that was described, else this one if it has GPUs enough, else one of which nothing is known.

    Raises `ConfigError` for a name without rates and a file that holds no topology, `PlanError` for too few GPUs.
    """
    if ahead.links:
        return _from_file(ahead)
    if ahead.imagined:
        rates = load_rates().named(ahead.gpu) if ahead.gpu else None
        memory = ahead.gpu_memory or (rates.memory if rates else None) or 0
        return Machine.imagined(ahead.gpus or 1, rates, memory)
    machine = this_machine(config)
    if config.runtime.device != "cpu" and len(machine.gpus) < (ahead.gpus or 1):
        return Machine()
    return machine


def _from_file(ahead: Ahead) -> Machine:
    topology = load_topology(Path(ahead.links or "")).visible(None)
    if not topology.devices:
        return Machine(host_free=topology.host_memory_free or topology.host_memory)
    machine = Machine.of(topology)
    rates = load_rates().named(ahead.gpu) if ahead.gpu else None
    gpus = machine.gpus
    if rates:
        like = {"name": rates.name, "capability": rates.capability, "memory_free": rates.memory}
        gpus = tuple(replace(gpu, memory_total=rates.memory, **like) for gpu in gpus)
    if ahead.gpu_memory:
        gpus = tuple(replace(gpu, memory_total=ahead.gpu_memory, memory_free=ahead.gpu_memory) for gpu in gpus)
    if ahead.gpus and ahead.gpus > len(gpus):
        raise PlanError(f"--gpus {ahead.gpus}: {ahead.links} describes {len(gpus)}; use --gpus {len(gpus)} or fewer")
    return replace(machine, gpus=gpus)


def counts(config: Config, gpus: int | None, machine: Machine) -> Sequence[int]:
    """The numbers of ranks that may be chosen from.

    As asked; else what the layout's degrees multiply to; else all GPUs, or under parallel=auto any number of them.
    """
    parallel = config.parallel
    if gpus is not None:
        return (gpus,)
    if parallel.mode == "single":
        return (1,)
    if parallel.sp is not None and parallel.tp is not None:
        return (parallel.sp * parallel.tp,)
    most = max(1, len(machine.gpus))
    return range(1, most + 1) if _free(config) else (most,)


def _free(config: Config) -> bool:
    """Whether the layout is the planner's to choose."""
    parallel = config.parallel
    return parallel.mode == "auto" and parallel.sp is None and parallel.tp is None


def _fixed(config: Config, count: int, facts: Facts) -> Layout | None:
    """The layout that the configuration names for `count` ranks; None where it is the planner's to choose."""
    parallel = config.parallel
    layout = make_layout(parallel.mode, count, parallel.sp, parallel.tp, facts.dims, dp=parallel.dp)
    return None if _free(config) else layout


def _foresee(config: Config, request: Mapping[str, Any], ahead: Ahead) -> tuple[Resolved, Facts, Machine]:
    resolved = read_request(config, request)
    return resolved, facts_ahead(config, read_aloud(config, resolved)), foreseen_machine(config, ahead)


def _decide(config: Config, resolved: Resolved, facts: Facts, machine: Machine, numbers: Sequence[int]) -> Decision:
    """The choice among `numbers` of ranks, with its plan held against the memory that is free.

    Where the text encoder may lie spread over ranks, it does if nothing else fits.
    """
    plan = partial(plan_on, config, resolved, facts, device=machine.device, capability=machine.capability)
    fixed, exchanges = _fixed(config, max(numbers), facts), open_exchanges(**vars(config.exchange))

    def chosen(encode: str) -> Choice:
        base = plan(fixed or Layout(), encode=encode)
        return choose(Weigher(base, machine, load_rates(), exchanges), numbers, fixed)

    first, *others = map(chosen, encoders(config))
    choice = first if first.taken.fits else next((other for other in others if other.taken.fits), first)
    taken = choice.taken.plan
    made = plan(taken.layout, exchange=taken.exchange, encode=taken.encode.text)
    if machine.known:
        smaller = cuts(resolved, config.sampler.noise, facts.text_rows)
        check_memory(made, machine.free(choice.taken.seats), smaller)
    shown = vision_rows(made.conditions, config.sampler.noise)
    notes = [f"{shown} of the {made.text_rows} text rows show keyframes and references"] if shown else []
    if choice is not first:
        notes.append("encode=auto is tp here: rank 0's memory does not hold the whole text encoder")
    return Decision(made, choice, tuple(notes))
