"""RunPod from the command line's point of view: one function for each command of `runpod/pod.py`."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from h3dist.cloud import offers as offering
from h3dist.cloud.capacity import destroy_all
from h3dist.cloud.client import Client
from h3dist.cloud.dialects import DEFAULT_API
from h3dist.cloud.failures import CloudError, RunFailed
from h3dist.cloud.keys import KEY_VARIABLE, Redactor, clean_environment, read_key
from h3dist.cloud.lease import PREFIX, Lease, Owner, Store
from h3dist.cloud.money import Limits
from h3dist.cloud.pace import Pace, Stop
from h3dist.cloud.quote import Ask, Quote, make_quote
from h3dist.cloud.reach import Visit, shell
from h3dist.cloud.recipe import Recipe
from h3dist.cloud.rental import Desk
from h3dist.cloud.signals import Gate
from h3dist.cloud.ssh import RemoteError, Ssh, quote
from h3dist.errors import ConfigError


@dataclass
class Office:
    """What every command needs: where to say things, the environment, and the account when there is a key."""

    say: Callable[[str], None]
    redact: Redactor
    pace: Pace
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    api: str = DEFAULT_API
    key_file: Path | None = None
    stop: Stop = field(default_factory=Stop)

    @property
    def store(self) -> Store:
        return Store.default(self.environ)

    def client(self, api: str | None = None) -> Client:
        """The account's client. Raises KeyRefused without a key."""
        return Client(api or self.api, read_key(self.environ, self.key_file), self.redact, self.pace, self.stop)

    def has_key(self) -> bool:
        """Whether a key was given at all."""
        return self.key_file is not None or bool(self.environ.get(KEY_VARIABLE, "").strip())


def quoted(office: Office, ask: Ask, recipe: Recipe, limits: Limits, client: Client | None) -> Quote:
    """What would be rented under a new name; without a client the name is a stand-in and prices are rough."""
    name = office.store.new_name() if client else f"{PREFIX}-..."
    return make_quote(ask, recipe, limits, api=office.api, name=name, client=client)


def offers(office: Office, shape: offering.Shape, counts: Sequence[int], cloud: str) -> list[offering.Fit]:
    """GPU types that fit the plan of `shape`; live prices and stock when there is a key."""
    live = {}
    if office.has_key():
        for offer in office.client().offers(cloud, max(counts)):
            live[offer.id] = offer
    return offering.fits(shape, counts, live, cloud)


def desk(office: Office, client: Client, offer: Quote, gate: Gate) -> Desk:
    """What the rentals of one command share."""
    return Desk(
        client,
        office.store,
        offer.recipe,
        offer.limits,
        office.pace,
        office.stop,
        gate,
        office.say,
        offer.price,
    )


def leftovers(office: Office) -> list[Lease]:
    """Rentals of this machine that nobody looks after: their client was killed, or their time is over."""
    return [lease for lease in office.store.leases() if lease.left_behind()]


def lease_of(office: Office, name: str | None) -> Lease:
    """The lease of this name, or the only one. Raises ConfigError when it is not clear which."""
    if name:
        return office.store.load(name)
    found = list(office.store.leases())
    if len(found) != 1:
        raise ConfigError(f"{len(found)} pods are leased here; name one: {', '.join(x.name for x in found) or '-'}")
    return found[0]


def known(office: Office, name: str | None) -> Ssh:
    """The shell of a pod whose address is known."""
    return shell(lease_of(office, name), office.store, office.stop, office.pace)


def execute(office: Office, name: str | None, command: list[str], show: Callable[[str], None]) -> None:
    """Run a command on a pod and show both its outputs as they come. Raises RunFailed with its exit code."""
    ssh = known(office, name)
    try:
        ssh.pump(command[0], f"{quote(*command)} 2>&1", lambda block: show(block.decode("utf-8", "replace")))
    except RemoteError as error:
        raise RunFailed(f"{command[0]} ended with exit code {error.code}", error.code) from None


def reach(office: Office, name: str | None) -> Ssh:
    """The shell of a pod, once it answers; its address is written into the lease."""
    lease, client = lease_of(office, name), office.client()
    return Visit(lease, client, office.store, office.pace, office.stop).ready()


