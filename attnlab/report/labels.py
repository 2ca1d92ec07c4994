"""Placement of labels next to their data, without overlaps."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnlab.report.style import BACKGROUND, FONT_SIZE, Curve, Point, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.text import Annotation
    from matplotlib.transforms import BboxBase


def label_ends(axes: "Axes", series: Sequence[Curve]) -> None:
    """Puts each label right of the axes, as near to the end of its curve as the others allow."""
    spec = axes.get_subplotspec()
    rows = 1 if spec is None else spec.get_gridspec().nrows
    height = 1.35 * FONT_SIZE * rows / (72 * _inches(axes) * 0.8)  # in axes coordinates
    values = [*axes.get_ylim(), *(float(c.values[:, -1].mean()) for c in series)]
    low, high, *last = axes.yaxis.get_transform().transform(np.array(values))
    ends = [min(1.0, float((value - low) / (high - low))) for value in last]
    places = spread(ends, height)
    # Labels below the axes move up.
    up = max(0.0, min(-min(places), 1.0 - max(places)))
    places = [place + up for place in places]
    for curve, place in zip(series, places, strict=True):
        axes.annotate(
            curve.label,
            (float(curve.steps[-1]), float(curve.values[:, -1].mean())),
            xytext=(1.06, place),
            textcoords="axes fraction",
            color=curve.style.colour,
            fontsize=FONT_SIZE,
            va="center",
            annotation_clip=False,
            arrowprops=_leader(curve.style),
        )


def _inches(axes: "Axes") -> float:
    """Height of the figure."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure.get_figheight()


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions at least `gap` apart, in the same order and close to those wanted.

    Positions that are too close form a block around the mean of its members.

    >>> spread([0.5, 0.0, 0.5], 0.25)
    [0.375, 0.0, 0.625]
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


def _leader(style: Style, shrink: float = 2) -> dict[str, object]:
    """Options of the line from a label to its point."""
    return {
        "arrowstyle": "-",
        "color": style.colour,
        "linewidth": 0.6,
        "alpha": 0.6,
        "shrinkA": 1,
        "shrinkB": shrink,
    }


def label_points(
    axes: "Axes", points: Sequence[Point], named: Sequence[Point] | None = None
) -> None:
    """Puts a label next to each point, or only to those `named`, where it covers least; nearer
    positions are preferred. No point is covered."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = axes.get_figure(root=True)
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()  # settles the layout, so that positions in pixels hold
    figure.set_layout_engine("none")
    taken = [_point_box(axes, point, figure.dpi / 72) for point in points]
    for point in sorted(points if named is None else named, key=lambda p: -p.y):
        text = axes.annotate(
            point.label,
            (point.x, point.y),
            xytext=(0, 0),
            textcoords="offset points",
            color=point.style.colour,
            fontsize=FONT_SIZE,
            ha="center",
            va="center",
            arrowprops=_leader(point.style, 4),
        )
        taken.append(_place(text, renderer, taken, axes, figure.dpi / 72))


def _point_box(axes: "Axes", point: Point, pixels: float) -> "BboxBase":
    """What a marker and its error bar cover, in pixels."""
    from matplotlib.transforms import Bbox

    spread = 0.0 if math.isnan(point.spread) else point.spread
    ends = [(point.x, point.y + sign * spread) for sign in (-1, 1)]
    (x, bottom), (_, top) = axes.transData.transform(ends)
    low, high = (x - 5 * pixels, bottom - 3 * pixels), (x + 5 * pixels, top + 3 * pixels)
    return Bbox([low, high])


def _place(
    text: "Annotation",
    renderer: "RendererBase",
    taken: Sequence["BboxBase"],
    axes: "Axes",
    pixels: float,
) -> "BboxBase":
    """Moves a label to the best position, and returns what it covers there."""
    from matplotlib.text import Text

    text.update_positions(renderer)
    box = Text.get_window_extent(text, renderer)
    text.set_bbox({"facecolor": BACKGROUND, "alpha": 0.8, "linewidth": 0, "pad": 0.5})
    best: tuple[float, tuple[float, float], BboxBase] = (math.inf, (0.0, 0.0), box)
    for reach in (6.0, 14.0, 24.0, 36.0, 50.0, 70.0):
        for degrees in (0, 180, 20, -20, 160, -160, 45, -45, 135, -135, 90, -90):
            angle = math.radians(degrees)
            # The nearest edge of the label, not its centre, is `reach` points away.
            dx = math.cos(angle) * (reach + box.width / pixels / 2)
            dy = math.sin(angle) * (reach + box.height / pixels / 2)
            moved = box.translated(dx * pixels, dy * pixels)
            cost = _covered(moved, taken, axes.bbox) + 0.5 * reach
            best = min(best, (cost, (dx, dy), moved), key=lambda b: b[0])
    text.set_position(best[1])
    return best[2].padded(2 * pixels)


def _covered(box: "BboxBase", taken: Sequence["BboxBase"], inside: "BboxBase") -> float:
    """Area of `box` in square pixels that is taken or outside."""
    from matplotlib.transforms import Bbox

    shared: list[Bbox | None] = [Bbox.intersection(box, other) for other in taken]
    kept: Bbox | None = Bbox.intersection(box, inside)
    out = box.width * box.height - (kept.width * kept.height if kept else 0)
    return float(3 * (out + sum(s.width * s.height for s in shared if s)))
