"""What the comparisons say, in words; what limits it; what is wrong with the runs."""

import dataclasses
import json
from collections.abc import Callable, Sequence

from attnlab.lab.results import data_of, label_of
from attnlab.lab.stats import Comparison, Difference, Effect, Variant
from attnlab.lab.text_table import counted
from attnlab.nested import differing, flatten
from attnlab.report.page import Paragraph, number, p_equation
from attnlab.report.panel import Panel, mean_of

METHODS = {
    "paired t": "Student's paired t",
    "t over texts": "Student's t of the means of texts",
    "anytime": "test that holds at any time",
    "none": "no test",
}
FEW_SEEDS = 3
Name = Callable[[Variant], str]


def answers(panel: Panel) -> list[Paragraph]:
    """The answer of a panel: averaged effects, where there are, and comparisons."""
    if not panel.scores:
        return [Paragraph("Every run diverged.", panel.named("Nothing to compare"), "answer")]
    if len(panel.scores) == 1:
        return [_single(panel)]
    found = []
    for tag in dict.fromkeys(effect.tag for effect in panel.effects):
        some = [effect for effect in panel.effects if effect.tag == tag]
        over = " and ".join(some[0].over)
        parts = summary([e.comparison for e in some], panel, lambda v: str(v[0][1]))
        lead = " ".join([parts[0], *_opposite_signs(some, panel)])
        found.append(Paragraph(f"{parts[1]} Means over {over}.", _titled(panel, lead)))
    if panel.comparisons:
        lead, text = summary(panel.comparisons, panel, panel.labels.__getitem__)
        text += _lowest(panel)
        found.append(Paragraph(text, _titled(panel, lead)))
    if every := _all_worse_than(panel):
        found = [dataclasses.replace(one, lead=f"{every} {one.lead}") for one in found]
    return [Paragraph(found[0].text, found[0].lead, "answer"), *found[1:]] if found else []


def _opposite_signs(effects: Sequence[Effect], panel: Panel) -> list[str]:
    """Where an average hides that a value is better under some values of the other tags, and worse
    under others."""
    return [
        f"{e.comparison.variant[0][1]} less {e.comparison.baseline[0][1]} has both signs: from "
        f"{number(min(e.single), panel.metric.digits)} to "
        f"{number(max(e.single), panel.metric.digits)}, depending on {' and '.join(e.over)}."
        for e in effects
        if min(e.single) < 0 < max(e.single)
    ]


def _all_worse_than(panel: Panel) -> str:
    """The condition of every conclusion where no variant beats a baseline without a model."""
    worse = _worse_than_baselines(panel)
    if sum(map(len, worse.values())) < len(panel.scores):
        return ""
    names = " or ".join(worse)
    return f"All variants are worse than a baseline without a model ({names}). Among them:"


def _titled(panel: Panel, lead: str) -> str:
    return f"{panel.title}: {lead}" if panel.title else lead


def _single(panel: Panel) -> Paragraph:
    [(variant, scores)] = panel.scores.items()
    seeds = len(scores)
    text = (
        f"{number(mean_of(scores), panel.metric.digits)} {panel.metric.unit} held out, "
        f"{counted(seeds, 'run')}. There is no other variant to compare it with."
    )
    return Paragraph(text, _titled(panel, f"{panel.labels[variant]}:"), "answer")


def summary(found: Sequence[Comparison], panel: Panel, name: Name) -> tuple[str, str]:
    """(bold words, sentence) of a family of comparisons."""
    if len(found) == 1:
        return _one(found[0], panel, name)
    groups: dict[str, list[Comparison]] = {}
    for c in found:
        groups.setdefault(_word(c, panel), []).append(c)
    baselines = {c.baseline for c in found}
    one_baseline = name(found[0].baseline) if len(baselines) == 1 else ""

    def listed(word: str) -> str:
        some = [_pair(c, name, baselines) for c in groups[word]]
        if len(some) > MOST_SHOWN:
            return f"{len(some)} of {len(found)} variants"
        return "; ".join(some)

    present = [word for word in (BETTER, WORSE, EQUIVALENT) if word in groups]
    if not present:
        base = one_baseline or "its baseline"
        lead = f"Inconclusive: none of {len(found)} variants differs significantly from {base}."
        return lead, _gaps(found, panel, name, baselines)
    several = len(groups[present[0]]) > 1
    verb = "are" if several else "is"
    base = one_baseline or ("their baselines" if several else "its baseline")
    lead = f"{listed(present[0])} {verb} {present[0].lower()} than {base}."
    if present[0] == EQUIVALENT:
        lead = f"{listed(EQUIVALENT)} {verb} equivalent to {base} within {panel.about.margin:g}."
    parts = [_gaps(groups[present[0]], panel, name, baselines)]
    others = [word for word in (*present[1:], INCONCLUSIVE) if word in groups]
    parts += [_gaps(groups[word], panel, name, baselines, word) for word in others]
    family = counted(found[0].family, "comparison")
    return lead, " ".join([*parts, f"Holm's correction counts {family}."])


