"""The way to a pod that starts: from "asked for" to a shell that answers."""

import time
from dataclasses import dataclass

from h3dist.cloud.client import Client
from h3dist.cloud.failures import ConnectionLost, PodFailed
from h3dist.cloud.lease import Lease, Store
from h3dist.cloud.models import Pod
from h3dist.cloud.pace import Pace, Stop
from h3dist.cloud.ssh import RemoteError, Ssh


@dataclass
class Visit:
    """One pod that we want to reach; its address is written into the lease once it answers."""

    lease: Lease
    client: Client
    store: Store
    pace: Pace
    stop: Stop

    def ready(self) -> Ssh:
        """Wait until the pod answers over SSH. Raises PodFailed when it ends, or never gets there in time."""
        began, pod, trouble = time.monotonic(), None, "no public address yet"
        while (waited := time.monotonic() - began) < self.pace.ready:
            pod = self._look(pod, waited)
            if pod and pod.address:
                self.lease.data_center = pod.data_center
                ssh, trouble = self._probe(pod.address)
                if not trouble:
                    return ssh
            self.stop.sleep(self.pace.poll)
        status = f"{pod.status}, address {pod.address}" if pod else "unknown to the API"
        raise PodFailed(
            f"the pod never got ready in {self.pace.ready / 60:.1f} min ({status}); last trouble: {trouble}"
        )

    def _look(self, before: Pod | None, waited: float) -> Pod | None:
        """The pod now. A new one may not be listed for a while; one that was there and is not is gone."""
        pod = self.client.pod(self.lease.pod_id or "")
        if pod is None and (before or waited > self.pace.missing):
            raise PodFailed(f"pod {self.lease.pod_id} is gone before it was ready")
        if pod and pod.ended:
            raise PodFailed(f"the pod ended ({pod.status}) before it was ready: does its image start at all?")
        return pod

    def _probe(self, address: tuple[str, int]) -> tuple[Ssh, str]:
        """A shell at this address, and what keeps it from answering; empty when it does."""
        self.lease.host, self.lease.port = address
        ssh = shell(self.lease, self.store, self.stop, self.pace)
        try:
            ssh.run("first contact", "true", timeout=self.pace.probe)
        except (ConnectionLost, RemoteError) as error:
            return ssh, str(error)
        self.store.save(self.lease)
        return ssh, ""


def shell(lease: Lease, store: Store, stop: Stop, pace: Pace) -> Ssh:
    """The shell of a leased pod. Raises PodFailed when its address is not known yet."""
    if not lease.host or not lease.port:
        raise PodFailed(f"{lease.name} has no address yet: run `runpod/pod.py wait {lease.name}`")
    return Ssh(lease.host, lease.port, lease.user, store.folder(lease.name), stop, pace.probe)
