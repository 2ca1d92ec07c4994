"""Several sweeps in one picture: what a score costs in weights, in work and in time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from attnlab import plotting
from attnlab.sharing.named_plans import PLANS
from experiments.reporting.document import Block, Figure, Figures, Heading, Paragraph
from experiments.reporting.results import LAYOUT_ORDER, Panel, Run, layout_number, names
from experiments.reporting.wording import listed

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Of the sweeps; they go round."""
PASSES = 3
"""Work of a training step in forward passes: one forward, and a backward pass that multiplies by
the weights' transposes and by the activations', each as much."""


def trained_flops(run: Run) -> float:
    """FLOPs of one seed's training: those of a token x tokens x `PASSES`. Optimizer, evaluation
    and what is computed twice to save memory are left out."""
    trains = run.record["config"]["train"]
    tokens = trains["steps"] * trains["batch_size"] * trains["length"]
    return PASSES * run.result["flops_per_token"] * tokens


def seed_seconds(run: Run) -> float:
    """Wall seconds of one seed: its share, since an arm trains its seeds in one program."""
    return run.result["wall_seconds"] / len(run.seeds)


class Cost(NamedTuple):
    """What a score is drawn against."""

    name: str
    label: str
    of: Callable[[Run], float]
    told: str


COSTS = (
    Cost("parameters", "unique parameters", lambda run: run.result["unique_parameters"], ""),
    Cost(
        "flops", "FLOPs trained", trained_flops,
        f" FLOPs of one seed: forward FLOPs per token × tokens seen × {PASSES} (a backward pass "
        "is two forward passes); optimizer and evaluation not counted.",
    ),
    Cost(
        "seconds", "wall seconds per seed", seed_seconds,
        " Seconds of an arm divided by its seeds, compilation included: of the machine that ran "
        "it, and of what else that machine did.",
    ),
)  # fmt: skip


def section(panels: Sequence[Panel]) -> list[Block]:
    """Figures of all folders that can be compared; none where each stands alone."""
    folders = list(dict.fromkeys(panel.folder for panel in panels))
    groups: dict[tuple, list[Panel]] = {}
    for panel in panels:
        if panel.complete:
            groups.setdefault(_asked(panel), []).append(panel)
    shared = [some for some in groups.values() if len(_folders(some)) > 1]
    if not shared:
        return []
    blocks: list[Block] = [Heading(2, "All in one picture"), Paragraph(_WORDS)]
    for count, some in enumerate(shared):
        blocks.append(Figures([_figure(some, folders, cost, count) for cost in COSTS]))
    alone = [_folders(some) for some in groups.values() if some not in shared]
    if alone:
        left = listed([_called(one, folders) for some in alone for one in some], "and")
        blocks.append(Paragraph(f"Left out, since no other was scored on the same text: {left}."))
    return blocks


def _folders(panels: Sequence[Panel]) -> list[Path]:
    return list(dict.fromkeys(panel.folder for panel in panels))


_WORDS = (
    "Colour: the layout of the heads. Marker: the sweep; hollow where layers share weights. Bars: "
    "standard deviation over seeds. The dotted steps join the arms that no other beats at the same "
    "cost or less, and these alone are named; near each other, they may be so by chance."
)


def _asked(panel: Panel) -> tuple:
    """Scores of panels that agree in this are of one kind."""
    first = panel.complete[0]
    return panel.unit, first.record["config"]["task"], first.record["source"]["sha256"]


def _called(folder: Path, folders: Sequence[Path]) -> str:
    """Its name; of two that have the same, with that of the folder it lies in."""
    alike = [one for one in folders if one.name == folder.name]
    return folder.name if len(alike) == 1 else f"{folder.parent.name}/{folder.name}"


def _figure(panels: Sequence[Panel], folders: Sequence[Path], cost: Cost, count: int) -> Figure:
    """One cost; `folders` are all of the report, which give the markers their order."""
    marker = {folder: MARKERS[i % len(MARKERS)] for i, folder in enumerate(folders)}
    runs = [(run, marker[panel.folder]) for panel in panels for run in panel.complete]
    points = [
        plotting.Point(run.name, _style(run, mark), cost.of(run), run.score, run.spread)
        for run, mark in runs
    ]
    best = front([p.x for p in points], [run.rank for run, _ in runs])
    ink = plotting.style(0, 0)._replace(colour=plotting.FOREGROUND)
    legend = [
        (layout, ink._replace(colour=_colour(layout)))
        for layout in names(panels, "layout", LAYOUT_ORDER)
    ]
    called = {folder: _called(folder, folders) for folder in _folders(panels)}
    legend += [(name, ink._replace(marker=marker[folder])) for folder, name in called.items()]
    sharing = [plan for plan in names(panels, "plan", PLANS) if plan != "separate"]
    legend += [(f"hollow: {listed(sharing, 'or')}", ink._replace(hollow=True))] if sharing else []
    told = listed(list(called.values()), "and")
    name = f"joint-{count + 1}-{cost.name}"
    drawn = plotting.scatter_with_front(
        points, [points[i] for i in best], legend, cost.label, f"held-out {panels[0].unit}"
    )
    return Figure(
        name,
        plotting.to_svg(drawn, name),
        f"Held-out score against {cost.label}, {told} together",
        f"**Held-out score against {cost.label}, {told} together.**{cost.told}",
    )


def front(costs: Sequence[float], ranks: Sequence[float]) -> list[int]:
    """Indices of those that nothing as cheap is better than, the cheapest first; less is better.

    >>> front([1, 2, 2, 3, 4], [9, 8, 7, 7, 1])
    [0, 2, 4]
    """
    found: list[int] = []
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], ranks[i])):
        if not found or ranks[i] < ranks[found[-1]]:
            found.append(i)
    return found


def _style(run: Run, marker: str) -> plotting.Style:
    shares = run.result["plan"] != "separate"
    return plotting.Style(_colour(run.result["layout"]), "-", marker, shares)


def _colour(layout: str) -> str:
    return plotting.style(layout_number(layout), 0).colour