BETTER, WORSE, EQUIVALENT, INCONCLUSIVE = "Better", "Worse", "Equivalent", "Inconclusive"
MOST_SHOWN = 4
"""Comparisons of a kind whose numbers are in the answer; all are in the table."""


def _word(c: Comparison, panel: Panel) -> str:
    if c.conclusion in ("lower", "higher"):
        return BETTER if _is_better(c, panel) else WORSE
    return EQUIVALENT if c.conclusion == "equivalent" else INCONCLUSIVE


def _gaps(
    some: Sequence[Comparison], panel: Panel, name: Name, baselines: set[Variant], word: str = ""
) -> str:
    """Their differences, or how many there are."""
    if len(some) > MOST_SHOWN:
        return f"{word}: {len(some)} variants." if word else "The table Differences has all."
    begin = f"{word}: " if word else f"Difference in {panel.metric.unit} (95 % interval): "
    shown = [f"{_pair(c, name, baselines)} {gap(c.difference, panel)}" for c in some]
    return f"{begin}{'; '.join(shown)}."


def _one(c: Comparison, panel: Panel, name: Name) -> tuple[str, str]:
    a, b, unit = name(c.variant), name(c.baseline), panel.metric.unit
    values = (
        f"{a} less {b}: {number(c.difference.mean, panel.metric.digits)} {unit} (95 % interval "
        f"{interval(c.difference, panel.metric.digits)}, {p_equation(c.p_holm)}, "
        f"{METHODS[c.difference.method]}, {c.difference.count} pairs of runs)."
    )
    if c.conclusion == "inconclusive":
        return f"Inconclusive ({c.reason}).", values
    if c.conclusion == "equivalent":
        return f"{a} and {b} are equivalent within {panel.about.margin:g} {unit}.", values
    return f"{a} is {'better' if _is_better(c, panel) else 'worse'} than {b}.", values


def _is_better(c: Comparison, panel: Panel) -> bool:
    return c.conclusion == ("lower" if panel.sign > 0 else "higher")


def _pair(c: Comparison, name: Name, baselines: set[Variant]) -> str:
    return name(c.variant) if len(baselines) == 1 else f"{name(c.variant)} ({name(c.baseline)})"


def _lowest(panel: Panel) -> str:
    """The variant with the best mean and its difference from the baseline, without a claim."""
    variant, scores = next(iter(panel.scores.items()))
    word = "lowest" if panel.sign > 0 else "highest"
    less = [
        f"; less {panel.labels[c.baseline]} {gap(c.difference, panel)}"
        for c in panel.comparisons
        if c.variant == variant
    ]
    return (
        f" The {word} mean: {panel.labels[variant]}, "
        f"{number(mean_of(scores), panel.metric.digits)} {panel.metric.unit}"
        f"{less[0] if len(less) == 1 else ''}."
    )


def gap(d: Difference, panel: Panel) -> str:
    """A difference with its interval: "−0.120 (−0.200 to −0.040)"."""
    digits = panel.metric.digits
    return f"{number(d.mean, digits)} ({interval(d, digits)})"


def interval(d: Difference, digits: int) -> str:
    """The interval in words."""
    if d.low != d.low:
        return "no interval"
    return f"{number(d.low, digits)} to {number(d.high, digits)}"


def warnings(panel: Panel) -> list[Paragraph]:
    """What is wrong with the runs."""
    lines = []
    for name, values in differing([dict(r.provenance.environment) for r in panel.results]).items():
        known = " or ".join(dict.fromkeys(map(str, values)))
        lines.append(f"The runs had different environments: {name} is {known}.")
    for variant, runs in panel.variants.items():
        gone = [run for run in runs if run.status == "diverged"]
        if gone:
            seeds = ", ".join(str(run.spec.seed) for run in gone)
            why = f" ({gone[0].message})" if gone[0].message else ""
            lines.append(f"{panel.labels[variant]} diverged with seed {seeds}{why}.")
    lines += _other_data(panel)
    lines += [
        f"Worse than a baseline without a model ({name}): {', '.join(some)}. Look at the learning "
        "rate and the number of steps before comparing."
        for name, some in _worse_than_baselines(panel).items()
    ]
    if panel.unfinished:
        lines.append(f"Not finished, so not shown: {', '.join(panel.unfinished)}.")
    return [Paragraph(line, panel.title and f"{panel.title}:", "warning") for line in lines]


