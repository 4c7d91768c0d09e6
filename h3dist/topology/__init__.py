"""What this process stands on: its rank, the machine's cores, its GPUs, their memory and their links.

The only reader of the variables that torchrun and CUDA use (`RANK`, `CUDA_VISIBLE_DEVICES`, their kin), and
the only user of NVML. Imports no torch: a planner and a launcher must not pay for it.
"""

from h3dist.topology.gpus import Device, auto_world, devices, select_visible, visible_devices
from h3dist.topology.host import cores, free_host_memory
from h3dist.topology.links import Link
from h3dist.topology.machine import Topology, load_topology, read_topology, record, replay
from h3dist.topology.ranks import Ranks, rank_environ, read_ranks, threads_per_rank
from h3dist.topology.transport import Transport, predict_transport

__all__ = [
    "Device", "Link", "Ranks", "Topology", "Transport", "auto_world", "cores", "devices", "free_host_memory",
    "load_topology", "predict_transport", "rank_environ", "read_ranks", "read_topology", "record", "replay",
    "select_visible", "threads_per_rank", "visible_devices",
]  # fmt: skip
