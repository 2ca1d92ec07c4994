"""Which layer uses which weights, from a plan alone.

A column is a layer and a line a sublayer. Cells of one line with the same number and colour are one
parameter group. A dashed cell makes no keys and values: the
arrow leads to those that it reads.
"""

from attnlab.sharing.named_plans import PLANS, parse_plan
from attnlab.sharing.plan import Plan
from experiments.drawing.marks import COLOURS, box, drawing, label

LAYERS, COUNT = 6, {"relaxed": 2}
BY_HAND = {"by_hand": "1/(2)x2/1"}
LEFT, COLUMN, HEIGHT, GAP, TOP = 74, 40, 26, 8, 46
ARCS = 30
WORDS = {"kv": "keys, values"}


def drawn_plans() -> dict[str, str]:
    """File name -> what `parse_plan` reads: every row of PLANS but those that draw the same, one by
    hand."""
    counted = {
        name: f"{name}:{COUNT.get(name, 3)}" if row.takes_count else name
        for name, row in PLANS.items()
    }
    found: dict[Plan, str] = {}
    for file, text in (counted | BY_HAND).items():
        found.setdefault(parse_plan(text, LAYERS), file)
    return {file: (counted | BY_HAND)[file] for file in found.values()}


def plan_drawing(name: str) -> str:
    """The drawing of a plan of six layers."""
    plan = parse_plan(name, LAYERS)
    marks = [label(0, 16, name, more=' font-weight="600"')]
    marks += [_number(i) for i in range(plan.num_layers)]
    y: float = TOP
    for sublayer in plan:
        if sublayer == "kv" and any(plan.reuses_kv):
            marks += [_arrow(i, j, y + ARCS - 3) for i, j in enumerate(plan.kv_sources) if i != j]
            y += ARCS
        marks += _line(plan, sublayer, y)
        y += HEIGHT + GAP
    return drawing(LEFT + COLUMN * LAYERS + 2, y, f"{name}: weights of six layers", marks)


def _number(layer: int) -> str:
    text = f"layer {layer}" if layer == 0 else str(layer)
    return label(_middle(layer), TOP - 8, text, at="middle", more=' opacity=".75" font-size="11"')


def _middle(layer: int) -> float:
    return LEFT + COLUMN * (layer + 0.5)


def _line(plan: Plan, sublayer: str, y: float) -> list[str]:
    """A sublayer: its group in each layer, or a dashed cell."""
    marks = [label(0, y + 17, WORDS.get(sublayer, sublayer), more=' font-size="11"')]
    for layer, group in enumerate(plan[sublayer]):
        x = LEFT + COLUMN * layer + 2
        about = f'rx="4" data-sublayer="{sublayer}" data-layer="{layer}"'
        if isinstance(group, int):
            style = f'fill="{COLOURS[group % len(COLOURS)]}" data-group="{group}" {about}'
            ink = ' fill="#16191d" font-weight="600"'
            number = label(_middle(layer), y + 18, str(group), at="middle", more=ink)
            marks += [box(x, y, COLUMN - 4, HEIGHT, style), number]
        else:
            style = f'fill="none" stroke="currentColor" stroke-dasharray="3 3" {about}'
            marks.append(box(x, y, COLUMN - 4, HEIGHT, style))
    return marks


def _arrow(reader: int, source: int, y: float) -> str:
    """From a layer that reads keys and values to the one that makes them."""
    x0, x1 = _middle(reader), _middle(source) + 4
    top = y - 10 - 4 * (reader - source)
    return (
        f'<path d="M{x0:g} {y:g} C{x0:g} {top:g} {x1:g} {top:g} {x1:g} {y:g} m-3 -6 l3 6 l4 -5" '
        f'fill="none" stroke="currentColor" data-reader="{reader}" data-source="{source}"/>'
    )
