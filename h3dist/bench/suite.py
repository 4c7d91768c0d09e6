"""All parts at all shapes, one after the other, into one record that says what it is of.

A part that fails is recorded with its error, its memory given back, and the rest goes on. It has failed on all ranks if
it has on one: none begins the next before all are done, or a rank's next exchange would meet another's last one.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from h3dist import __version__
from h3dist.attending import capability_of
from h3dist.attention.registry import WHOLE
from h3dist.bench import parts, rival, variants
from h3dist.bench.ratios import ratios
from h3dist.bench.spec import Spec
from h3dist.bench.steps import TEXT_TAG, Measured, random_run, random_weights, run_steps, velocity
from h3dist.bench.timing import Clock, Timing
from h3dist.comm import Comm
from h3dist.errors import RankError
from h3dist.model.fused import choose_elementwise
from h3dist.model.weights import DenoiserWeights
from h3dist.packing import pack_t2va
from h3dist.plan import Layout, Plan
from h3dist.plan.gemm import NARROW
from h3dist.provenance import commit, version_of
from h3dist.topology import read_topology, visible_devices

FORM, VERSION = "h3dist-bench", 1
LEFT_OUT = "left out: the time was up"
ATTENTION_PACKAGES = ("flash-attn", "flash-attn-4", "sageattention", "sageattn3", "nvidia-cudnn-frontend")


@dataclass
class Suite:
    """One rank's way through a spec. `keep` is called with the record whenever more of it is there; rank 0's counts."""

    spec: Spec
    layout: Layout
    comm: Comm
    device: torch.device
    keep: Callable[[Mapping[str, Any]], None] = lambda record: None
    begun: float = field(default_factory=time.monotonic)
    _velocities: dict[int, torch.Tensor] = field(default_factory=dict)  # of the plain steps, by rows

    def run(self) -> dict[str, Any]:
        """Our parts and plain steps at every shape, then diffusers' model, then steps done otherwise."""
        record = {
            "form": FORM,
            "version": VERSION,
            "spec": asdict(self.spec),
            "layout": asdict(self.layout),
            "dtype": self.dtype,
            "environment": environment(self.device) | {"links": self._links()},
            "shapes": [],
        }
        for shape in self.spec.shapes:
            record["shapes"].append(self._shape(shape))
            self.keep(record)
        if self.spec.diffusers and self.layout.world == 1:
            self._rivals(record)
        if self.spec.variants:
            self._variants(record)
        record["seconds"] = round(time.monotonic() - self.begun, 1)
        self.keep(record)
        return record

    @property
    def dtype(self) -> str:
        """The compute dtype: as asked, else bfloat16 on CUDA and float32 on a CPU."""
        if self.spec.dtype != "auto":
            return self.spec.dtype
        return "bfloat16" if self.device.type == "cuda" else "float32"

    def _links(self) -> list[str]:
        """The kinds of links between this machine's visible GPUs, where several ranks use them."""
        if self.device.type != "cuda" or self.layout.world == 1:
            return []
        shown = {gpu.index for gpu in visible_devices()[: self.layout.world]}
        return sorted({link.kind for link in read_topology().links if {link.a, link.b} <= shown})

    def _plan(self, shape: str, gemm: str = "auto") -> Plan:
        common = {"dtype": self.dtype, "capability": capability_of(self.device), "steps": self.spec.repeats + 1}
        return self.spec.plan(shape, self.layout, **common, gemm=gemm)

    def _shape(self, shape: str) -> dict[str, Any]:
        plan = self._plan(shape)
        entry: dict[str, Any] = {
            "shape": shape,
            "rows": plan.rows,
            "blocks": plan.dims.layers,
            "fp4": plan.fp4,
            "attention": plan.attention,
        }
        entry |= {
            "parts": {},
            "variants": {},
            "failed": {},
            "absent": {},
            "seconds_in": round(time.monotonic() - self.begun, 1),
        }
        if self.spec.parts:
            self._measure(plan, entry)
        self._free()
        entry["ratios"] = ratios(entry)
        return entry

    def _measure(self, plan: Plan, entry: dict[str, Any]) -> None:
        """Our parts, on weights that are gone on return."""
        share, clock = plan.shares[self.comm.rank], Clock(self.device, self.spec.repeats)
        held: list[parts.Bench] = []

        def make() -> dict[str, Any]:
            begun = time.monotonic()
            denoiser = random_run(plan, self.comm, self.device, seed=self.spec.seed)
            held.append(parts.Bench(plan, share, denoiser, clock))
            return {"seconds": time.monotonic() - begun}

        self._do(entry, "weights", make)
        for bench in held:
            entry["absent"] = {b.name: b.refuses(bench.task) or b.lacks(bench.task) for b in WHOLE}
            entry["absent"] = {name: reason for name, reason in entry["absent"].items() if reason}
            for name, work in self._parts(bench).items():
                self._do(entry, name, work)
            if self.spec.floor_only:
                self._do(entry, "velocity", lambda bench=bench: self._velocity(bench))
            else:
                self._do(entry, "step", lambda bench=bench: self._step(bench))

    def _vary(self, entry: dict[str, Any], variant: variants.Variant, weights: DenoiserWeights, plan: Plan) -> None:
        """One way to do a step otherwise, or why there is none."""
        plain = self._velocities.get(plan.rows)

        def work() -> dict[str, Any]:
            return variants.measure(variant, weights, plan, self.comm, self.spec.seed, plain)

        self._do(entry, variant.name, work, into="variants")

    def _variants(self, record: dict[str, Any]) -> None:
        """The exact ones at every shape, on weights rounded to fp8, then to int8, then from the host's memory."""
        asked = variants.choose(self.spec.variants)
        for kept in ((gemm, offload) for offload in (False, True) for gemm in ("auto", *NARROW)):
            chosen = [variant for variant in asked if variant.kept == kept]
            for entry in record["shapes"] if chosen else ():
                self._on_weights(entry, chosen)
                entry["ratios"] = ratios(entry)
                self.keep(record)

    def _on_weights(self, entry: dict[str, Any], chosen: Sequence[variants.Variant]) -> None:
        """Variants that take the same weights, which are gone on return."""
        made: list[tuple[Plan, DenoiserWeights]] = []
        gemm, offload = chosen[0].kept

        def make() -> dict[str, Any]:
            begun, plan = time.monotonic(), self._plan(entry["shape"], gemm)
            options = {"seed": self.spec.seed, "offload": offload}
            made.append((plan, random_weights(plan, self.comm.rank, self.device, **options)))
            return {"seconds": time.monotonic() - begun}

        self._do(entry, f"weights.{gemm}{'.offload' if offload else ''}", make)
        for plan, weights in made:
            for variant in chosen:
                self._vary(entry, variant, weights, plan)
        made.clear()
        self._free()

    def _parts(self, bench: parts.Bench) -> dict[str, Callable[[], Any]]:
        """What can be taken apart here, in the order of a step."""
        found: dict[str, Callable[[], Any]] = {"products": lambda: parts.products(bench)}
        if bench.plan.fp4:
            found["products_fp4"] = lambda: parts.fp4_products(bench)
        usable = [b for b in WHOLE if b.refuses(bench.task) is None and b.lacks(bench.task) is None]
        if self.spec.floor_only:
            exact = [backend for backend in usable if backend.exact]
            return found | {f"attention.{b.name}": partial(parts.attention, bench, b) for b in exact}
        if self.spec.variants:
            found |= {f"products_{gemm}": partial(parts.narrow_products, bench, gemm) for gemm in NARROW}
        found |= {f"attention.{backend.name}": partial(parts.attention, bench, backend) for backend in usable}
        if self.device.type == "cuda":
            found["host"] = lambda: parts.host(bench)
        found |= {
            "dequantise": lambda: parts.dequantise(bench),
            "elementwise": lambda: parts.elementwise(bench),
            "copy": lambda: parts.copy(bench),
        }
        if self.spec.variants:
            found["elementwise.fused"] = lambda: parts.elementwise(bench, choose_elementwise("on", self.device))
        if self.layout.world > 1:
            found["exchange"] = lambda: parts.exchange(bench)
        return found

    def _step(self, bench: parts.Bench) -> dict[str, Any]:
        measured: Measured = run_steps(bench.denoiser, bench.plan, self.comm, seed=self.spec.seed)
        if self.spec.variants:
            self._velocity(bench)
        timing = Timing(measured.seconds[1:])
        return timing.as_dict(first=measured.seconds[0], resident_bytes=measured.resident, peak_bytes=measured.peak) | {
            "sha256": measured.sha256,
            "sent": measured.sent,
        }

    def _velocity(self, bench: parts.Bench) -> dict[str, Any]:
        """Of the plain step, for the errors of others."""
        self._velocities[bench.plan.rows] = velocity(bench.denoiser, bench.plan, seed=self.spec.seed)
        return {}

    def _rivals(self, record: dict[str, Any]) -> None:
        """diffusers' model, made once, at every shape."""
        small, dtype = self.spec.size == "small", getattr(torch, self.dtype)
        held: dict[str, Any] = {}

        def make() -> dict[str, Any]:
            begun = time.monotonic()
            held["model"] = rival.build(self.spec.dims, self.device, dtype, small=small)
            held["attention"] = rival.choose_attention(held["model"], self.device)
            size = sum(p.nbytes for p in held["model"].parameters())
            return {"made_in": round(time.monotonic() - begun, 1), "parameter_bytes": size}

        record |= {"parts": {}, "failed": {}}
        self._do(record, "diffusers", make)
        for entry in record["shapes"] if held else ():
            plan = self._plan(entry["shape"])

            def once(plan: Plan = plan) -> dict[str, Any]:
                packing = pack_t2va(plan.geometry, (TEXT_TAG,) * plan.text_rows)
                call = rival.step(held["model"], plan.dims, packing, self.device)
                timing = Clock(self.device, self.spec.repeats).time(call, warm=1)
                return timing.as_dict() | {"attention": held["attention"]}

            self._do(entry, "diffusers", once)
            entry["ratios"] = ratios(entry)
            self.keep(record)
        held.clear()
        self._free()

    def _do(self, entry: dict[str, Any], name: str, work: Callable[[], Any], *, into: str = "parts") -> None:
        """One part, or why there is none."""
        if self.comm.rank == 0:
            print(f"h3dist: {time.monotonic() - self.begun:.0f} s: {name}", file=sys.stderr, flush=True)
        if self.layout.world == 1 and time.monotonic() - self.begun > self.spec.limit:
            entry["failed"][name] = LEFT_OUT
            return
        made, failed = None, ""
        try:
            made = work()
        except RankError:
            raise
        except Exception as error:  # whatever it is, the other parts are worth having
            failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        told = [text for text in map(json.loads, self.comm.collect(name, json.dumps(failed))) if text]
        if told:
            entry["failed"][name] = failed or told[0]
        else:
            entry[into][name] = made
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures are of: device, versions, commit, time."""
    cuda = device.type == "cuda"
    return {
        "made": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else None,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "h3dist": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "packages": {name: version_of(name) for name in ("diffusers", "comfy-kitchen", "triton", *ATTENTION_PACKAGES)},
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
