"""One pod from the moment it is asked for until the cloud confirms that it is gone, whatever happens between."""

import atexit
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType

from h3dist.cloud.capacity import Search, Wish, destroy_all
from h3dist.cloud.client import Client
from h3dist.cloud.failures import CloudError, PodLost, Stopped
from h3dist.cloud.lease import Lease, Store
from h3dist.cloud.models import Pod, PodSpec
from h3dist.cloud.money import Limits, Watchdog
from h3dist.cloud.pace import Pace, Stop
from h3dist.cloud.provision import guarded_start
from h3dist.cloud.reach import Visit
from h3dist.cloud.recipe import Recipe
from h3dist.cloud.signals import Gate
from h3dist.cloud.ssh import Line, Ssh, make_key, quote

DEARER = 1.1  # a pod may cost this much more than its type's list price before it is given back
GIVING_BACK = "giving the pod back; it takes some seconds"


@dataclass
class Desk:
    """What every rental of one command shares. `list_price`: dollars an hour of a request, None if unknown."""

    client: Client
    store: Store
    recipe: Recipe
    limits: Limits
    pace: Pace
    stop: Stop
    gate: Gate
    say: Callable[[str], None]
    list_price: Callable[[PodSpec], float | None]
    started: float = field(default_factory=time.time)
    spent: float = 0.0  # dollars of the pods that are over

    def lifetime(self, price: float | None) -> tuple[float, str]:
        """Seconds that a pod of this price may still live, and why no longer."""
        return self.limits.lifetime(price, self.spent, time.time() - self.started)


