"""What is asked for, in which order, and what it costs: worked out before anything is rented."""

from dataclasses import dataclass, replace

from h3dist.cloud.capacity import CLOUDS, Wish
from h3dist.cloud.client import Client
from h3dist.cloud.dialects import dialect_of
from h3dist.cloud.gpus import gpu_type
from h3dist.cloud.keys import TOKEN_VARIABLE
from h3dist.cloud.models import GpuOffer, PodSpec, Volume
from h3dist.cloud.money import Limits
from h3dist.cloud.recipe import Recipe
from h3dist.errors import ConfigError

COUNTS = (8, 6, 4, 2, 1)


@dataclass(frozen=True)
class Ask:
    """Which pod is wanted, as typed."""

    gpus: tuple[str, ...]
    count: int
    fewer: bool = False
    clouds: tuple[str, ...] = ("SECURE",)
    data_centers: tuple[str, ...] = ()
    volume: str | None = None
    disk_gb: int = 80
    volume_gb: int = 0
    interruptible: bool = False
    patience: float = 0.0  # seconds
    min_cuda: str = "13.0"
    hf_secret: str | None = None

    def wish(self) -> Wish:
        """The search that this means. Raises ConfigError for a type, count or cloud that cannot be."""
        if self.count < 1:
            raise ConfigError(f"--gpus {self.count}: at least 1")
        for cloud in self.clouds:
            if cloud not in CLOUDS:
                raise ConfigError(f"--cloud {cloud}: use {' or '.join(CLOUDS)}")
        fewer = tuple(n for n in COUNTS if n < self.count) if self.fewer else ()
        ids = tuple(gpu_type(name).id for name in self.gpus)
        return Wish(ids, (self.count, *fewer), self.clouds, self.data_centers, self.patience)


@dataclass
class Quote:
    """A pod that could be rented, with what it costs. `live` prices are per request; empty without a key."""

    ask: Ask
    recipe: Recipe
    limits: Limits
    wish: Wish
    base: PodSpec
    live: dict[tuple[str, int, str], GpuOffer]

    def price(self, spec: PodSpec) -> float | None:
        """Live list price of a request in dollars an hour; None where the API does not tell."""
        offer = self.live.get((spec.gpu, spec.gpu_count, spec.cloud))
        each = offer.price(spec.cloud) if offer and not spec.interruptible else None
        return each * spec.gpu_count if each else None

    def lines(self) -> list[str]:
        """What would be asked for, in order, with price an hour and the most that it can come to."""
        lines = []
        for spec in self.wish.specs(self.base):
            price, about = self.price(spec), gpu_type(spec.gpu).about * spec.gpu_count
            text = f"${price:.2f} an hour" if price else f"about ${about:.2f} an hour (not the live price)"
            most = self.limits.most(price or about or None)
            lines.append(f"  {spec.where()}: {text}, at most ${most:.2f}")
        volume = f"network volume {self.base.volume_id}" if self.base.volume_id else f"{self.base.volume_gb} GB volume"
        lines.append(f"  image {self.base.image}, {self.base.disk_gb} GB disk, {volume} at {self.base.mount}")
        limits = f"${self.limits.budget:.2f} and {self.limits.deadline / 60:g} min"
        return [
            *lines,
            f"  ends by itself after {limits}, whichever comes first; storage is billed beside it",
        ]


def make_quote(ask: Ask, recipe: Recipe, limits: Limits, *, api: str, name: str, client: Client | None = None) -> Quote:
    """Work out what would be rented as `name`; with a client, the volume's place and live prices are looked up."""
    wish = ask.wish()
    if ask.interruptible and not dialect_of(api).spot:
        raise ConfigError(
            "REST v2 has no interruptible pods; they need REST v1 (--api https://rest.runpod.io/v1), "
            "which was to be retired in November 2026"
        )
    if ask.volume:
        wish = replace(wish, clouds=("SECURE",))  # network volumes exist in the secure cloud alone
    if ask.volume and client:
        wish = replace(wish, data_centers=(_volume(client, ask).data_center,))
    env = {TOKEN_VARIABLE: f"{{{{ RUNPOD_SECRET_{ask.hf_secret} }}}}"} if ask.hf_secret else {}
    base = PodSpec(
        name=name,
        image=recipe.image,
        gpu="",
        gpu_count=0,
        disk_gb=ask.disk_gb,
        volume_id=ask.volume,
        volume_gb=ask.volume_gb,
        mount=recipe.mount,
        env=env,
        interruptible=ask.interruptible,
        min_cuda=ask.min_cuda,
    )
    return Quote(ask, recipe, limits, wish, base, _live(client, wish) if client else {})


def _volume(client: Client, ask: Ask) -> Volume:
    volume = client.volume(ask.volume or "")
    if ask.data_centers and volume.data_center not in ask.data_centers:
        raise ConfigError(
            f"the volume {volume.id} is in {volume.data_center}, so the pod must be too; "
            f"--data-center said {', '.join(ask.data_centers)}"
        )
    return volume


def _live(client: Client, wish: Wish) -> dict[tuple[str, int, str], GpuOffer]:
    found = {}
    for cloud in wish.clouds:
        for count in wish.counts:
            for offer in client.offers(cloud, count):
                found[(offer.id, count, cloud)] = offer
    return found