def hand_over(office: Office, lease: Lease) -> None:
    """Start a process that ends a kept pod in time, and write down that it is the one that does.

    The key goes to it through a pipe, so that no command line and no environment holds it.
    """
    command = [sys.executable, "-m", "h3dist.cloud.watch", lease.name, str(office.pace.scale)]
    log = open(office.store.folder(lease.name) / "watch.log", "ab")  # noqa: SIM115 (the child keeps it)
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        env=clean_environment(office.environ) | {"H3_STATE_DIR": str(office.store.root.parent)},
    )  # fmt: skip
    log.close()
    assert child.stdin
    child.stdin.write(read_key(office.environ, office.key_file).get_secret_value().encode() + b"\n")
    child.stdin.close()
    lease.owner = Owner.of(child.pid)
    office.store.save(lease)


def watch_again(office: Office) -> None:
    """Give every kept pod whose watcher is gone (after a reboot, say) a new one."""
    for lease in office.store.leases():
        if lease.kept and not lease.owner.alive() and not lease.left_behind():
            office.say(f"{lease.name} runs on with nobody watching its time; watching it again")
            hand_over(office, lease)


def destroy(office: Office, names: Sequence[str], all_mine: bool) -> int:
    """End pods by name or id; with `all_mine` every pod whose name begins as this machine's do. Returns how many.

    Raises CloudError naming what the cloud does not confirm, after all others were ended.
    """
    store, client = office.store, office.client()
    wanted = {name: name for name in names}
    if all_mine:
        mine = f"{PREFIX}-{store.client_id()}-"
        wanted |= {pod.name: pod.name for pod in client.pods() if pod.name.startswith(mine)}
        wanted |= {lease.name: lease.name for lease in store.leases()}
    ended, failures = 0, []
    for name in wanted:
        try:
            ended += _destroy_one(office, client, store, name)
        except CloudError as error:
            failures.append(f"{name}: {error}")
    if failures:
        raise CloudError("could not end everything:\n" + "\n".join(failures))
    return ended


def _destroy_one(office: Office, client: Client, store: Store, name: str) -> int:
    lease = next((lease for lease in store.leases() if name in (lease.name, lease.pod_id)), None)
    if lease is None and not name.startswith(f"{PREFIX}-"):
        found = client.pod(name)
        if found is None:
            raise CloudError("no such pod, and no lease of that name")
        name = found.name
        client.delete(found.id)
    if lease:
        store.announce_end(lease)
    api = client if not lease or lease.api in ("", client.url) else office.client(lease.api)
    ended = destroy_all(api, lease.name if lease else name, lease.pod_id if lease else None, office.pace)
    if lease:
        store.close(lease, "destroyed by hand")
    office.say(f"{lease.name if lease else name}: {'destroyed' if ended else 'was gone already'}")
    return 1


def overview(office: Office) -> list[dict[str, object]]:
    """Every pod of this project that the account shows, and every lease, joined; for `list` and `cost`."""
    store, client = office.store, office.client()
    pods = {pod.name: pod for pod in client.pods() if pod.name.startswith(f"{PREFIX}-")}
    leases = {lease.name: lease for lease in store.leases()}
    mine = f"{PREFIX}-{store.client_id()}-"
    rows = []
    for name in sorted(pods | leases):
        pod, lease = pods.get(name), leases.get(name)
        price = (pod.price if pod else None) or (lease.price if lease else None) or 0.0
        began = lease.created if lease else pod.created.timestamp() if pod and pod.created else time.time()
        rows.append(
            {
                "name": name,
                "id": pod.id if pod else lease and lease.pod_id,
                "status": pod.status if pod else "gone",
                "mine": name.startswith(mine),
                "looked_after": bool(lease and not lease.left_behind()),
                "per_hour": price,
                "so_far": round(price * max(time.time() - began, 0) / 3600, 2),
                "gpus": f"{pod.gpu_count} x {pod.gpu}" if pod and pod.gpu else "",
                "data_center": pod.data_center if pod else None,
                "ends": lease.ends if lease else None,
            }
        )
    return rows


def as_json(rows: object) -> str:
    """JSON for scripts."""
    plain = [asdict(row) if isinstance(row, offering.Fit) else row for row in rows] if isinstance(rows, list) else rows
    return json.dumps(plain, indent=1)
