"""Measurements as PNGs: speed-up against the ideal, time by stage, bytes predicted and counted. Needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from h3dist.errors import MissingDependency, OutputError
from h3dist.report.rows import Row, Source, apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000")
MARKERS = "osD^vP*X"
ACROSS = 3  # shapes side by side
LEGEND = 4  # names side by side
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
BAR, LINE = 0.34, 0.18  # inches a bar, a line below a picture


def draw(sources: Sequence[Source], folder: Path) -> list[str]:
    """Write every picture that the sources have figures for into `folder`. Gives the file names.

    Raises `MissingDependency` without matplotlib and `OutputError`.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependency("pictures need matplotlib: pip install 'h3dist[plots]'") from error
    made = _save(folder, "speedup.png", speedup, sources)
    for number, source in enumerate(sources, 1):
        mark = f"-{number}" if len(sources) > 1 else ""
        made += _save(folder, f"stages{mark}.png", stages, source)
        made += _save(folder, f"bytes{mark}.png", sent, source)
    return made


def _save(folder: Path, name: str, picture: Callable[[Any], "Figure | None"], figures: Any) -> list[str]:
    made = picture(figures)
    if made is None:
        return []
    try:
        made.savefig(folder / name, dpi=120, bbox_inches="tight")
    except OSError as error:
        raise OutputError(f"cannot write {folder / name}: {error.strerror}") from error
    return [name]


def speedup(sources: Sequence[Source]) -> "Figure | None":
    """Speed-up over ranks, a panel a shape and a line a layout; None where nothing was measured on several ranks."""
    curves = {shape: lines for shape in _shapes(sources) if (lines := _curves(sources, shape))}
    if not curves:
        return None
    names = list(dict.fromkeys(name for lines in curves.values() for name in lines))
    key = _key(sources, names) if len(sources) > 1 else []
    if any(row.base > 1 for lines in curves.values() for rows in lines.values() for row in rows):
        key.append("Where one rank was not measured, the fewest ranks stand on the ideal.")
    figure, panels = _panels(len(curves), below=len(key) + len(names) // LEGEND)
    for panel, (shape, lines) in zip(panels, curves.items(), strict=True):
        _speedup_panel(panel, shape, lines, names)
    panels[0].set_ylabel("speed-up")
    _legend(figure, panels, "\n".join(key))
    return figure


def _key(sources: Sequence[Source], names: Sequence[str]) -> list[str]:
    """What the letters before the names of lines stand for."""
    told = zip(ascii_uppercase, sources, strict=False)
    return [f"{letter}: {source.title}" for letter, source in told if any(x.startswith(f"{letter}:") for x in names)]


def _shapes(sources: Sequence[Source]) -> list[str]:
    rows = sorted((row for source in sources for row in source.rows), key=lambda row: row.place)
    return list(dict.fromkeys(row.shape for row in rows))


def _curves(sources: Sequence[Source], shape: str) -> dict[str, list[Row]]:
    """The rows of each line of a panel: one layout of one kind, and the fewest ranks that it is held against."""
    lines: dict[str, list[Row]] = {}
    for letter, source in zip(ascii_uppercase, sources, strict=False):
        prefix = f"{letter}:" if len(sources) > 1 else ""
        for row, name in zip(source.rows, apart(source.rows), strict=True):
            if row.shape == shape and row.gain is not None and row.ranks > row.base:
                base = [other for other in source.rows if other.kind == row.kind and other.ranks == row.base]
                lines.setdefault(" ".join(filter(None, (prefix, row.layout, name))), base[:1]).append(row)
    return lines


def _speedup_panel(panel: "Axes", shape: str, lines: dict[str, list[Row]], names: Sequence[str]) -> None:
    most = max(row.ranks for rows in lines.values() for row in rows)
    panel.plot([1, most], [1, most], color="0.6", linestyle="--", linewidth=1, label="ideal")
    for name, rows in lines.items():
        place = names.index(name)
        points = sorted((row.ranks, row.gain) for row in rows if row.gain is not None)
        style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        panel.plot(*zip(*points, strict=True), label=name, linewidth=1.5, markersize=6, alpha=0.85, **style)
    panel.set_title(shape, fontsize=11)
    panel.set_xlabel("ranks")
    ticks = sorted({1} | {row.ranks for rows in lines.values() for row in rows})
    panel.set_xticks(ticks)
    panel.set_yticks(ticks)
    panel.set_xlim(0, most + 0.3)
    panel.set_ylim(0, most + 0.3)
    panel.grid(alpha=0.3)


def stages(source: Source) -> "Figure | None":
    """Seconds of a run by stage, a bar a row; None where no row knows its stages."""
    rows = [row for row in source.rows if row.stages]
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row.stages))
    figure, panel = _bars(source, rows)
    for row, place in zip(rows, _places(rows), strict=True):
        left = 0.0
        for number, name in enumerate(names):
            seconds = row.stages.get(name, 0.0)
            panel.barh(place, seconds, left=left, height=0.7, color=COLOURS[number % len(COLOURS)], label=name)
            left += seconds
        panel.text(left, place, f" {left:.1f} s", va="center", fontsize=8)
    panel.set_xlabel("seconds of a run, by stage")
    panel.margins(x=0.08)
    _legend(figure, [panel])
    return figure


