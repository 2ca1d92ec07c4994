"""Arrays -> figures. The one file that knows matplotlib, imported when the first figure is made.

Nothing here computes: what is drawn was measured elsewhere. Every series is labelled where it
lies, so that no legend is needed; colours are told apart by colour-blind eyes too.
"""

import io
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from attnlab.extras import extra

INK, GRID, PAPER = "#222222", "#d8d8d8", "#ffffff"
# Okabe and Ito 2008, https://jfly.uni-koeln.de/color, without black and yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")

SIZE = (
    4.7,
    3.6,
)  # inches: about as many points as a phone has pixels, so letters keep their size
LETTERS = 10


class Style(NamedTuple):
    """How a series looks."""

    colour: str
    dashes: str
    marker: str
    hollow: bool


class Curve(NamedTuple):
    """A loss over steps, one row per seed. The range of the axes leaves broken curves out."""

    label: str
    style: Style
    steps: Int[np.ndarray, " P"]
    values: Float[np.ndarray, "S P"]
    broken: bool


class Point(NamedTuple):
    """A value at x with its spread to both sides (NaN: not known)."""

    label: str
    style: Style
    x: float
    y: float
    spread: float


class Interval(NamedTuple):
    """A difference with the ends of its interval (NaN: not known)."""

    label: str
    style: Style
    mean: float
    low: float
    high: float


def style(colour: int, pattern: int) -> Style:
    """The `colour`-th colour with the `pattern`-th dashes and marker; both go round."""
    return Style(
        COLOURS[colour % len(COLOURS)],
        DASHES[pattern % len(DASHES)],
        MARKERS[pattern % len(MARKERS)],
        pattern % 2 == 1,
    )


def learning_curves(series: Sequence[Curve], ylabel: str) -> Any:
    """The mean over seeds as a line and min to max as a band, labelled at the right end.

    The range is that of the last three quarters: the fall at the start would flatten the rest.
    """
    # Many labels need a taller figure: 0.19 inches each, on 80 % of it.
    figure, [[axes]] = _figure(SIZE[0], max(SIZE[1], 0.24 * len(series)), 1, 1)
    for curve in series:
        mean, look = curve.values.mean(0), curve.style
        band = curve.values.min(0), curve.values.max(0)
        axes.fill_between(curve.steps, *band, color=look.colour, alpha=0.18, linewidth=0)
        axes.plot(
            curve.steps,
            mean,
            color=look.colour,
            linestyle=look.dashes,
            linewidth=1.6,
            **_marker(look, 4.0),
        )
    sound = [c for c in series if not c.broken] or series
    last = max(int(c.steps[-1]) for c in series)
    late = [c.values[:, c.steps >= min(last / 4, c.steps[-1])] for c in sound]
    values = np.concatenate([v.ravel() for v in late])
    low, high = float(values.min()), float(values.max())
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(right=last)
    axes.set(xlabel="training step", ylabel=ylabel)
    axes.locator_params(axis="x", nbins=6, integer=True)
    _label_ends(axes, series)
    return figure