class Rental:
    """`with Rental(...) as rental:` rents a pod and never leaves it behind; `keep()` hands it to the user."""

    def __init__(self, desk: Desk, wish: Wish, base: PodSpec, what: str) -> None:
        self.desk, self.wish, self.base = desk, wish, base
        self.lease = Lease(name=base.name, api=desk.client.url, what=what, user=desk.recipe.user)
        self.lease.workspace = desk.recipe.workspace
        self.search = Search(
            desk.client, desk.pace, desk.stop, desk.gate, desk.say, prepare=self._complete, took=self._note
        )
        self._public = ""
        self._listed: float | None = None
        self._watchdog: Watchdog | None = None
        self._line: Line | None = None
        self._over = False
        self.ended_elsewhere = False  # whether another command of the user's ended it

    # ---- begin ----

    def __enter__(self) -> "Rental":
        self.desk.store.save(self.lease)  # before the POST: a client killed in between can still find the pod
        atexit.register(self._last_chance)
        try:
            self._public = make_key(self.desk.store.folder(self.lease.name))
            self.search.rent(self.wish, self.base)
            self._know_price()
            self._watch()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _complete(self, spec: PodSpec) -> PodSpec:
        """The request with the guard as its first command; the guard's time is this pod's, plus some grace."""
        lifetime, _ = self.desk.lifetime(self.desk.list_price(spec))
        recipe = self.desk.recipe
        ours = {"PUBLIC_KEY": self._public, "H3_POD_STATE": recipe.state, "H3_POD_API": self.desk.client.url}
        return replace(spec, env=spec.env | ours, start=guarded_start(recipe, lifetime + self.desk.pace.grace))

    def _note(self, pod: Pod, spec: PodSpec) -> None:
        """Write down what was rented. The dearer of the list price and the pod's own is what we count with."""
        self._listed = self.desk.list_price(spec)
        known = [price for price in (pod.price, self._listed) if price]
        self.lease.pod_id, self.lease.price = pod.id, max(known, default=None)
        self.lease.created = time.time()
        self.lease.what = f"{spec.where()}: {self.lease.what}"
        self.lease.gpus, self.lease.data_center = f"{spec.gpu_count} x {spec.gpu}", pod.data_center
        self.desk.store.save(self.lease)

    def _know_price(self) -> None:
        """Without a price the budget could not be kept, so such a pod is given back."""
        until = time.monotonic() + self.desk.pace.missing
        while not self.lease.price:
            pod = self.desk.client.pod(self.lease.pod_id or "")
            self.lease.price = pod.price or None if pod else None
            if not self.lease.price:
                if time.monotonic() > until:
                    raise CloudError("the API does not say what this pod costs, so the budget could not be kept")
                self.desk.stop.sleep(self.desk.pace.poll)
        listed = self._listed
        if listed and self.lease.price > listed * DEARER:
            raise CloudError(f"the pod costs ${self.lease.price:.2f} an hour, not ${listed:.2f} as was shown")
        self.desk.say(f"rented pod {self.lease.pod_id} as {self.lease.name}, ${self.lease.price:.2f} an hour")

    def _watch(self) -> None:
        lifetime, cause = self.desk.lifetime(self.lease.price)
        self.lease.ends = time.time() + lifetime
        self.desk.store.save(self.lease)
        minutes = f"{lifetime / 60:.1f} min" if lifetime < 6000 else f"{lifetime / 3600:.1f} h"
        self.desk.say(f"it will be ended after {minutes} at the latest, by {cause}")
        at = self.lease.ends - min(self.desk.pace.margin, lifetime / 10)
        self._watchdog = Watchdog(at, f"{cause} is used up; the pod was ended", self._expire)
        self._watchdog.start()

    def _expire(self, cause: str) -> None:
        """In the watchdog's thread: tell the main thread, end the pod at once, and do not give up."""
        self.desk.stop.set(cause)  # first, or the main thread would take the pod for lost
        while not self._over:
            try:
                destroy_all(self.desk.client, self.lease.name, self.lease.pod_id, self.desk.pace)
                return
            except CloudError as error:
                self.desk.say(f"ending the pod failed: {error}; trying again")
                time.sleep(self.desk.pace.poll)

    # ---- while it lives ----

    def ready(self) -> Ssh:
        """Wait until the pod answers over SSH. Raises PodFailed when it ends, or never gets there in time."""
        desk = self.desk
        self._line = Line(Visit(self.lease, desk.client, desk.store, desk.pace, desk.stop).ready())
        return self._line.open()

    def tighten(self, ssh: Ssh) -> None:
        """Tell the guard on the pod what the price now says: it only ever ends the pod earlier."""
        left = max(1, round((self.lease.ends or time.time()) - time.time() + self.desk.pace.grace))
        path = quote(f"{self.desk.recipe.state}/expires")
        new = f"new=$(($(date +%s)+{left})); old=$(cat {path} 2>/dev/null || echo $new)"
        put = f'echo "$new" > {path}.new && mv {path}.new {path}'  # the guard must never read half of it
        ssh.run("the pod's own timer", f'{new}; [ "$new" -ge "$old" ] || {{ {put}; }}', timeout=60)

    def alive(self) -> None:
        """Raises PodLost when the API says that the pod ended; says nothing when the API does not answer."""
        self.desk.stop.check()
        try:
            pod = self.desk.client.pod(self.lease.pod_id or "")
        except CloudError as error:
            self.desk.say(f"cannot ask about the pod: {error}")
            return
        if pod is None or pod.ended:
            raise PodLost(f"the pod is gone ({pod.status if pod else 'unknown to the API'})")

    # ---- end ----

    def keep(self) -> None:
        """Leave the pod running when this ends; the lease says until when."""
        self.lease.kept = True
        self.desk.store.save(self.lease)
        self._finish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(cause_of(error))
        except CloudError as failure:
            atexit.unregister(self._last_chance)
            told = f"{failure}\nIT MAY STILL COST MONEY: run `runpod/pod.py destroy {self.lease.name}`"
            told += ", or end it in RunPod's console"
            raise CloudError(f"{told}\n(this came after: {cause_of(error)})") from None

    def close(self, cause: str) -> None:
        """Give the pod back, once. Raises CloudError when the cloud does not confirm; the lease stays then."""
        if self._over:
            return
        desk = self.desk
        with desk.gate.held(GIVING_BACK, raises=False):
            ended = []
            if self.lease.pod_id or self.search.open or self.search.doubt:
                ended = destroy_all(desk.client, self.lease.name, self.lease.pod_id, desk.pace, self.search.open)
            self.ended_elsewhere = desk.store.ended_elsewhere(self.lease)
            self._finish()
            desk.spent += self.lease.spent()
            desk.store.close(self.lease, cause)
        if ended or self.lease.pod_id:
            desk.say(f"pod {self.lease.pod_id or ended[0]} is destroyed; it cost about ${self.lease.spent():.2f}")

    def _last_chance(self) -> None:
        """The interpreter ends with the pod still ours, past every `with`."""
        try:
            self.close("the client left")
        except CloudError as error:
            self.desk.say(f"{error}: {self.lease.name} MAY STILL COST MONEY")

    def _finish(self) -> None:
        self._over = True
        if self._line:
            self._line.close()
        atexit.unregister(self._last_chance)
        if self._watchdog:
            self._watchdog.cancel()


def cause_of(error: BaseException | None) -> str:
    """Why a rental ended, in a line."""
    if error is None:
        return "done"
    if isinstance(error, Stopped):
        return f"stopped by signal {error.signum}"
    return (str(error) or type(error).__name__).splitlines()[0][:300]
