"""The texts of a report: question, conclusions, warnings, expected results, limits, how the numbers
were made."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from attnlab.lab.description import Expectation, Tags
from attnlab.lab.result import RunResult
from attnlab.lab.results import data_of, label_of
from attnlab.lab.stats import Array
from attnlab.lab.sweep import COMMAND
from attnlab.lab.text_table import counted
from attnlab.nested import differing, flatten
from attnlab.report.page import Facts, Paragraph, Section, number, p_equation
from attnlab.report.panel import Panel, mean_of
from attnlab.training.provenance import PROVENANCE

SENTENCES = {
    "better": "{variant} is better than {baseline}{over}.",
    "worse": "{variant} is worse than {baseline}{over}.",
    "equivalent": "{variant} and {baseline} are equivalent{over}, within {margin:g} {unit}.",
    "inconclusive": "Inconclusive: {variant} against {baseline}{over}.",
}
"""Conclusion -> sentence."""
MOST_SHOWN = 4
"""Comparisons that have a sentence each; of more, those of a conclusion are counted and listed."""
MOST_NAMES = 12
"""Names of variants in such a list, and values of a fact."""
FEW_SEEDS = 3
RELATIONS = {"at most": np.less_equal, "at least": np.greater_equal, "exactly": np.equal}


def question(panels: Sequence[Panel]) -> str:
    """The title: the question of the sweep, else made of its tags."""
    questions = list(dict.fromkeys(p.about.question for p in panels if p.about.question))
    if questions:
        return " ".join(questions)
    panel = panels[0]
    varied = [
        name for name in differing([dict(v) for v in panel.results.variants]) if name != "seed"
    ]
    if not varied:
        return f"Held-out {panel.metric.unit} of {label_of(next(iter(panel.results.variants)))}"
    names = " and ".join(name.rpartition(".")[2].replace("_", " ") for name in varied)
    return f"Which {names} has the best held-out {panel.metric.unit}?"


def subject(panels: Sequence[Panel]) -> str:
    """What was run, and what the scores are."""
    runs = [run for panel in panels for run in panel.results]
    names = dict.fromkeys(run.data.name or type(run.spec.config.data).__name__ for run in runs)
    metrics = dict.fromkeys(panel.metric for panel in panels)
    scores = " or ".join(f"{one.unit} ({one.better} is better)" for one in metrics)
    return (
        f"{counted(max(len(panel.results.variants) for panel in panels), 'variant')}, "
        f"{counted(len({run.spec.seed for run in runs}), 'seed')}, {counted(len(runs), 'run')}, "
        f"trained on {' and '.join(names)}. Scores are {scores} on held-out data."
    )


def answers(panel: Panel) -> list[Paragraph]:
    """The conclusions of a panel: those of averages over other tags, where there are any, else
    those of single comparisons."""
    start = f"{panel.title}: " if panel.title else ""
    every = list(panel.comparisons.itertuples())
    rows = [row for row in every if row.over] or every
    if not panel.scores:
        found = [("Nothing to compare.", "Every run diverged.")]
    elif len(panel.scores) == 1:
        [(variant, scores)] = panel.scores.items()
        score = f"{number(mean_of(scores), panel.metric.digits)} {panel.metric.unit} held out"
        only = "There is no other variant to compare it with."
        found = [(f"{panel.results.labels[variant]}: {score}.", only)]
    elif len(rows) > MOST_SHOWN:
        found = [_counted(panel, rows)]
    else:
        found = [_answer(panel, row) for row in rows]
    return [Paragraph(text, start + lead, "answer") for lead, text in found]


def _counted(panel: Panel, rows: Sequence[Any]) -> tuple[str, str]:
    """How many comparisons have which conclusion, and their variants."""
    found = {word: [row.variant for row in rows if row.conclusion == word] for word in SENTENCES}
    counts = ", ".join(f"{len(some)} {word}" for word, some in found.items() if some)
    del found["inconclusive"]
    listed = [f"{word.capitalize()}: {_listed(some)}." for word, some in found.items() if some]
    text = " ".join([*listed, f"The table {panel.named('Comparisons')} has all."])
    return f"Of {len(rows)} comparisons: {counts}.", text


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return "; ".join(names[:MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")


def _answer(panel: Panel, row: Any) -> tuple[str, str]:
    """The conclusion of one comparison, and its numbers; `row` is one of the table."""
    digits, unit = panel.metric.digits, panel.metric.unit
    over = f", averaged over {row.over}" if row.over else ""
    words = {"variant": row.variant, "baseline": row.baseline, "over": over, "unit": unit}
    lead = SENTENCES[row.conclusion].format(margin=panel.about.margin, **words)
    if row.least < 0 < row.most:
        lead += (
            f" The sign depends on {row.over}: the single differences are between "
            f"{number(row.least, digits)} and {number(row.most, digits)}."
        )
    interval = f"95 % interval {number(row.low, digits)} to {number(row.high, digits)}"
    interval = "one pair of runs, no interval" if row.low != row.low else interval
    text = f"Difference {number(row.difference, digits)} {unit} ({interval}, "
    return lead, f"{text}{p_equation(row.p_holm)})."


def warnings(panel: Panel) -> list[Paragraph]:
    """What is wrong with the runs."""
    varied = differing([dict(run.provenance.environment) for run in panel.results])
    lines = [
        f"The runs had different environments: {name} is {' or '.join(map(str, dict.fromkeys(a)))}."
        for name, a in varied.items()
    ]
    for variant, runs in panel.results.variants.items():
        if gone := [run for run in runs if run.status == "diverged"]:
            seeds = ", ".join(str(run.spec.seed) for run in gone)
            why = f" ({gone[0].message})" if gone[0].message else ""
            lines.append(f"{panel.results.labels[variant]} diverged with seed {seeds}{why}.")
    lines += _other_data(panel)
    lines += [
        f"Worse than a baseline without a model ({name}): {'; '.join(some)}. Check the learning "
        "rate and the number of steps before you compare them."
        for name, some in _worse_than_baselines(panel).items()
    ]
    if waiting := [spec.id for spec in panel.unfinished]:
        lines.append(f"Not finished, so not shown: {_listed(waiting)}.")
    there = sorted({run.spec.seed for run in panel.results})
    planned = panel.about.planned_seeds or there
    if added := [str(seed) for seed in there if seed not in planned]:
        lines.append(
            f"Seeds {', '.join(added)} were added after scores were seen: pairs are judged by a "
            "test that allows it, and averages over other choices by the planned seeds alone."
        )
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
    if len(panel.results.texts) > 1:
        return []
    tags = {name for variant in panel.results.variants for name, _ in variant}
    fields = differing([flatten(json.loads(data)) for data in digests])
    other = ", ".join(name for name in fields if name not in tags)
    return [f"Variants were trained on different data: {other} differ."] if other else []


def _worse_than_baselines(panel: Panel) -> dict[str, list[str]]:
    """The weakest baseline, which has no model -> the variants that it is better than."""
    worse: dict[str, list[str]] = {}
    for variant in panel.scores:
        if name := panel.worse_than(variant):
            worse.setdefault(name, []).append(panel.results.labels[variant])
    return worse


def expectations(panel: Panel) -> list[Paragraph]:
    """Which expected results were found, those that were not first."""
    about, parts = panel.about, []
    found = [_judge(panel, expected) for expected in about.expectations]
    for held, lead in ((False, "Not as expected:"), (True, "As expected:"), (None, "No result:")):
        if some := [text for judged, text in found if judged is held]:
            parts.append(Paragraph("; ".join(some) + ".", lead, "answer"))
    if parts and about.source:
        parts.append(Paragraph(f"The expectation is of {about.source}."))
    return parts


def _judge(panel: Panel, expected: Expectation) -> tuple[bool | None, str]:
    """Was it found (None: no result), and in which words?"""
    values = _numbers(panel, expected, expected.tags)
    others = _numbers(panel, expected, expected.over) if expected.over else values
    if not len(values) or not len(others):
        missing = expected.over if expected.over and len(values) else expected.tags
        return None, ", ".join(map(str, missing.values()))
    numbers = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    if expected.over is not None:
        numbers["ratio"] = values.mean() / others.mean()
        values = np.array([numbers["ratio"]])
    held = bool(np.all(RELATIONS[expected.relation](values, expected.value)))
    expectation = f"expected: {expected.relation} {expected.value:g}"
    return held, f"{expected.text.format(**numbers)} ({expectation})"


def _numbers(panel: Panel, expected: Expectation, tags: Tags) -> Array:
    variant = panel.find(tags)
    return np.array(panel.numbers(variant, expected.number) if variant else [], np.float64)


def limits(panel: Panel) -> list[str]:
    """Sentences on what the comparison does not say."""
    texts, seeds = len(panel.results.texts), len({run.spec.seed for run in panel.results})
    sizes = sorted({run.sizes.parameters for run in panel.results})
    equal = panel.about.matched
    if len(panel.results) == 1:
        interval = "One run: a result, not a comparison."
    elif seeds == texts == 1:
        interval = "One seed: there are no intervals."
    elif texts == 1:
        interval = "Intervals cover variation over seeds only, not over texts or model sizes."
    else:
        interval = (
            f"Intervals cover variation over texts ({texts}) and seeds: they are for other texts "
            "of this kind, not for other model sizes."
        )
    few = (
        f"Few seeds: the interval of a difference has {counted(seeds - 1, 'degree')} of freedom, "
        "so it is wide."
    )
    budget = f"Not at an equal budget: variants have {sizes[0]:,} to {sizes[-1]:,} parameters."
    lines = {
        interval: True,
        few: texts == 1 and 2 <= seeds <= FEW_SEEDS,
        _rates(panel): len(panel.results.variants) > 1,
        f"Equal for all variants: {equal}. Other budgets differ.": bool(equal),
        budget: len(sizes) > 1 and not equal,
    }
    return [*panel.about.notes, *(line for line, holds in lines.items() if holds)]


def _rates(panel: Panel) -> str:
    """How learning rates were chosen."""
    rates = sorted({run.spec.config.train.optimizer.learning_rate for run in panel.results})
    if panel.tuning is not None:
        return "Each variant has a learning rate of its own, chosen on the validation part."
    if len(rates) == 1:
        return f"One learning rate for all variants ({rates[0]:g}), which may suit some better."
    if "learning_rate" in {name for variant in panel.results.variants for name, _ in variant}:
        return "Each learning rate is a variant of its own here; none was chosen."
    return f"Learning rates differ between variants ({', '.join(f'{r:g}' for r in rates)})."


def making_section(panels: Sequence[Panel]) -> Section:
    """Data, training, model, seeds, versions, command, seconds; each value once."""
    facts: dict[str, dict[str, None]] = {}
    runs = [run for panel in panels for run in panel.results]
    for run in runs:
        for name, text in (*_facts(run), *_provenance(run)):
            facts.setdefault(name, {})[text] = None
    seconds = sum(run.timing.seconds for run in runs)
    facts["Time"] = {f"{seconds:,.0f} seconds of {counted(len(runs), 'run')} together": None}
    text = (
        "Every value that a run used is in its spec.json. results.csv has one row per run; each "
        "table is a CSV file in tables/, each figure an SVG file in figures/."
    )
    shown = [(name, _listed(list(texts))) for name, texts in facts.items()]
    return Section("How it was made", [Facts(shown), Paragraph(text)])


def _facts(run: RunResult) -> Iterator[tuple[str, str]]:
    train, model = run.spec.config.train, run.spec.config.model
    source = run.spec.config.to_dict()["data"]
    given = [f"{n} {v}" for n, v in source.items() if v not in ("", None, (), [])]
    facts = [f"{v:,} {n}" if isinstance(v, int) else f"{n}: {v}" for n, v in run.data.facts.items()]
    digest = [f"sha256 {run.data.sha256}"] if run.data.sha256 else []
    scored = train.evaluation.windows
    yield "Data", ", ".join(filter(None, [run.data.name, *given, *facts, *digest]))
    yield "Task", run.task.description or str(run.spec.config.task)
    if run.provenance.start:
        yield "Start", run.provenance.start
    yield (
        "Training",
        f"{train.steps:,} steps of {train.batch_size:,} rows of {train.length:,} tokens; "
        f"{train.optimizer.name}, {train.schedule.name.replace('_', ' ')} schedule, "
        f"{train.schedule.warmup(train.steps):,} steps of warm-up",
    )
    yield "Learning rates", f"{train.optimizer.learning_rate:.3g}"
    yield "Scored", f"{scored:,} held-out rows" if scored else "all held-out rows"
    yield "Seeds", str(run.spec.seed)
    sizes = f"{model.num_layers} layers, width {model.width:,}, {model.heads.num_heads} heads"
    yield "Model", f"{model.kind}, {sizes}, vocabulary {model.vocab_size:,}"
    yield "Versions", ", ".join(f"{n} {v}" for n, v in run.provenance.environment.items())


def _provenance(run: RunResult) -> Iterator[tuple[str, str]]:
    if (folder := run.folder) is None:
        return
    if (command := folder.parent.parent / COMMAND).exists():
        yield "Command", command.read_text(encoding="utf-8").strip()
    if (folder / PROVENANCE).exists() and (
        git := json.loads((folder / PROVENANCE).read_text(encoding="utf-8")).get("git")
    ):
        changed = " with changes (changes.diff of each run)" if git["changed"] else ""
        yield "Commit", f"{git['commit'][:12]}{changed}"