def _other_data(panel: Panel) -> list[str]:
    """Were runs trained on other data than their tags say?"""
    digests: dict[str, set[str]] = {}
    for run in panel.results:
        digests.setdefault(data_of(run), set()).add(run.data.sha256)
    if any(len(found) > 1 for found in digests.values()):
        return [
            "Runs of the same data config were trained on different data (their digests differ), "
            "so their scores cannot be compared."
        ]
    if len(panel.results.texts) > 1 or len(digests) < 2:
        return []
    fields = differing([flatten(json.loads(data)) for data in digests])
    tags = {name for variant in panel.variants for name, _ in variant}
    other = [name for name in fields if name not in tags]
    return [f"Variants were trained on different data: {', '.join(other)} differ."] if other else []


def _worse_than_baselines(panel: Panel) -> dict[str, list[str]]:
    """The weakest baseline, which has no model -> the variants that it is better than."""
    worse: dict[str, list[str]] = {}
    for variant in panel.scores:
        run = panel.variants[variant][0]
        known = run.scores.baselines.get(panel.metric.name, {})
        if not known:
            continue
        name, value = max(known.items(), key=lambda item: panel.sign * item[1])
        if panel.sign * (mean_of(panel.scores[variant]) - value) > 0:
            worse.setdefault(name, []).append(panel.labels[variant])
    return worse


def limits(panel: Panel) -> list[str]:
    """Sentences on what the comparison does not say."""
    texts = panel.results.texts
    seeds = sorted({run.spec.seed for run in panel.results})
    lines = list(panel.about.notes)
    if len(panel.results) == 1:
        lines.append("One run: a result, not a comparison.")
    elif len(seeds) == 1 and len(texts) == 1:
        lines.append("One seed: there are no intervals.")
    elif len(texts) == 1:
        lines.append("Intervals cover variation over seeds only, not over texts or model sizes.")
    else:
        lines.append(
            f"Texts ({len(texts)}) and seeds are both sources of variation; the intervals are for "
            "other texts of this kind, not for other model sizes."
        )
    if len(texts) == 1 and 2 <= len(seeds) <= FEW_SEEDS:
        lines.append(
            f"Few seeds: the interval of a difference has {counted(len(seeds) - 1, 'degree')} of "
            "freedom, so it is wide."
        )
    planned = set(panel.about.planned_seeds)
    if added := [str(seed) for seed in seeds if planned and seed not in planned]:
        lines.append(
            f"Seeds {', '.join(added)} were added after scores were seen: pairs are judged by a "
            "test that allows it, and means over other tags by the planned seeds alone."
        )
    lines.append(_rates(panel))
    if panel.about.matched:
        lines.append(f"Equal for all variants: {panel.about.matched}. Other budgets differ.")
    return [line for line in lines if line]


def _rates(panel: Panel) -> str:
    """How learning rates were chosen."""
    rates = sorted({run.spec.config.train.optimizer.learning_rate for run in panel.results})
    if panel.tuning is not None:
        return "Each variant has a learning rate of its own, chosen on the validation part."
    if len(rates) == 1:
        return (
            f"One learning rate for all variants ({rates[0]:g}), which may suit one better than "
            "another."
            if len(panel.variants) > 1
            else ""
        )
    if "learning_rate" in {name for variant in panel.variants for name, _ in variant}:
        return "Each learning rate is a variant of its own here; none was chosen."
    return f"Learning rates differ between variants ({', '.join(f'{r:g}' for r in rates)})."


def question(panels: Sequence[Panel]) -> str:
    """The title: the question of the sweep, else made of its tags."""
    questions = list(dict.fromkeys(p.about.question for p in panels if p.about.question))
    if questions:
        return " ".join(questions)
    panel = panels[0]
    varied = differing([dict(v) for v in panel.variants])
    varied.pop("seed", None)
    if not varied:
        return f"Held-out {panel.metric.unit} of {label_of(next(iter(panel.variants)))}"
    name, values = next(iter(varied.items()))
    some = list(dict.fromkeys(str(v) for v in values))
    if len(some) > 6:
        return f"Which {name.replace('_', ' ')} has the best held-out {panel.metric.unit}?"
    return (
        f"Which {name.replace('_', ' ')} has the best held-out {panel.metric.unit}: "
        f"{', '.join(some[:-1])} or {some[-1]}?"
    )
