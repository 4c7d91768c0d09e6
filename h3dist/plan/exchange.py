"""How q, k, v and the attention's output go between the ranks of a sequence group: the variant, groups and codec.

heads   each rank projects its rows to all heads of its tp share; q, k and v then go to the ranks of their heads
hidden  each rank gathers the modulated rows of all ranks of the request, and projects all of them to its own heads

Either way the output goes back to its rows. With `groups` > 1 a rank's heads go and come in as many groups, one
while attention works on another. The codec "int8" sends codes and a scale a block: approximate, only where asked for.
With rows "packed" what is gathered, hidden rows and those of a tp group, goes as the FP4 codes and block scales that an
NVFP4 product takes, where it is one: the same result from 3.56 times fewer bytes. Where sp is 1 no heads move, and the
variants are one. With `chunks` > 1 the partial results of a tp group are summed by runs of columns, one while the next
is multiplied.

What moves heads is the group's collectives (NCCL, or gloo), or by transport "copy" the GPUs' copy engines, which leave
all of a GPU to attention: the same bytes to the same places. "auto" is copies where every rank can make them, unless
collectives are predicted to be faster.
"""

from dataclasses import asdict, dataclass, replace
from itertools import product

from h3dist.errors import ConfigError, nearest
from h3dist.plan.layout import Layout

VARIANTS = ("heads", "hidden")
CODECS = ("none", "int8")
ROWS = ("plain", "packed")
TRANSPORTS = ("collective", "copy", "auto")
AUTO = "auto"
CODED_ROWS = 16  # rows of one head that share a scale
SCALE_BYTES = 4  # float32
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)  # numbers that "auto" weighs


@dataclass(frozen=True)
class ExchangePlan:
    """How heads move over sp."""

    variant: str = "heads"
    groups: int = 1
    codec: str = "none"
    rows: str = "plain"
    chunks: int = 1
    transport: str = "collective"

    def __post_init__(self) -> None:
        allowed = {"variant": VARIANTS, "codec": CODECS, "rows": ROWS, "transport": TRANSPORTS}
        for name, choices in allowed.items():
            value = getattr(self, name)
            if value not in choices:
                legal = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ConfigError(f"exchange.{name}={value}: use {legal}{nearest(value, choices)}")
        for name in ("groups", "chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"exchange.{name}={getattr(self, name)}: the least is 1")

    def hidden_on(self, layout: Layout) -> bool:
        """Whether a run on `layout` gathers hidden rows in the place of moving q, k and v."""
        return self.variant == "hidden" and layout.sp > 1

    def copies_on(self, layout: Layout) -> bool:
        """Whether a run on `layout` moves heads by copies, if it can."""
        return self.transport != TRANSPORTS[0] and layout.sp > 1

    def on(self, layout: Layout) -> "ExchangePlan":
        """The same without what is idle on `layout`: with sp 1 no heads move, with tp 1 nothing is summed."""
        idle = {"variant": VARIANTS[0], "groups": 1, "codec": CODECS[0], "transport": TRANSPORTS[0]}
        moved = {} if layout.sp > 1 else idle
        summed = {} if layout.tp > 1 else {"chunks": 1}
        gathered = {} if layout.tp > 1 or self.hidden_on(layout) else {"rows": ROWS[0]}
        return replace(self, **moved, **summed, **gathered)

    def idle_on(self, layout: Layout) -> tuple[str, ...]:
        """A note on each setting that changes nothing on `layout`."""
        reasons = {"chunks": "nothing is summed over tp 1", "rows": "no rows are gathered"}
        used = asdict(self.on(layout))
        return tuple(
            f"exchange.{name}={value} changes nothing here: {reasons.get(name, 'no heads move over sp 1')}"
            for name, value in asdict(self).items()
            if value != used[name]
        )

    def head_bytes(self, rows: int, size: int, element: int) -> int:
        """Bytes of one head of `rows` rows on the wire; `size` and `element` are a head's and an element's."""
        if self.codec == "none":
            return rows * size * element
        return rows * size + -(-rows // CODED_ROWS) * SCALE_BYTES

    @property
    def brief(self) -> str:
        """For tables: "hidden/7", "heads/1/int8", "heads/4+copy", "hidden/1+packed", "heads/1+chunks4"."""
        coded = "" if self.codec == "none" else f"/{self.codec}"
        copied = "" if self.transport == TRANSPORTS[0] else f"+{self.transport}"
        more = ("+packed" if self.rows == "packed" else "") + (f"+chunks{self.chunks}" if self.chunks > 1 else "")
        return f"{self.variant}/{self.groups}{coded}{copied}{more}"

    def __str__(self) -> str:
        coded = "" if self.codec == "none" else f" as {self.codec} codes (approximate)"
        more = ", rows packed" if self.rows == "packed" else ""
        more += f", sums in {self.chunks} chunks" if self.chunks > 1 else ""
        more += {"copy": ", by copies", "auto": ", by copies where ranks can"}.get(self.transport, "")
        return f"{self.variant} in {self.groups} group{'s' * (self.groups > 1)}{coded}{more}"


PLAIN = ExchangePlan()


def choose_exchange(
    variant: str, groups: str, codec: str, rows: str = ROWS[0], chunks: int = 1, transport: str = TRANSPORTS[0]
) -> ExchangePlan:
    """What the configuration's `exchange` means where nothing is known of the machine. Raises ConfigError.

    "auto" is then the plain way: heads, in one group.
    """
    return open_exchanges(variant, groups, codec, rows, chunks, transport)[0]


def open_exchanges(
    variant: str, groups: str, codec: str, rows: str = ROWS[0], chunks: int = 1, transport: str = TRANSPORTS[0]
) -> tuple[ExchangePlan, ...]:
    """Every exchange that the configuration leaves to be chosen from, the plainest first. Raises ConfigError.

    A codec, packed rows, chunks and copies are taken where they are named, and never otherwise. The transport "auto" is
    copies where ranks can make them, unless collectives are predicted to be faster.
    """
    variants = VARIANTS if variant == AUTO else (variant,)
    numbers = GROUPS if groups == AUTO else (int(groups),)
    transports = (AUTO, TRANSPORTS[0]) if transport == AUTO else (transport,)
    ways = product(transports, variants, numbers)
    return tuple(ExchangePlan(each, number, codec, rows, chunks, way) for way, each, number in ways)
