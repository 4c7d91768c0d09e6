"""From a request to an MP4: the stages in order, on every rank. Read this file first.

    request -> plan -> encode -> pack -> denoise -> decode -> mux

Each stage takes the record before it and gives a new frozen one. Rank 0 alone reads the request and muxes; rank 0
encodes the text, or all do; all ranks denoise; rank 0 decodes, or all do. A stage ends in an agreement: all go on, or
all leave with the first error.

Shape letters: L text rows, t text encoder width, C hidden, T h w latent frames, height and width, A audio latents
a channel.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h3dist import __version__
from h3dist.attending import agree_on_attention, begin_attention, capturing, task_of
from h3dist.attention.backend import Attention
from h3dist.checkpoint.comfy import DenoiserFile, open_denoiser, open_slots
from h3dist.comm import Comm
from h3dist.comm.forms import choose_forms
from h3dist.conditioning import encode_conditions
from h3dist.config import Config
from h3dist.decoding import Clean, assist, decode_alone, decode_together, vaes_for
from h3dist.deliver import deliver, delivery
from h3dist.encoding import MediaWork, assist_media, encode_media
from h3dist.fusing import agree_on_elementwise
from h3dist.intake import read_request
from h3dist.material import read_material
from h3dist.model.denoiser import Denoiser
from h3dist.model.elementwise import PLAIN
from h3dist.model.exchange import Alone
from h3dist.model.graphed import GraphedDenoiser
from h3dist.model.linear import choose_linear, linear_of_run
from h3dist.model.modulation import tables
from h3dist.model.packed import packing
from h3dist.model.refiner import refine_text
from h3dist.model.weights import load_denoiser
from h3dist.outputs import Outputs
from h3dist.packing import pack as pack_sequence
from h3dist.plan import ExchangePlan, Layout, Plan, check_memory, make_layout, schedule_decode
from h3dist.preflight import Facts, compute_dtype, facts_of, plan_on, read_aloud
from h3dist.progress import Steps
from h3dist.records import Denoised, Packed, Prepared, Started
from h3dist.relief import cuts
from h3dist.request import Resolved
from h3dist.sampling.noise import draw
from h3dist.sampling.samplers import sample
from h3dist.sampling.schedules import Schedule, make_schedule
from h3dist.sidecar import RankReport, report_of
from h3dist.site import Site, all_cores, free_memory, pick_device
from h3dist.status import StatusFile
from h3dist.text.encoder import TextEncoder
from h3dist.text.presentation import present
from h3dist.text.together import encode_together, encoder_for
from h3dist.text.tokenizer import load_tokenizer, tokenize
from h3dist.text.vision import Vision, look
from h3dist.topology import Ranks, visible_devices
from h3dist.vae.choice import forms_for


def run(config: Config, job: Mapping[str, Any] | None, ranks: Ranks) -> None:
    """Make the clip of `job` on this rank and its peers. Under plain torchrun only rank 0 has a job.

    Raises what any stage raises, on every rank.
    """
    dfile = open_denoiser(config.model.denoiser, config.model.qkv_order)
    layout = choose_layout(config, job, ranks, dfile)
    device = pick_device(config, ranks)
    runtime = config.runtime
    with Comm.connect(
        ranks,
        layout,
        device,
        backend=runtime.backend,
        timeout=runtime.timeout,
        stage_timeout=runtime.stage_timeout,
        transport=config.exchange.transport,
    ) as comm:
        site = Site(config, ranks, device, comm, *_told(job, ranks))
        started = start(site, job, dfile)
        decode(site, denoise(site, pack(prepare(site, started), site)))


def choose_layout(config: Config, job: Mapping[str, Any] | None, ranks: Ranks, dfile: DenoiserFile) -> Layout:
    """The launcher's choice, which weighed memory; under plain torchrun what the configuration says."""
    if job and job.get("layout"):
        return Layout(**job["layout"])
    parallel = config.parallel
    return make_layout(parallel.mode, ranks.world, parallel.sp, parallel.tp, dfile.dims, dp=parallel.dp)


