"""Figures from arrays. matplotlib is imported when the first figure is made; where it is missing,
that is a ModuleNotFoundError.

Series are labelled next to their data, so no legend is needed, and colours are distinguishable for
colour-blind readers.
"""

from attnlab.plotting.curves import (
    fitted_curves,
    learning_curves,
    metric_curves,
    ratio_curves,
)
from attnlab.plotting.intervals import bar_plot, dot_plot, interval_plot
from attnlab.plotting.maps import HeadTable, attention_map, head_tables
from attnlab.plotting.scatter import scatter, scatter_with_front
from attnlab.plotting.style import (
    BACKGROUND,
    COLOURS,
    FONT_SIZE,
    FOREGROUND,
    GRID,
    MARKERS,
    Bar,
    Curve,
    Interval,
    Point,
    Style,
    style,
    to_svg,
)
from attnlab.plotting.themed import INK, THEMED_COLOURS, new_axes, themed_svg

__all__ = [
    "BACKGROUND", "COLOURS", "FONT_SIZE", "FOREGROUND", "GRID", "INK", "MARKERS", "THEMED_COLOURS",
    "Bar", "Curve", "HeadTable", "Interval", "Point", "Style", "attention_map", "bar_plot",
    "dot_plot", "fitted_curves", "head_tables", "interval_plot", "learning_curves", "metric_curves",
    "new_axes", "ratio_curves", "scatter", "scatter_with_front", "style",
    "themed_svg", "to_svg",
]  # fmt: skip
