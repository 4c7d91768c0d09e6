"""What the machine's topology means for a run: GPUs, their memory and links, the host's memory, /dev/shm."""

from collections.abc import Iterator, Mapping

from h3dist.doctor.finding import Finding
from h3dist.topology import Topology, predict_transport

GIB, MIB = 1 << 30, 1 << 20
DOCKER_SHM = 64 * MIB  # what a container gets where nobody says more
SEGMENT = 10 * MIB  # that NCCL takes of /dev/shm for one way between two GPUs, rounded up
RANK_BYTES = 2 * GIB  # Python, torch and CUDA of one rank on the host, a rule of thumb
HELD = 0.05  # of a GPU's memory: less is the driver's own
UNEVEN = 0.05  # of the larger: free memory of two GPUs that counts as different


def check_gpus(topology: Topology, setting: str | None, device: str) -> Iterator[Finding]:
    """The GPUs, and what `setting` of CUDA_VISIBLE_DEVICES (None: unset) shows of them, for `runtime.device`."""
    if device == "cpu":
        yield Finding("gpus", "ok", "runtime.device=cpu: no GPU is used")
        return
    if not topology.devices:
        yield _no_gpu(topology, device)
        return
    shown = topology.visible(setting)
    yield from _visible(topology, shown, setting, device)
    for gpu in shown.devices:
        held = 1 - gpu.memory_free / gpu.memory_total
        if held > HELD and not gpu.unified:
            what = f"GPU {gpu.index}: {held:.0%} of its {gpu.memory_total / GIB:.0f} GiB is held by other programs"
            yield Finding("memory", "warning", what, "nvidia-smi shows them; end them, or hide this GPU")
    yield from _uneven(shown)
    if shown.unified:
        yield Finding("gpus", "note", "GPU and host share one memory: what programs take of it, the GPU lacks")
    if any(gpu.uuid.startswith("MIG-") for gpu in shown.devices):
        yield Finding("gpus", "note", "a MIG slice: a process sees one, and slices do not exchange; plan one rank")


def _no_gpu(topology: Topology, device: str) -> Finding:
    what = f"no GPU: {topology.absence or 'the driver runs and knows none'}"
    if device == "cuda":
        return Finding("gpus", "error", f"{what}, and runtime.device=cuda", "runtime.device=cpu runs on the processor")
    if topology.absence and "Not Found" in topology.absence:
        remedy = "where there should be one: install the driver; in a container, docker run --gpus all"
        return Finding("gpus", "note", f"{what}; runs are on the processor", remedy)
    return Finding("gpus", "warning", what, "nvidia-smi says more; after an update of the driver, reboot")


def _visible(topology: Topology, shown: Topology, setting: str | None, device: str) -> Iterator[Finding]:
    names = ", ".join(sorted({gpu.name for gpu in shown.devices}))
    count = f"{len(shown.devices)} of {len(topology.devices)}"
    entries = [] if not setting else setting.split(",")
    if not shown.devices:
        level = "error" if device == "cuda" else "warning"
        yield Finding("gpus", level, f"CUDA_VISIBLE_DEVICES={setting} hides every GPU", "unset it, or name GPUs: 0,1")
    elif len(entries) > len(shown.devices):
        what = f"CUDA_VISIBLE_DEVICES={setting} shows {count} GPUs: an entry that names none hides all after it"
        yield Finding("gpus", "warning", what, "name GPUs that are there, each once")
    else:
        yield Finding("gpus", "ok", f"{count} GPUs visible: {names}; driver {topology.driver}")
    if len({gpu.name for gpu in shown.devices}) > 1:
        remedy = "choose equal ones with CUDA_VISIBLE_DEVICES, and set CUDA_DEVICE_ORDER=PCI_BUS_ID to name them so"
        yield Finding("gpus", "warning", f"the GPUs differ ({names}): the slowest decides", remedy)