def _told(job: Mapping[str, Any] | None, ranks: Ranks) -> tuple[Outputs | None, StatusFile | None]:
    if job is None:
        return None, None
    status = StatusFile.of(job["status_dir"], ranks.rank) if job["status_dir"] else None
    return Outputs(**job["output"]) if ranks.rank == 0 else None, status


def start(site: Site, job: Mapping[str, Any] | None, dfile: DenoiserFile) -> Started:
    """Agree on code, configuration, checkpoint, request and plan, before any weight is read."""
    with site.stage("start"):
        told = read_job(site, job) if site.first else None
    agree_on_setting(site, dfile)
    slots = told.pop("slots") if told else None
    told = site.comm.share(told)
    with site.stage("plan"):
        facts = Facts(dfile.dims, dfile, told["sizes"], len(told["presentation"].ids), (), told["text"])
        plan = plan_for(site, told["resolved"], facts, told["exchange"], told["encode"])
        schedule = schedule_of(site.config, told["resolved"].steps)
        vaes = vaes_for(plan, slots, site.config.model)
        text = encoder_for(plan.encode, slots, site.config.model)
    site.comm.same("the plan", plan.digest)
    if plan.encode.spread:
        site.comm.same("the text encoder's header", text.file.header_hash)
    if plan.decode.parallel or plan.encode.parallel:
        site.comm.same("the VAEs' headers", [state.file.header_hash for state in vaes])
    return Started(dfile, slots, text, vaes, told["resolved"], told["presentation"], plan, schedule)


def read_job(site: Site, job: Mapping[str, Any] | None) -> dict[str, Any]:
    """Rank 0 alone: the request, the other checkpoints' headers, the prompt's tokens."""
    assert job is not None, "rank 0 has the job"
    resolved = replace(read_request(site.config, job["request"]), notes=tuple(job.get("notes", ())))
    slots = open_slots(site.config.model)
    tokenizer = load_tokenizer(site.config.model.tokenizer)
    presentation = present(read_aloud(site.config, resolved), partial(tokenize, tokenizer))
    facts = facts_of(slots, len(presentation.ids))
    exchange = ExchangePlan(**job["exchange"]) if job.get("exchange") else None
    told = {"resolved": resolved, "slots": slots, "presentation": presentation}
    return told | {"sizes": facts.sizes, "text": facts.text, "exchange": exchange, "encode": job.get("encode")}


def agree_on_setting(site: Site, dfile: DenoiserFile) -> None:
    """Every rank runs the same code with the same configuration on the same denoiser. Raises `RankError`."""
    parts = "runtime", "parallel", "attention", "exchange", "sampler", "encode", "decode"
    shared = {part: asdict(getattr(site.config, part)) for part in parts}
    site.comm.same("the version of h3dist", __version__)
    site.comm.same("the version of torch", torch.__version__)
    site.comm.same("the configuration", shared)
    site.comm.same("the denoiser's header", dfile.file.header_hash)


def plan_for(
    site: Site, resolved: Resolved, facts: Facts, exchange: ExchangePlan | None = None, encode: str | None = None
) -> Plan:
    """The plan as this rank computes it, with the launcher's choice of an exchange and of who encodes, if there is one.

    Raises `PlanError` where it does not fit this rank's memory.
    """
    device = {"device": site.device.type, "capability": lowest_capability(site.device)}
    plan = plan_on(site.config, resolved, facts, site.comm.layout, **device, exchange=exchange, encode=encode)
    free = free_memory(site.device, site.ranks)
    if free is not None:
        smaller = cuts(resolved, site.config.sampler.noise, facts.text_rows)
        check_memory(plan, [free] * plan.layout.world, smaller)
    return plan


def lowest_capability(device: torch.device) -> tuple[int, int] | None:
    """Of the GPUs that ranks use, the same on every rank; None on a CPU."""
    if device.type != "cuda":
        return None
    return min(gpu.capability for gpu in visible_devices())


