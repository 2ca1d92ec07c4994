"""What the numbers of a panel say: the answer, how sure it is, and what it leaves open."""

import math
from itertools import combinations

from experiments.reporting.results import Panel, Run
from experiments.reporting.statistics import Difference, holm, paired_difference
from experiments.reporting.wording import listed, percent, score, span

CONFIDENCE = 0.95
TITLES = {
    "": "At equal width",
    "parameters": "At equal parameters",
    "flops": "At equal FLOPs",
    "paper": "Row by row",
    "claim": "Arm by arm",
}


def heading(panel: Panel) -> str:
    """What the arms have in common."""
    return TITLES[panel.match or ("paper" if panel.paper else "claim" if panel.claim else "")]


def answer(panel: Panel) -> str:
    """The best arm, by how much, and how sure that is."""
    arms, title = panel.complete, heading(panel)
    gone = [run.name for run in panel.arms if not run.complete]
    ending = f" Diverged: {listed(gone, 'and')}." if gone else ""
    if not arms:
        return f"{title}, there is nothing to compare: every arm diverged."
    if len(arms) == 1:
        reached = f"**{arms[0].name} reaches {score(arms[0])} {panel.unit}**"
        return f"{title}, {reached}; there is no other arm to compare it with.{ending}"
    best, second = arms[:2]
    less = "less" if best.sign > 0 else "more"
    first = (
        f"{title}, **{best.name} predicts best: {score(best)} {panel.unit}**, "
        f"{best.shown(second.rank - best.rank)} {less} than {second.name}, the next of {len(arms)}."
    )
    return f"{first} {_certainty(panel)}{ending}"


def _certainty(panel: Panel) -> str:
    """Is the best arm better than the next, and than how many others?"""
    best, second, *_ = panel.complete
    rows = compare(panel)
    verdicts = {b.name: (d, adjusted) for a, b, d, adjusted in rows if a is best}
    difference, adjusted = verdicts[second.name]
    if math.isnan(difference.p):
        return "One seed gives no interval: whether the order would hold, we cannot tell."
    interval = f"{percent(CONFIDENCE)} interval {span(difference)}"
    if sure(difference, adjusted):
        text = f"That lead is more than what seeds do ({interval}, also after Holm's correction)."
    elif difference.holds_zero:
        text = f"Whether that lead is real, we cannot tell: its {interval} holds zero."
    else:
        text = (
            f"That lead stands clear of zero by itself ({interval}), but not as one of "
            f"{len(rows)} comparisons (Holm): cannot tell."
        )
    if len(verdicts) == 1:
        return text
    unsure = [name for name, found in verdicts.items() if not sure(*found)]
    beaten = len(verdicts) - len(unsure)
    text += f" It is clearly better than {beaten or 'none'} of the {len(verdicts)} other arms"
    if beaten and unsure:
        text += f"; it cannot be told apart from {listed(unsure, 'and')}"
    return f"{text}."


def caution(panel: Panel) -> str:
    """What the learning rates allow to conclude."""
    rates = [f"{rate:g}" for rate in panel.rates]
    if len(panel.runs) == 1:
        return f"Mind: one run, at one learning rate ({rates[0]}): a result, not a comparison."
    if len(rates) == 1:
        return (
            f"Mind: one learning rate for all arms, not a verdict. All were trained at {rates[0]}, "
            "which may suit one arm better than another."
        )
    if not panel.swept:
        return (
            f"Mind: the arms were trained at different learning rates ({listed(rates, 'and')}), "
            "not each at all of them: not a verdict. Each stands with its best by mean held-out "
            "score."
        )
    text = (
        f"Each arm stands here with the best of its learning rates ({listed(rates, 'and')}) by "
        "mean held-out score. The choice was made on what is held out itself, which favours "
        "every arm alike."
    )
    ends = panel.rates[0], panel.rates[-1]
    edge = [run.name for run in panel.complete if run.result["learning_rate"] in ends]
    if edge:
        which = listed(edge, "and") if len(edge) < len(panel.complete) else "every arm"
        text += f" For {which} the best is at an end of the range: others may do better still."
    return text


def compare(panel: Panel) -> list[tuple[Run, Run, Difference, float]]:
    """(a, b, by how much b is worse, Holm's p) for every two complete arms, a the one that is
    better on average; in a published table, for those pairs that hold its base.

    Seeds pair: the same seed reads the same batches in the same order in every arm.
    """
    rows = []
    for a, b in combinations(panel.complete, 2):
        if panel.base and panel.base not in (a, b):
            continue
        both = [seed for seed in a.seeds if seed in b.seeds]
        if both:
            of_a, of_b = (r.sign * r.heldout[[r.seeds.index(s) for s in both]] for r in (a, b))
            rows.append((a, b, paired_difference(of_a, of_b, CONFIDENCE)))
        else:
            gap = Difference(0, b.rank - a.rank, math.nan, math.nan, math.nan)
            rows.append((a, b, gap))
    known = iter(holm([d.p for *_, d in rows if not math.isnan(d.p)]))
    return [(a, b, d, math.nan if math.isnan(d.p) else next(known)) for a, b, d in rows]


def verdict(a: Run, difference: Difference, adjusted: float) -> str:
    """In words."""
    if math.isnan(difference.p):
        return "cannot tell (one seed)" if difference.pairs else "cannot tell (no seed in common)"
    if difference.holds_zero:
        return "cannot tell"
    if not sure(difference, adjusted):
        return "cannot tell (not after Holm)"
    return f"**{a.name} is better**"


def sure(difference: Difference, adjusted: float) -> bool:
    """Does the interval leave zero out, and does that hold after Holm's correction?"""
    return not difference.holds_zero and adjusted < 1 - CONFIDENCE