def _uneven(shown: Topology) -> Iterator[Finding]:
    """Free memory that differs: the plan must fit the rank that has least."""
    free = {gpu.index: gpu.memory_free for gpu in shown.devices}
    if free and min(free.values()) < (1 - UNEVEN) * max(free.values()):
        told = ", ".join(f"GPU {index} {size / GIB:.1f}" for index, size in free.items())
        yield Finding(
            "memory", "warning", f"free memory differs, in GiB: {told}", "free the least, which decides, or hide it"
        )


def check_links(shown: Topology, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Links that work less well than they could, and the transport that NCCL should pick for them."""
    for link in shown.links:
        if link.nvlinks and not link.nvlink:
            what = f"GPUs {link.a} and {link.b}: {link.nvlinks} NVLinks are up, but programs may not use them"
            yield Finding("links", "error", what, "start nvidia-fabricmanager, of the driver's own version")
    for gpu in shown.devices:
        if gpu.pcie_width is not None and gpu.pcie_width < 16 and not all(link.nvlink for link in shown.links):
            what = f"GPU {gpu.index}: PCIe generation {gpu.pcie_gen} with {gpu.pcie_width} lanes"
            yield Finding("links", "note", f"{what}; 16 are usual, and exchange takes twice as long with half")
    yield from _transport(shown, environ)


def _transport(shown: Topology, environ: Mapping[str, str]) -> Iterator[Finding]:
    if not shown.links:
        return
    predicted = predict_transport(shown, environ)
    what = f"predicted: {predicted.text()} ({predicted.reason})"
    slow = [pair for pair, name in predicted.pairs.items() if not name.startswith("P2P")]
    able = [pair for pair in slow if shown.link(*pair).p2p_read and shown.link(*pair).p2p_write]
    if "NET" in predicted.pairs.values():
        yield Finding("transport", "warning", what, "unset NCCL_SHM_DISABLE")
    elif able and "NCCL_P2P_DISABLE" not in predicted.reason:
        what += f"; the driver allows P2P for {len(able)} of the pairs that go without"
        yield Finding("transport", "note", what, "try NCCL_P2P_LEVEL=SYS, and keep it only if copies and exchange pass")
    else:
        yield Finding("transport", "note" if slow else "ok", what)


def check_host(topology: Topology, gpus: int) -> Iterator[Finding]:
    """Memory, the container's limit and /dev/shm, for one rank on each of `gpus` GPUs."""
    limit = topology.container_memory_limit
    inside = f", {limit / GIB:.1f} in this container" if limit else ""
    told = f"{topology.host_memory / GIB:.1f} GiB of memory{inside}"
    free = topology.host_memory_free
    if free is not None and free < RANK_BYTES * max(1, gpus) and not topology.unified:
        what = f"{told}, {free / GIB:.1f} free; {max(1, gpus)} ranks take about {RANK_BYTES / GIB:.0f} each"
        yield Finding("memory", "warning", what, "raise the container's limit (docker run --memory), or use fewer GPUs")
    else:
        yield Finding("memory", "ok", told + ("" if free is None else f", {free / GIB:.1f} free"))
    yield _shared_memory(topology, gpus)


def _shared_memory(topology: Topology, gpus: int) -> Finding:
    """NCCL needs /dev/shm where GPUs exchange without P2P, and some of it anyway."""
    size = topology.shm_bytes
    free = size if topology.shm_free is None else topology.shm_free
    needed = SEGMENT * gpus * (gpus - 1)
    told = f"/dev/shm has {size / MIB:.0f} MiB, {free / MIB:.0f} free" if size else "there is no /dev/shm"
    remedy = "docker run --shm-size=1g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm"
    if gpus < 2:
        return Finding("shm", "ok" if size > DOCKER_SHM else "note", f"{told}; one rank needs none")
    if size == 0:
        return Finding("shm", "error", f"{told}: NCCL cannot start", remedy)
    if free < needed:
        what = f"{told}; {gpus} GPUs without P2P take up to {needed / MIB:.0f}"
        return Finding("shm", "warning", what, f"{remedy}; remove what dead runs left: /dev/shm/nccl-*")
    if size <= DOCKER_SHM:
        return Finding("shm", "warning", f"{told}: the default of a container, which NCCL outgrows", remedy)
    return Finding("shm", "ok", told)
