"""Finding a machine: every allowed combination in order, one POST each, with every unclear answer cleared up."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from h3dist.cloud.client import Client, is_capacity, wait_gone
from h3dist.cloud.failures import CloudError, KeyRefused, NoCapacity, NotSent, Refused, Unclear
from h3dist.cloud.models import Pod, PodSpec
from h3dist.cloud.pace import Pace, Stop
from h3dist.cloud.signals import Gate

CLOUDS = ("SECURE", "COMMUNITY")
HELD = "the request for a pod is on its way; ending as soon as it is answered, so that none stays behind"


@dataclass(frozen=True)
class Wish:
    """What would do, best first. Counts come before GPU types, types before clouds, clouds before places."""

    gpus: tuple[str, ...]
    counts: tuple[int, ...]
    clouds: tuple[str, ...] = ("SECURE",)
    data_centers: tuple[str, ...] = ()
    patience: float = 0.0  # seconds to go on trying after the first round

    def specs(self, base: PodSpec) -> Iterator[PodSpec]:
        """Every request that is allowed, in order; `base` has what they share."""
        places = [(center,) for center in self.data_centers] or [()]
        for count in self.counts:
            for gpu in self.gpus:
                for cloud in self.clouds:
                    for place in places:
                        yield replace(base, gpu=gpu, gpu_count=count, cloud=cloud, data_centers=place)


@dataclass
class Search:
    """One search for a pod. `took` is told of a pod before anything can interrupt; `prepare` completes a
    request; `open` says whether a request may have made a pod that nobody knows yet."""

    client: Client
    pace: Pace
    stop: Stop
    gate: Gate
    say: Callable[[str], None]
    prepare: Callable[[PodSpec], PodSpec]
    took: Callable[[Pod, PodSpec], None]
    tried: dict[str, str] = field(default_factory=dict, init=False)
    open: bool = field(default=False, init=False)
    doubt: bool = field(default=False, init=False)  # whether any answer was unclear: our name may be in use

    def rent(self, wish: Wish, base: PodSpec) -> None:
        """Rent the first pod that can be had. Raises NoCapacity with all that was tried and answered."""
        until = time.time() + wish.patience
        while not any(self._one(spec) for spec in wish.specs(base)):
            if time.time() >= until:
                report = "\n".join(f"  {where}: {why}" for where, why in self.tried.items())
                raise NoCapacity(f"no capacity anywhere; tried:\n{report}")
            self.say(f"no capacity; trying again, for {(until - time.time()) / 60:.0f} min more")
            self.stop.sleep(min(self.pace.capacity, max(until - time.time(), 0.1)))

    def _one(self, spec: PodSpec) -> bool:
        """One combination; False, with the reason noted, when it cannot be had."""
        self.say(f"asking for {spec.where()}")
        try:
            self._post(spec)
            return True
        except Refused as error:
            # 422, or a 400 about the request itself, will not get better with another machine
            if error.status == 422 or (error.status in (400, 404, 410) and not is_capacity(error.body)):
                raise
            self.tried[spec.where()] = f"HTTP {error.status}: {error.body}"
        except Unclear as error:
            self.doubt = True
            self.say(f"unclear answer ({error}); looking for {spec.name} before anything else")
            if self._look_up(spec):
                return True
            self.tried[spec.where()] = f"{error}; no such pod appeared"
        self.say(f"  {self.tried[spec.where()]}")
        return False

    def _post(self, spec: PodSpec) -> None:
        """One POST, sent again only where nothing can have happened."""
        for pause in self.client.pauses():
            try:
                with self.gate.held(HELD):
                    self.open = True
                    pod = self.client.create(self.prepare(spec))
                    self.took(pod, spec)
                    self.open = False
                return
            except (NotSent, Refused, KeyRefused) as error:
                self.open = False
                if not isinstance(error, NotSent) or pause is None:
                    raise
                self.say(f"{error}; trying again")
                self.stop.sleep(max(pause, error.wait))
        raise AssertionError("the last pause raises")

    def _look_up(self, spec: PodSpec) -> bool:
        """Take the pod of this name if there is one, waiting as long as a listing may lag behind."""
        until = time.monotonic() + self.pace.missing
        while not (found := self.client.find(spec.name)):
            if time.monotonic() >= until:
                self.open = False
                return False
            self.stop.sleep(min(self.pace.poll, self.pace.missing))
        self.took(found[0], spec)
        self.open = False
        return True


def _end(client: Client, pod_id: str, name: str, pace: Pace) -> str:
    client.delete(pod_id)
    if not wait_gone(client, pod_id, pace):
        raise CloudError(f"pod {pod_id} ({name}) was told to end, but the API still lists it")
    return pod_id


def destroy_all(client: Client, name: str, known: str | None, pace: Pace, open_post: bool = False) -> list[str]:
    """Terminate the pod `known` and every other of this name, and see that they are gone.

    Returns the ids that were terminated. `open_post`: a pod may be about to appear, so the listing is watched
    for as long as it may lag. Raises CloudError naming what may still be running.
    """
    client, ended = client.without_stop(), []
    until = time.monotonic() + (pace.missing if open_post else 0)
    while True:
        if known and known not in ended:
            ended.append(_end(client, known, name, pace))  # before the listing, which may fail or lag
        ended += [_end(client, pod.id, name, pace) for pod in client.find(name) if pod.id not in ended]
        if ended or time.monotonic() >= until:
            return ended
        time.sleep(min(pace.poll, 1.0))
