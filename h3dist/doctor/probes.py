"""What the copies and the all-to-all of the children showed."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from h3dist.doctor.children import Ended
from h3dist.doctor.finding import Finding

WITHOUT_P2P = "export NCCL_P2P_DISABLE=1: slower but right; on a machine of your own, iommu=pt at boot and PCIe ACS off"
VIA = re.compile(r" via (P2P/\w+|SHM|NET/\w+)")


def check_copies(ended: Ended, limit: float) -> Iterator[Finding]:
    """A finding for each GPU that does not compute, each pair whose copies do not arrive, and one for the rest."""
    rates = []
    for said in ended.said:
        if not said.keys() & {"device", "pair"}:
            continue
        fault = _copy_fault(said)
        if fault:
            yield fault
        elif "pair" in said:
            rates.append(said["gb_s"])
    if not ended.fine:
        yield _broken_off(ended, limit)
    elif rates:
        told = f"{len(rates)} ways between GPUs copied and compared: {min(rates):.1f} to {max(rates):.1f} GB/s"
        yield Finding("copies", "ok", told)
    else:
        yield Finding("copies", "ok", "every GPU computes; there is no second one to copy to")


def _copy_fault(said: dict) -> Finding | None:
    where = f"GPU {said['device']}" if "device" in said else "from GPU {} to GPU {}".format(*said["pair"])
    if said.get("full"):
        return Finding("copies", "warning", f"{where}: no memory left to try it", "end the programs that hold it")
    if "error" in said:
        return Finding("copies", "error", f"{where}: {said['error']}", "nvidia-smi and dmesg say more")
    if "device" in said and not said["right"]:
        return Finding("copies", "error", f"{where} computes wrong results", "do not use it: hide it, have it replaced")
    if said.get("wrong"):
        how = "zeros arrive" if said["zero"] else f"{said['wrong']} of {said['size']} bytes arrive wrong"
        return Finding("copies", "error", f"{where}: {how}, without any error", WITHOUT_P2P)
    return None


def _broken_off(ended: Ended, limit: float) -> Finding:
    """The copy that hung or crashed is the last that was begun."""
    places = ended.value("begin")
    if places is None:
        return Finding("copies", "error", f"the copies did not start: {ended.why(limit)}", "see torch and gpus above")
    where = "from GPU {} to GPU {}".format(*places) if len(places) > 1 else f"GPU {places[0]}"
    remedy = WITHOUT_P2P if len(places) > 1 else "nvidia-smi and dmesg say more; hide this GPU"
    return Finding("copies", "error", f"{where}: {ended.why(limit)}", f"{remedy}; reset the GPU if it stays busy")


def right(ended: Sequence[Ended]) -> bool:
    """Whether every rank ended well and found every byte right."""
    return all(child.fine and child.value("wrong") == 0 for child in ended)


def exchange_fault(ended: Sequence[Ended], limit: float) -> str:
    """In words, what was wrong with an all-to-all that was not right."""
    wrong = [(rank, child.value("wrong")) for rank, child in enumerate(ended) if child.value("wrong")]
    if wrong:
        return f"{wrong[0][1]} elements arrive wrong at rank {wrong[0][0]}, without any error"
    broken = [(rank, child) for rank, child in enumerate(ended) if not child.fine]
    rank, child = next(((r, c) for r, c in broken if c.code is not None), broken[0])  # who failed, not who waited
    return f"rank {rank}: {child.why(limit)}"


def check_exchange(
    ended: Sequence[Ended], again: Sequence[Ended] | None, limit: float, backend: str, ways: Sequence[str]
) -> Finding:
    """The all-to-all's finding. `again` is the second try, without P2P; `ways` the transports that NCCL told."""
    many = f"{len(ended)} ranks over {backend}"
    if right(ended):
        seconds = max(child.value("seconds") for child in ended)
        seen = f", seen to go by {', '.join(ways)}" if ways else ""
        return Finding("exchange", "ok", f"{many}: every byte of an all-to-all right, in {seconds * 1e3:.1f} ms{seen}")
    what = f"{many}: an all-to-all fails: {exchange_fault(ended, limit)}"
    if again is not None and right(again):
        return Finding("exchange", "error", f"{what}; without P2P it works", WITHOUT_P2P)
    if backend == "gloo":
        remedy = "ranks meet on 127.0.0.1: check the firewall, the host's name in /etc/hosts, GLOO_SOCKET_IFNAME"
        return Finding("exchange", "error", what, remedy)
    also = "" if again is None else ", and without P2P too"
    return Finding(
        "exchange", "error", what + also, "NCCL_DEBUG=INFO says why; look at /dev/shm, and for a GPU that hangs"
    )


def seen_ways(folder: Path) -> tuple[str, ...]:
    """The transports that NCCL wrote to its logs in a folder, as in ("P2P/CUMEM",)."""
    texts = (path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*")))
    return tuple(sorted({way for text in texts for way in VIA.findall(text)}))
