"""What each head of a layout reads and makes, matrix by matrix, from the axes of its weights.

A line is a weight, a column a head. The bar above is what there is to read, filled where this head
reads it; the bar below what the head makes; the matrix is between, its sides to scale. A colour is
one matrix: one for each head, or grey for one that all heads use.
"""

import math

from attnlab.heads import LAYOUTS, Layout, Weight
from attnlab.heads.cost import cache_shapes
from attnlab.heads.weights import Axes
from experiments.drawing.letters import letters
from experiments.drawing.marks import COLOURS, FAINT, SHARED, box, drawing, label

NAMES = (
    "standard", "wide", "narrow", "narrow_tied", "alt", "collaborative", "bilinear", "absorbed",
    "two_stage", "low_rank_query", "tensor_product", "grouped_tied", "latent", "latent_absorbed",
    "differential",
)  # fmt: skip
WIDTH, HEADS = 64, 4
LEFT, COLUMN, LINE, TOP = 104, 92, 62, 24
SCALE = 80 / WIDTH
BAR, BETWEEN = 7, 22
HEAD_AXES = ("num_heads", "num_kv_heads")


def layout_drawing(name: str) -> str:
    """The drawing of a registered layout, at D = 64 and 4 heads."""
    layout = LAYOUTS[name](width=WIDTH, num_heads=HEADS)
    cached = cache_shapes(layout)
    lines = [_cached_input("keys" if "v" in cached else "keys, values")] if "x" in cached else []
    lines += [_line(weight_name, one, layout) for weight_name, one in drawn_weights(layout).items()]
    heads = [label(LEFT + COLUMN * (n + 0.5), 14, f"head {n}", at="middle") for n in range(HEADS)]
    marks = [
        f'<g transform="translate(0 {TOP + LINE * i})">{"".join(line)}</g>'
        for i, line in enumerate(lines)
    ]
    title = f"{name}: what each of {HEADS} heads reads and makes"
    return drawing(LEFT + COLUMN * HEADS, TOP + LINE * len(lines), title, heads + marks)


def drawn_weights(layout: Layout) -> dict[str, Weight]:
    """The weights that are drawn: all but norms and biases."""
    return {n: one for n, one in layout.weights().items() if one.reads or one.constant is None}


def _line(name: str, one: Weight, layout: Layout) -> list[str]:
    """A weight: as many matrices as it has heads, each over the columns of those that use it."""
    count = next((layout.size(axis) for axis in one.axes if axis in HEAD_AXES), 1)
    drawn = HEADS if one.applied_per else count  # narrow_tied: the same one, once for each head
    share = COLUMN * HEADS / drawn
    made = _size(layout, one.makes)
    text = letters(one.makes) if not one.reads else f"{letters(one.reads)} → {letters(one.makes)}"
    if one.per or one.applied_per:
        text = f"{letters(one.per or one.applied_per)} ({text})"
    marks = [
        label(0, 22, name, more=' font-weight="600"'),
        label(0, 40, text, more=' opacity=".75"'),
    ]
    marks += [_band()] if drawn == 1 else []
    slices = "slice_width" in one.reads
    for i in range(drawn):
        colour = SHARED if count == 1 else COLOURS[i]
        middle = LEFT + share * (i + 0.5)
        width = WIDTH if slices else _size(layout, one.reads) if one.reads else 0
        num_slices = HEADS if slices else 1
        marks += _matrix(middle, width, i if slices else 0, num_slices, made, colour, name)
    return marks


def _matrix(
    middle: float, width: int, index: int, num_slices: int, made: int, colour: str, name: str
) -> list[str]:
    """One matrix between its two bars: it reads one of so many slices of `width` numbers."""
    start, piece = middle - SCALE * width / 2, SCALE * width / num_slices
    x0, x1 = start + piece * index, start + piece * (index + 1)
    y0, y1 = BAR + 2, BAR + 2 + BETWEEN
    z0, z1 = middle - SCALE * made / 2, middle + SCALE * made / 2
    fill = f'fill="{colour}"'
    about = f'data-weight="{name}" data-reads="{(x1 - x0) / SCALE:g}" data-makes="{made}"'
    if not width:
        return [box(z0, y1, z1 - z0, BAR, f"{fill} {about}")]
    return [
        box(start, 2, SCALE * width, BAR, FAINT),
        box(x0, 2, x1 - x0, BAR, f'{fill} data-from="{(x0 - start) / SCALE:g}"'),
        f'<path d="M{x0:g} {y0} L{x1:g} {y0} L{z1:g} {y1} L{z0:g} {y1} Z" {fill} '
        f'fill-opacity=".45" {about}/>',
        box(z0, y1, z1 - z0, BAR, fill),
    ]


def _cached_input(name: str) -> list[str]:
    """A layout that caches x itself: as its keys, and as values if it has no v."""
    bar = box(LEFT + (COLUMN * HEADS - SCALE * WIDTH) / 2, 16, SCALE * WIDTH, BAR, FAINT)
    text = label(0, 40, "x as it is", more=' opacity=".75"')
    return [label(0, 22, name, more=' font-weight="600"'), text, _band(), bar]


def _band() -> str:
    """Behind what all heads use."""
    look = 'rx="4" fill="currentColor" fill-opacity=".07"'
    return box(LEFT + 6, -4, COLUMN * HEADS - 12, 2 * BAR + BETWEEN + 12, look)


def _size(layout: Layout, axes: Axes) -> int:
    return math.prod(layout.size(axis) for axis in axes if axis not in HEAD_AXES)