def schedule_of(config: Config, steps: int) -> Schedule:
    """The noise levels of a run of `steps` evaluations."""
    sampler = config.sampler
    return make_schedule(
        sampler.schedule,
        steps,
        video_shift=sampler.video_shift,
        audio_shift=sampler.audio_shift,
        beta_a=sampler.beta_a,
        beta_b=sampler.beta_b,
    )


def prepare(site: Site, started: Started) -> Prepared:
    """Text and conditions are encoded, in float32; then a rank reads its weights, at once if it has no part in that."""
    plan, dtype = started.plan, getattr(torch, compute_dtype(site.config, site.device.type))
    attention = agree_on_attention(site.comm, plan.attention, task_of(plan, site.ranks.rank, site.device))
    with site.stage("encode"):
        elementwise = agree_on_elementwise(site.comm, site.config.runtime.fused, site.device)
        choose_linear(lowest_capability(site.device), Alone(), dtype, plan.gemm)
        if plan.decode.fast:
            forms_for(site.device, plan.decode.gemm)  # what any of these lacks is said by now
        states_Lt, rows_LC, kept = encode(site, started)
        share = plan.shares[site.ranks.rank]
        kept_as = {"gemm": plan.gemm, "offload": plan.stored.resident_blocks is not None}
        weights = load_denoiser(started.dfile, share, device=site.device, dtype=dtype, **kept_as)
        times = started.schedule.times_v, started.schedule.times_a
        modulation = tables(started.dfile, *times, device=site.device, dtype=dtype, kept=bool(plan.conditions))
    shape = (plan.text_rows, plan.dims.hidden)
    rows_LC = site.comm.broadcast_text(rows_LC, shape, dtype)
    kept = site.comm.broadcast_conditions(kept, plan.kept_shapes)
    return Prepared(started, states_Lt, rows_LC, kept, weights, modulation, attention, elementwise)


def encode(site: Site, started: Started) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor] | None]:
    """On rank 0 the presentation's hidden states [L, t], refined rows [L, C] and the conditions' rows by kind; all f32.

    One model at a time is in memory: the text encoder, the refiner, the VAEs' encoders.
    """
    slots, resolved, contract = started.slots, started.resolved, site.config.sampler.noise
    work = MediaWork(started.plan, site.comm, started.vaes, site.config.model) if started.plan.encode.parallel else None
    if slots is None:
        if started.plan.encode.spread:
            encode_text(site, started, {})
        if work:
            assist_media(work)
        return None, None, None
    with all_cores():
        material = read_material(resolved, started.plan.conditions)
        seen = look([(item.condition, item.frames) for item in material if item.frames is not None], contract)
    states_Lt = encode_text(site, started, seen)
    with all_cores():
        rows_LC = refine_text(started.dfile, states_Lt, site.device)
    drawn = {"contract": contract, "seed": resolved.seed}
    if work:
        return states_Lt, rows_LC, encode_media(work, material, **drawn)
    with all_cores():
        kept = encode_conditions(material, slots, site.config.model, device=site.device, **drawn)
        return states_Lt, rows_LC, kept


def encode_text(site: Site, started: Started, seen: Mapping[str, Vision]) -> Tensor:
    """The presentation's hidden states f32 [L, t], of rank 0 alone or of all ranks; `seen` is rank 0's."""
    config, presentation = site.config.model.text_encoder_config, started.presentation
    if started.plan.encode.spread:
        return encode_together(started.text, config, started.plan.encode, site.comm, presentation, seen)
    with all_cores():
        encoder = TextEncoder.load(started.text, config, site.device)
        states_Lt, _ = encoder.encode(presentation, seen)
        encoder.release()
        return states_Lt


def pack(prepared: Prepared, site: Site) -> Packed:
    """Lay out the sequence; draw the noise once, whole, from one CPU generator, the same on every rank."""
    started, resolved = prepared.started, prepared.started.resolved
    dims = started.plan.dims
    video, audio = draw(
        site.config.sampler.noise,
        resolved.seed,
        resolved.geometry,
        dims.video_channels,
        dims.audio_channels,
        started.plan.conditions,
    )
    packing = pack_sequence(resolved.geometry, started.presentation.tags, started.plan.conditions)
    return Packed(prepared, packing, video.to(site.device), audio.to(site.device))


