"""The design of the head-width study: stages, points and texts; docs/results/head_width/plan.md.

Learning rates and seeds are data: columns of docs/results/head_width/runs.csv. The code that chose
the rates of a stage from the rows of earlier ones is that of commit c7dea7407155.
"""

from typing import NamedTuple


class Stage(NamedTuple):
    """A stage of the plan."""

    title: str
    planned: int
    """Runs, without further rates beyond the end of a grid."""
    hours: float
    """Core-hours that were expected."""


STAGES = {
    0: Stage("optimizer", 96, 3.9),
    1: Stage("learning rates", 205, 2.9),
    3: Stage("surface, D = 64", 208, 8.4),
    2: Stage("surface, D = 32", 176, 1.1),
    6: Stage("training length and context", 28, 4.5),
    5: Stage("sharing, D = 64", 64, 4.4),
    4: Stage("surface, D = 96", 56, 9.3),
}
"""In the order in which they ran. Stage 7, a second look at P1, was not needed."""
STAGE_OF_WIDTH = {32: 2, 64: 3, 96: 4}
"""Model width -> the stage of its surface."""
HEAD_DIMS = {32: (2, 4, 8, 16, 32), 64: (4, 8, 16, 32, 64), 96: (4, 8, 16, 32, 96)}
FULL = {w: {h: f"{w // h}x{h}" for h in dims} for w, dims in HEAD_DIMS.items()}
"""Model width -> head_dim -> the point with N h = D."""
POINTS = {
    32: (*FULL[32].values(), "4x4", "2x8", "1x16", "12x4", "6x8", "3x16"),
    64: (*FULL[64].values(), "4x8", "2x16", "1x32", "12x8", "6x16", "3x32",
         "4x16 narrow", "8x8 narrow"),
    96: (*FULL[96].values(), "3x16", "9x16"),
}  # fmt: skip
"""Model width -> num_heads x head_dim; N h / D is 1, 1/2 and 3/2."""
TOLERANCE = 0.010
"""Bits above the lowest mean of stage 0 that a candidate may have."""
LENGTH_TEXTS = ("python", "wikitext2", "novels", "movie_reviews")
REPEATED_TEXTS = ("multi30k_de", "web")
"""Read 4 to 5 times at D = 96."""
CONTEXT_TEXTS = ("python", "wikitext2")
