"""Is a layout better whatever the plan, a plan whatever the layout? Arms averaged, seed by seed."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from attnlab.sharing.named_plans import PLANS
from experiments.reporting.document import Block, Heading, Paragraph, Table
from experiments.reporting.pairs import Pair, judged
from experiments.reporting.results import LAYOUT_ORDER, Panel, Run, names
from experiments.reporting.statistics import CONFIDENCE
from experiments.reporting.wording import p_value, percent, signed, span

Cells = dict[tuple[str, str], Run]
"""(layout, plan) -> the arm."""
FACTORS: dict[str, Iterable[str]] = {"layout": LAYOUT_ORDER, "plan": PLANS}
TITLE = Heading(3, "A layout whatever the plan, a plan whatever the layout")


class Effect(NamedTuple):
    """Two layouts, each a mean over plans (or two plans, over layouts), and what it is made of."""

    pair: Pair
    over: str
    """"plan" or "layout": what was averaged over, texts aside."""
    singles: list[float]
    """The same difference, arm by arm: do they agree?"""


def effects(panels: Sequence[Panel]) -> list[Effect]:
    """Every two layouts over all plans and every two plans over all layouts, of panels that have
    the same complete arms and unit; of several panels, over their texts too. Where a question
    names pairs, only what is a mean of such pairs. One family of Holm's.

    A seed is one observation: what it scored, averaged. Only the seeds that the sweep began with
    count, since later ones were added where a pair was open: so their number was fixed, and
    Student's t holds.
    """
    cells = [_cells(panel) for panel in panels]
    alike = len({panel.unit for panel in panels}) == len({frozenset(some) for some in cells}) == 1
    if not alike or not cells[0]:
        return []
    asked = [set(pair) for panel in panels for pair in panel.question.get("pairs", ())]
    means, told = [], []
    for factor, over in itertools.permutations(FACTORS):
        levels, others = (names(panels, name, FACTORS[name]) for name in (factor, over))
        if len(panels) * len(others) < 2:
            continue
        for two in itertools.combinations(levels, 2):
            sides = [[_cell(c, factor, one, o) for c in cells for o in others] for one in two]
            arms = list(zip(*sides, strict=True))
            if asked and not any({a.name, b.name} in asked for a, b in arms):
                continue
            means.append((_mean(two[0], sides[0]), _mean(two[1], sides[1])))
            told.append((over, two[0], [_score(b) - _score(a) for a, b in arms]))
    made = judged(means, {"smallest": max(p.question.get("smallest", 0.0) for p in panels)})
    return [
        Effect(pair, over, worse if pair.a.name == first else [-x for x in worse])
        for pair, (over, first, worse) in zip(made, told, strict=True)
    ]


def answer(panels: Sequence[Panel]) -> str:
    """The means in words: those that are clear, and those that are not; or nothing."""
    found = effects(panels)
    texts = []
    for over in dict.fromkeys(effect.over for effect in found):
        told = []
        for pair in sorted(
            (e.pair for e in found if e.over == over), key=lambda pair: not pair.sure
        ):
            gap = f"{pair.a.shown(pair.fixed.mean)} ({span(pair.fixed)})"
            verdict = "clear" if pair.sure else pair.verdict
            told.append(f"{pair.a.name} over {pair.b.name} by {gap}: {verdict}")
        texts.append(f"Averaged over {_over(panels, over)}, {'; '.join(told)}.")
    return " ".join(texts)


def section(panels: Sequence[Panel], title: Heading = TITLE) -> list[Block]:
    """The table of means and how to read it; nothing where arms cannot be averaged."""
    found = effects(panels)
    if not found:
        return []
    confidence = percent(CONFIDENCE)
    rows = [
        [
            pair.a.name,
            pair.b.name,
            _over(panels, over),
            pair.verdict,
            f"{pair.fixed.mean:.3f}",
            span(pair.fixed),
            p_value(pair.fixed_p),
            f"{signed(min(singles))} to {signed(max(singles))}",
            str(pair.fixed.pairs),
        ]
        for pair, over, singles in found
    ]
    header = ["better on average", "other", "averaged over", "verdict", "difference"]
    header += [f"{confidence} interval", "Holm's p", "arm by arm", "seeds"]
    text = (
        "Each score here is the mean of several arms, seed by seed, so a seed is one observation, "
        "of the seeds that every arm began with; Student's t judges. The interval is of what seeds "
        "do to the mean of just these plans, layouts and texts. Arm by arm: the least and the "
        "largest single difference; far apart, the mean hides that it depends."
    )
    caption = f"Positive: the second is worse, by so many {panels[0].unit}."
    return [
        title,
        Paragraph(text),
        Table(
            f"{caption} Holm's p counts all {len(found)} means.",
            header,
            rows,
            [""] * len(rows),
            words=4,
        ),
    ]


def together(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Panels of several texts under one budget, to be averaged over the texts."""
    groups: dict[tuple, list[Panel]] = {}
    for panel in panels:
        groups.setdefault((panel.match, panel.size), []).append(panel)
    return [some for some in groups.values() if len(_texts(some)) == len(some) > 1]


def _cells(panel: Panel) -> Cells:
    """The arms by layout and plan; nothing where one is missing, or where arms differ in more."""
    if panel.paper or panel.claim or len(panel.complete) < len(panel.groups):
        return {}
    found = {(run.result["layout"], run.result["plan"]): run for run in panel.complete}
    layouts, plans = {layout for layout, _ in found}, {plan for _, plan in found}
    return found if len(found) == len(panel.complete) == len(layouts) * len(plans) else {}


def _cell(cells: Cells, factor: str, level: str, other: str) -> Run:
    return cells[(level, other) if factor == "layout" else (other, level)]


def _begun(run: Run) -> list[int]:
    """Seeds that were asked for before a score was seen."""
    return [seed for seed in run.record["config"]["train"]["seeds"] if seed in run.seeds]


def _heldout(run: Run) -> dict[int, float]:
    return dict(zip(run.seeds, run.heldout, strict=True))


def _score(run: Run) -> float:
    return run.sign * float(np.mean([_heldout(run)[seed] for seed in _begun(run)]))


def _mean(name: str, runs: Sequence[Run]) -> Run:
    """An arm that nobody trained: the held-out scores of all, averaged for each seed."""
    seeds = [seed for seed in _begun(runs[0]) if all(seed in _begun(run) for run in runs)]
    scores = [float(np.mean([_heldout(run)[seed] for run in runs])) for seed in seeds]
    held = f"heldout_{runs[0].metrics[0]['name']}"
    result = runs[0].result | {"seeds": seeds, held: scores}
    return dataclasses.replace(runs[0], title=name, result=result)


def _over(panels: Sequence[Panel], factor: str) -> str:
    levels, texts = names(panels, factor, FACTORS[factor]), _texts(panels)
    told = f"{len(levels)} {factor}s" if len(levels) > 1 else levels[0]
    return told + (f" and {len(texts)} texts" if len(texts) > 1 else "")


def _texts(panels: Sequence[Panel]) -> list[str]:
    return list(dict.fromkeys(p.runs[0].record["source"]["sha256"] for p in panels))
