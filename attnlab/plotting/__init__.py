"""Arrays -> figures. The one room that knows matplotlib, imported when the first figure is made.

Nothing here computes: what is drawn was measured elsewhere. Every series is labelled where it
lies, so that no legend is needed; colours are told apart by colour-blind eyes too.
"""

from attnlab.plot.frame import (
    COLOURS,
    GRID,
    INK,
    LETTERS,
    MARKERS,
    PAPER,
    Bar,
    Curve,
    Interval,
    Point,
    Style,
    style,
    svg,
)
from attnlab.plot.joint import joint
from attnlab.plot.maps import HeadTable, attention_map, head_tables
from attnlab.plot.series import (
    bars,
    dots,
    intervals,
    ladder,
    learning_curves,
    loss_against,
    over,
    parabolas,
    ratios,
)

__all__ = [
    "COLOURS",
    "GRID",
    "INK",
    "LETTERS",
    "MARKERS",
    "PAPER",
    "Bar",
    "Curve",
    "HeadTable",
    "Interval",
    "Point",
    "Style",
    "attention_map",
    "bars",
    "dots",
    "head_tables",
    "intervals",
    "joint",
    "ladder",
    "learning_curves",
    "loss_against",
    "over",
    "parabolas",
    "ratios",
    "style",
    "svg",
]