def denoise(site: Site, packed: Packed) -> Denoised:
    """Run the schedule: every rank computes its share of each evaluation and takes the same step."""
    started, sampler = packed.prepared.started, site.config.sampler
    trace: dict[str, Tensor] = {}
    keep = site.outputs is not None and site.outputs.trace is not None
    attention, told = attention_of(site, packed)
    with site.stage("denoise"), Steps(started.schedule.evaluations, shown=site.first) as steps:
        evaluate = denoiser(site, packed, attention)
        if site.config.runtime.graph == "on":
            evaluate = GraphedDenoiser(evaluate, checked=packed.prepared.attention.bound is not None)

        def on_step(step: int, video: Tensor, audio: Tensor) -> None:
            if keep:
                names = (f"step.{step + 1:03d}.video_latents", f"step.{step + 1:03d}.audio_latents")
                trace.update(zip(names, (video.cpu(), audio.cpu()), strict=True))
            steps.advance()

        video, audio = sample(
            evaluate,
            packed.video,
            packed.audio,
            started.schedule,
            sampler=sampler.sampler,
            contract=sampler.noise,
            on_step=on_step,
        )
    return Denoised(packed, video, audio, trace, tuple(steps.seconds), told)


def attention_of(site: Site, packed: Packed) -> tuple[Attention, dict[str, Any]]:
    """The attention function of the run, and what is told of it in the end."""
    plan, config = packed.prepared.started.plan, site.config.attention
    task = task_of(plan, site.ranks.rank, site.device)
    attention, told = begin_attention(site.comm, packed.prepared.attention, task, fallback=config.fallback)
    if config.capture and site.first:
        attention = capturing(attention, config.capture, plan, task)
    return attention, told


def denoiser(site: Site, packed: Packed, attention: Attention) -> Denoiser:
    """This rank's denoiser, tied to its peers by the exchange."""
    prepared, plan = packed.prepared, packed.prepared.started.plan
    fused = prepared.elementwise is not PLAIN
    exchange = site.comm.exchange(plan, choose_forms(fused))
    weights, capability = prepared.weights, lowest_capability(site.device)
    return Denoiser(
        weights,
        packed.packing,
        plan.shares[site.ranks.rank],
        prepared.modulation,
        exchange,
        attention,
        prepared.rows_LC,
        packing(linear_of_run(plan, weights, capability, exchange, reused=fused), plan),
        prepared.kept,
        prepared.elementwise,
    )


def decode(site: Site, denoised: Denoised) -> None:
    """Rank 0 decodes, or all ranks do, and rank 0 muxes and writes; what all counted goes into the sidecar."""
    started, begun = denoised.packed.prepared.started, time.perf_counter()
    plan, vaes, comm = started.plan, started.vaes, site.comm

    def reports() -> list[RankReport]:
        read = started.dfile.file.bytes_read, started.text.file.bytes_read if started.text else 0
        mine = report_of(site, read, time.perf_counter() - begun, denoised.attention)
        return [RankReport(**json.loads(text)) for text in comm.collect("reports", mine)]

    with site.stage("decode"):
        fast, batch = plan.decode.fast, plan.decode.batch
        vae = site.config.model, site.device, fast, batch, plan.decode.gemm
        clean = Clean(denoised.video, denoised.audio, vaes, *vae) if vaes else None
        parts = schedule_decode(plan.geometry, plan.layout.ranks, site.device.type, batch, fast=fast)
        if site.first:
            assert site.outputs is not None
            how = (
                partial(decode_together, clean, comm, *parts) if plan.decode.parallel else partial(decode_alone, clean)
            )
            deliver(site.config, site.outputs, delivery(site, denoised), how, reports)
        else:
            if plan.decode.parallel:
                assist(clean, comm, *parts)
            reports()