def sent(source: Source) -> "Figure | None":
    """Bytes sent in a run, predicted above counted, by collective; None where nothing was sent."""
    rows = [row for row in source.rows if sum(row.planned.values()) or sum(row.counted.values())]
    if not rows:
        return None
    names = [name for name in rows[0].planned if any(row.planned[name] or row.counted[name] for row in rows)]
    most = max(sum(row.counted.values()) for row in rows)
    size, unit = next(((size, unit) for size, unit in UNITS if most >= size), UNITS[-1])
    figure, panel = _bars(source, rows, height=1.5)
    for row, place in zip(rows, _places(rows), strict=True):
        _stack(panel, place - 0.18, [row.planned[name] / size for name in names], names, alpha=0.45, hatch="///")
        end = _stack(panel, place + 0.18, [row.counted[name] / size for name in names], names)
        same = "as predicted" if dict(row.planned) == dict(row.counted) else "not as predicted"
        panel.text(end, place + 0.18, f" {end:.3g} {unit}, {same}", va="center", fontsize=8)
    panel.set_xlabel(f"{unit} sent by all ranks in a run: predicted (hatched) above counted")
    panel.margins(x=0.25)
    _legend(figure, [panel])
    return figure


def _stack(panel: "Axes", place: float, sizes: Sequence[float], names: Sequence[str], **style: Any) -> float:
    """One bar of several parts; gives where it ends. Only plain bars are named in the legend."""
    left = 0.0
    for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
        label = f"_{name}" if style else name
        colour = COLOURS[number % len(COLOURS)]
        panel.barh(
            place, size, left=left, height=0.34, color=colour, edgecolor="white", linewidth=0, label=label, **style
        )
        left += size
    return left


def _panels(count: int, below: int) -> "tuple[Figure, list[Axes]]":
    """A picture of `count` panels with room for some lines below."""
    from matplotlib.figure import Figure

    across = min(count, ACROSS)
    down = -(-count // across)
    figure = Figure(figsize=(4.2 * across + 0.6, 3.8 * down + LINE * below), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def _places(rows: Sequence[Row]) -> list[float]:
    """Where each row's bar stands: one below the other, with a gap between shapes."""
    places, at = [], 0.0
    for before, row in zip([None, *rows], rows, strict=False):
        at += 0.0 if before is None else 1.0 if before.shape == row.shape else 1.6
        places.append(at)
    return places


def _bars(source: Source, rows: Sequence[Row], height: float = 1.0) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    places = _places(rows)
    figure = Figure(figsize=(9.5, height * BAR * (places[-1] + 1) + 1.6), layout="constrained")
    panel = figure.subplots()
    names = zip(rows, apart(rows), strict=True)
    panel.set_yticks(places, [f"{row.shape} {row.layout} {row.ranks} {name}" for row, name in names], fontsize=8)
    panel.invert_yaxis()
    panel.set_title(source.title, fontsize=11)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    return figure, panel


def _legend(figure: "Figure", panels: "Sequence[Axes]", title: str = "") -> None:
    """One legend below the picture, each name once."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    columns = min(len(found), LEGEND)
    style = {"ncols": columns, "fontsize": 8, "title_fontsize": 8, "frameon": False, "alignment": "left"}
    figure.legend(found.values(), found.keys(), loc="outside lower center", title=title, **style)
