"""What each head of a layout reads and makes, matrix by matrix, from the maps of its row.

A line is a weight, a column a head. The bar above is what there is to read, filled where this head
reads it; the bar below what the head makes; the matrix between, its sides to scale. A colour is a
set of weights: one for each head, or grey for a set that all heads use.
"""

import math

from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import Map
from attnlab.heads.old.spec import HeadSpec
from experiments.drawing.marks import COLOURS, FAINT, SHARED, box, drawing, word

WIDTH, HEADS = 64, 4
LEFT, COLUMN, LINE, TOP = 104, 92, 62, 24
SCALE = 80 / WIDTH
BAR, BETWEEN = 7, 22


def layout_drawing(layout: str) -> str:
    """The drawing of a row of `LAYOUTS`, at D = 64 and 4 heads."""
    spec = HeadSpec(layout, width=WIDTH, num_heads=HEADS)
    row = LAYOUTS[layout]
    lines = [_kept(row.cache) for axes in row.cache.values() if axes == "E"]
    lines += [_line(name, one, row.maps[name], spec) for name, one in matrices(spec).items()]
    heads = [
        word(LEFT + COLUMN * (n + 0.5), 14, f"head {n + 1}", at="middle") for n in range(HEADS)
    ]
    marks = [
        f'<g transform="translate(0 {TOP + LINE * i})">{"".join(line)}</g>'
        for i, line in enumerate(lines)
    ]
    title = f"{layout}: what each of {HEADS} heads reads and makes"
    return drawing(LEFT + COLUMN * HEADS, TOP + LINE * len(lines), title, heads + marks)


def matrices(spec: HeadSpec) -> dict[str, Map]:
    """The maps that are drawn: those that sum over something, or are drawn at random."""
    return {name: one for name, one in spec.maps.items() if one.drawn}


def _line(name: str, one: Map, text: str, spec: HeadSpec) -> list[str]:
    """A weight: as many pictures as it has heads, each over the columns of those who use it."""
    reads, makes = one.reads, one.makes
    sets = next((spec.sizes[a] for a in "NK" if a in one.axes), 1)
    apart = text.split(": ")[1].startswith("(")  # the same set, once for each head
    pictures = HEADS if apart else sets
    share = COLUMN * HEADS / pictures
    own = "".join(a for a in reads if a not in "NK")
    made = _size(spec, "".join(a for a in makes if a not in "NK"))
    said = text.split(": ")[1].split(" if ")[0].split(" ~ ")[0].replace("->", "→")
    marks = [word(0, 22, name, more=' font-weight="600"'), word(0, 40, said, more=' opacity=".75"')]
    marks += [_band()] if pictures == 1 else []
    for i in range(pictures):
        colour = SHARED if sets == 1 else COLOURS[i]
        middle = LEFT + share * (i + 0.5)
        first, last = (i, i + 1) if own == "C" else (0, 1)
        there = WIDTH if own == "C" else _size(spec, own) if own else 0
        marks += _picture(middle, there, first, last, own, made, colour, name)
    return marks


def _picture(
    middle: float, there: int, first: int, last: int, own: str, made: int, colour: str, name: str
) -> list[str]:
    """One matrix between its two bars; `own` "C" is chunk `first` of what is there."""
    start = middle - SCALE * there / 2
    piece = SCALE * there / (HEADS if own == "C" else 1)
    x0, x1 = start + piece * first, start + piece * last
    y0, y1 = BAR + 2, BAR + 2 + BETWEEN
    z0, z1 = middle - SCALE * made / 2, middle + SCALE * made / 2
    fill = f'fill="{colour}"'
    about = f'data-weight="{name}" data-reads="{(x1 - x0) / SCALE:g}" data-makes="{made}"'
    marks = []
    if own:
        marks += [
            box(start, 2, SCALE * there, BAR, FAINT),
            box(x0, 2, x1 - x0, BAR, f'{fill} data-from="{(x0 - start) / SCALE:g}"'),
            f'<path d="M{x0:g} {y0} L{x1:g} {y0} L{z1:g} {y1} L{z0:g} {y1} Z" {fill} '
            f'fill-opacity=".45" {about}/>',
            box(z0, y1, z1 - z0, BAR, fill),
        ]
    else:
        marks.append(box(z0, y1, z1 - z0, BAR, f"{fill} {about}"))
    return marks


def _kept(cache: dict[str, str]) -> list[str]:
    """A row that keeps of a token the token's own vector: its keys, and values if it has no v."""
    bar = box(LEFT + (COLUMN * HEADS - SCALE * WIDTH) / 2, 16, SCALE * WIDTH, BAR, FAINT)
    said = word(0, 40, "x as it is", more=' opacity=".75"')
    name = "keys" if "v" in cache else "keys, values"
    return [word(0, 22, name, more=' font-weight="600"'), said, _band(), bar]


def _band() -> str:
    """Behind what all heads use."""
    look = 'rx="4" fill="currentColor" fill-opacity=".07"'
    return box(LEFT + 6, -4, COLUMN * HEADS - 12, 2 * BAR + BETWEEN + 12, look)


def _size(spec: HeadSpec, letters: str) -> int:
    return math.prod(spec.sizes[letter] for letter in letters)