def loss_against(points: Sequence[Point], xlabel: str, ylabel: str) -> Any:
    """A scatter with error bars; x is logarithmic where it spans more than a factor of 5."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    figure, [[axes]] = _figure(*SIZE, 1, 1)
    for point in points:
        axes.errorbar(
            point.x,
            point.y,
            yerr=point.spread,
            color=point.style.colour,
            linestyle="none",
            elinewidth=1.2,
            capsize=2.5,
            **_marker(point.style, 7.0),
        )
    xs = [p.x for p in points]
    if max(xs) > 5 * min(xs):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(0.14, 0.14)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    _label_points(axes, points)
    return figure


def intervals(rows: Sequence[Interval], xlabel: str) -> Any:
    """One line a row with its interval, first row on top, and zero marked."""
    figure, [[axes]] = _figure(SIZE[0], max(1.9, 0.9 + 0.38 * len(rows)), 1, 1)
    axes.axvline(0, color=INK, linewidth=1)
    for y, row in enumerate(rows):
        axes.plot([row.low, row.high], [y, y], color=row.style.colour, linewidth=1.6)
        axes.plot(
            row.mean,
            y,
            color=row.style.colour,
            linestyle="none",
            **_marker(row.style, 7.0),
        )
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(row.style.colour)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=6)
    axes.set(xlabel=xlabel)
    return figure


def attention_map(
    probs: Float[np.ndarray, "L N T S"],
    layers: Sequence[str],
    heads: Sequence[str],
    colour: str,
) -> Any:
    """A grid of maps, one row a layer and one column a head, with a scale below.

    A cell is as opaque as the square root of its probability, so that weak attention shows and
    no attention is the paper itself, light or dark.
    """
    rows, columns = probs.shape[:2]
    # Room for "head 12" above; a map that is not square fills a square, to be seen at all.
    cell = min(1.0, max(4.0 / columns, 0.62))
    figure, grid = _figure(columns * cell + 0.7, rows * cell + 1.3, rows, columns)
    for i, j in np.ndindex(rows, columns):
        axes = grid[i, j]
        axes.imshow(_tint(probs[i, j], colour), interpolation="none", aspect="auto")
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        axes.set_box_aspect(1)
        axes.spines[:].set(visible=True, color=GRID)
    for axes, name in zip(grid[0], heads, strict=True):
        axes.set_title(name, fontsize=LETTERS, color=INK)
    for axes, name in zip(grid[:, 0], layers, strict=True):
        axes.set_ylabel(name, fontsize=LETTERS, color=INK)
    grid[-1, 0].set_xlabel("keys →", fontsize=LETTERS, color=INK, loc="left")
    figure.supylabel("← queries", fontsize=LETTERS, color=INK)
    _scale(figure, grid, colour)
    return figure


def svg(figure: Any, name: str) -> str:
    """The figure as an <svg> element that loads nothing and is the same each time.

    `name` keeps its inner ids apart from those of other figures on one page. Text stays text.
    """
    import matplotlib

    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'<g id="[^"]*"', "<g", text)


def _figure(width: float, height: float, rows: int, columns: int) -> tuple[Any, Any]:
    """A figure that no global state knows, and its quiet axes [rows, columns]."""
    with extra("plot"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRID)
        axes.tick_params(which="both", labelcolor=INK, color=GRID, labelsize=LETTERS)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set(fontsize=LETTERS, color=INK)
    return figure, grid


def _marker(look: Style, size: float) -> dict[str, Any]:
    return {
        "marker": look.marker,
        "markersize": size,
        "markerfacecolor": PAPER if look.hollow else look.colour,
        "markeredgecolor": look.colour,
        "markeredgewidth": 1.4,
    }


def _tint(probs: np.ndarray, colour: str) -> np.ndarray:
    """[..., T, S] -> RGBA: the colour, as opaque as the square root of the probability."""
    from matplotlib.colors import to_rgb

    opacity = np.sqrt(np.clip(probs.astype(np.float64), 0, 1))
    return np.concatenate(
        [np.broadcast_to(to_rgb(colour), (*probs.shape, 3)), opacity[..., None]], -1
    )


def _scale(figure: Any, grid: Any, colour: str) -> None:
    """A bar below the grid that says which tint is which probability."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb

    rgb = to_rgb(colour)
    tints = LinearSegmentedColormap.from_list("tints", [(*rgb, 0.0), (*rgb, 1.0)])
    bar = figure.colorbar(
        ScalarMappable(PowerNorm(0.5, 0, 1), tints),
        ax=grid,
        location="bottom",
        shrink=0.6,
        aspect=30,
        ticks=[0, 0.1, 0.5, 1],
    )
    bar.ax.set_xticklabels(["0", "0.1", "0.5", "1"])
    bar.ax.tick_params(labelcolor=INK, color=GRID, labelsize=LETTERS)
    bar.outline.set_edgecolor(GRID)
    bar.set_label("attention probability", fontsize=LETTERS, color=INK)


