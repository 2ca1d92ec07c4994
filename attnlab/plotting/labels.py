"""Where labels stand: beside what they name, and not on each other."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from attnlab.plot.frame import LETTERS, PAPER, Curve, Point, Style


def label_ends(axes: Any, series: Sequence[Curve]) -> None:
    """Each label right of the axes, as near the end of its curve as the others leave room."""
    rows = axes.get_subplotspec().get_gridspec().nrows
    height = 1.35 * LETTERS * rows / (72 * axes.figure.get_figheight() * 0.8)  # of the axes'
    values = [*axes.get_ylim(), *(float(c.values[:, -1].mean()) for c in series)]
    low, high, *last = axes.yaxis.get_transform().transform(np.array(values))
    ends = [min(1.0, float((value - low) / (high - low))) for value in last]
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


def label_points(axes: Any, points: Sequence[Point], named: Sequence[Point] | None = None) -> None:
    """Each label beside its point, where it covers least: nearest places are tried first. Only the
    points `named` get theirs, if that is given; none is covered."""
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
    for point in sorted(points if named is None else named, key=lambda p: -p.y):
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
