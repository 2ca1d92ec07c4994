"""What the numbers of a panel say: the answer, how sure it is, and what it leaves open."""

import dataclasses
import math
from collections import Counter

from experiments.reporting.pairs import Pair, compare
from experiments.reporting.results import Panel, Run
from experiments.reporting.statistics import CONFIDENCE
from experiments.reporting.wording import listed, percent, score, span

TITLES = {
    "": "At equal width",
    "parameters": "At equal parameters",
    "flops": "At equal FLOPs",
    "seconds": "At equal seconds a step",
    "cache": "At equal cache",
    "paper": "Row by row",
    "claim": "Arm by arm",
}


def heading(panel: Panel) -> str:
    """What the arms have in common."""
    title = TITLES[panel.match or ("paper" if panel.paper else "claim" if panel.claim else "")]
    return title if panel.size is None else f"{title}, size ×{panel.size:g}"


def answer(panel: Panel, title: str = "") -> str:
    """The best arm, by how much, and how sure that is."""
    arms, title = panel.complete, title or heading(panel)
    gone = _diverged(panel)
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
        f"{best.shown(second.rank - best.rank)} {less} than {second.name}, the next of {len(arms)}"
        f"{_at_cost(best, second)}."
    )
    return f"{first} {_certainty(panel)}{ending}"


def _diverged(panel: Panel) -> list[str]:
    """The arms that diverged at their best rate, and later seeds of an arm that did."""
    of = lambda run: (run.name, run.result["learning_rate"])
    return [
        f"{run.name} with seeds {listed([*map(str, run.seeds)], 'and')}"
        if best.complete
        else run.name
        for best in panel.arms
        for run in panel.runs
        if not run.complete and of(run) == of(best)
    ]


def _at_cost(best: Run, second: Run) -> str:
    """What the better of two arms has more, or less, of."""
    told = []
    for name, words in (("unique_parameters", "parameters"), ("flops_per_token", "FLOPs")):
        ratio = best.result[name] / second.result[name]
        if abs(ratio - 1) >= 0.01:
            told.append(f"{ratio:.2f} times its {words}")
    return f", with {listed(told, 'and')}" if told else ""


def _certainty(panel: Panel) -> str:
    """Is the best arm better than the next, and than how many others?"""
    pairs = compare(panel)
    if panel.question.get("pairs"):
        return f"{_lead(panel, pairs)}{_asked(pairs)}"
    best, second, *_ = panel.complete
    verdicts = {pair.b.name: pair for pair in pairs if pair.a is best}
    lead = verdicts[second.name]
    d = lead.difference
    if math.isnan(d.p):
        return "One seed gives no interval: whether the order would hold, we cannot tell."
    interval = f"{percent(CONFIDENCE)} interval {span(d)}"
    if lead.sure:
        text = f"That lead is more than what seeds do ({interval}, also after Holm's correction)."
    elif lead.equal:
        text = f"That lead is none: both are equal within {lead.smallest:g} ({interval})."
    elif d.holds_zero:
        text = f"Whether that lead is real, we cannot tell: its {interval} holds zero."
    elif d.high < 0:
        text = f"On the seeds of both the other is better ({interval}): cannot tell."
    else:
        text = (
            f"That lead stands clear of zero by itself ({interval}), but {d.pairs} seeds are too "
            f"few for {len(pairs)} comparisons (Holm): cannot tell."
        )
    if len(verdicts) == 1:
        return text
    unsure = [name for name, pair in verdicts.items() if not pair.sure]
    beaten = len(verdicts) - len(unsure)
    text += f" It is clearly better than {beaten or 'none'} of the {len(verdicts)} other arms"
    if beaten and unsure:
        text += f"; it cannot be told apart from {listed(unsure, 'and')}"
    return f"{text}."


def _lead(panel: Panel, pairs: list[Pair]) -> str:
    """The interval of the first two, whichever pairs the question names."""
    best, second, *_ = panel.complete
    named = any({pair.a.name, pair.b.name} == {best.name, second.name} for pair in pairs)
    sweep = {**panel.sweep, "question": panel.question | {"pairs": [(best.name, second.name)]}}
    [lead] = compare(dataclasses.replace(panel, sweep=sweep))
    if math.isnan(lead.difference.p):
        return ""
    text = f"The {percent(CONFIDENCE)} interval of that lead is {span(lead.difference)}"
    return f"{text}. " if named else f"{text}; the question does not name this pair. "


def _asked(pairs: list[Pair]) -> str:
    """What the pairs say that the question names."""
    if not pairs:
        return "Of the pairs that the question names none is complete."
    clear = [pair for pair in pairs if pair.sure]
    told = [
        f"{pair.a.name} over {pair.b.name} by {pair.a.shown(pair.difference.mean)} "
        f"({span(pair.difference)})"
        for pair in clear
    ]
    text = (
        f"Of the {len(pairs)} comparisons that the question names {len(clear) or 'none'} "
        f"{'is' if len(clear) == 1 else 'are'} clear ({percent(CONFIDENCE)} intervals, Holm's "
        f"correction){': ' if told else ''}{'; '.join(told)}."
    )
    unclear = Counter(pair.verdict for pair in pairs if not pair.sure)
    others = "; ".join(f"{verdict}, {count}" for verdict, count in unclear.items())
    return f"{text} The others: {others}." if others else text


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
    if panel.sweep.get("tune"):
        return (
            "Each arm stands at a learning rate of its own, chosen by a parabola on a validation "
            "part with a seed that is not judged (see Learning rates)."
        )
    if before := panel.sweep.get("tuned_before"):
        equal = TITLES[before["match"]] if before["match"] is not None else "at several budgets"
        return (
            "Each arm stands at a learning rate of its own, chosen beforehand in another sweep: "
            f"{before['data']}, {equal[0].lower()}{equal[1:]}. Here another may suit it better."
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