def _label_ends(axes: Any, series: Sequence[Curve]) -> None:
    """Each label right of the axes, as near the end of its curve as the others leave room."""
    height = 1.35 * LETTERS / (72 * axes.figure.get_figheight() * 0.8)  # of the axes' height
    low, high = axes.get_ylim()
    ends = [min(1.0, (float(c.values[:, -1].mean()) - low) / (high - low)) for c in series]
    places = _spread(ends, height)
    # Beside the axes, where they fit: a pile at the bottom moves up.
    up = max(0.0, min(-min(places), 1.0 - max(places)))
    places = [place + up for place in places]
    for curve, place in zip(series, places, strict=True):
        axes.annotate(
            curve.label,
            (float(curve.steps[-1]), float(curve.values[:, -1].mean())),
            xytext=(1.06, place),
            textcoords="axes fraction",
            color=curve.style.colour,
            fontsize=LETTERS,
            va="center",
            annotation_clip=False,
            arrowprops=_leader(curve.style),
        )


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places at least `gap` apart, in the order wanted and near to it.

    Neighbours that are too near form a block, which stands where its members' mean wish is.
    """
    blocks: list[tuple[float, list[int]]] = []
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        blocks.append((wanted[i], [i]))
        while len(blocks) > 1:
            (below, lower), (above, upper) = blocks[-2:]
            if above - below >= gap * (len(lower) + len(upper)) / 2:
                break
            members = lower + upper
            centre = (below * len(lower) + above * len(upper)) / len(members)
            blocks[-2:] = [(centre, members)]
    places = [0.0] * len(wanted)
    for centre, members in blocks:
        for k, i in enumerate(members):
            places[i] = centre + gap * (k - (len(members) - 1) / 2)
    return places


def _leader(look: Style) -> dict[str, Any]:
    return {
        "arrowstyle": "-",
        "color": look.colour,
        "linewidth": 0.6,
        "alpha": 0.6,
        "shrinkA": 1,
    }


def _label_points(axes: Any, points: Sequence[Point]) -> None:
    """Each label beside its point, where it covers least: nearest places are tried first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure = axes.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # the layout settles, so that places in pixels hold
    figure.set_layout_engine("none")
    pixels = figure.dpi / 72
    taken = []
    for point in points:
        spread = 0.0 if math.isnan(point.spread) else point.spread
        ends = [(point.x, point.y + sign * spread) for sign in (-1, 1)]
        (x, bottom), (_, top) = axes.transData.transform(ends)
        taken.append(
            Bbox(
                [
                    [x - 5 * pixels, bottom - 3 * pixels],
                    [x + 5 * pixels, top + 3 * pixels],
                ]
            )
        )
    for point in sorted(points, key=lambda p: -p.y):
        text = axes.annotate(
            point.label,
            (point.x, point.y),
            xytext=(0, 0),
            textcoords="offset points",
            color=point.style.colour,
            fontsize=LETTERS,
            ha="center",
            va="center",
            arrowprops=_leader(point.style) | {"shrinkB": 4},
        )
        text.update_positions(renderer)
        box = Text.get_window_extent(text, renderer)
        text.set_bbox({"facecolor": PAPER, "alpha": 0.8, "linewidth": 0, "pad": 0.5})
        best = (math.inf, (0.0, 0.0), box)
        for reach in (6.0, 14.0, 24.0, 36.0, 50.0, 70.0):
            for angle in (0, 180, 20, -20, 160, -160, 45, -45, 135, -135, 90, -90):
                turn = math.radians(angle)
                # The nearest edge of the label, not its centre, is `reach` points away.
                dx = math.cos(turn) * (reach + box.width / pixels / 2)
                dy = math.sin(turn) * (reach + box.height / pixels / 2)
                moved = box.translated(dx * pixels, dy * pixels)
                cost = _covered(moved, taken, axes.bbox) + 0.5 * reach
                best = min(best, (cost, (dx, dy), moved), key=lambda b: b[0])
        text.set_position(best[1])
        taken.append(best[2].padded(2 * pixels))


def _covered(box: Any, taken: Sequence[Any], inside: Any) -> float:
    """How much of `box` (in square pixels) lies on what is taken, or outside."""
    from matplotlib.transforms import Bbox

    shared = [Bbox.intersection(box, other) for other in taken]
    kept = Bbox.intersection(box, inside)
    out = box.width * box.height - (kept.width * kept.height if kept else 0)
    return 3 * (out + sum(s.width * s.height for s in shared if s))
