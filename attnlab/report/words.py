"""The texts of a report: question, conclusions, warnings, expected results, limits, how the numbers
were made."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.lab.description import Expectation
from attnlab.lab.machine import PROVENANCE
from attnlab.lab.result import RunResult
from attnlab.lab.results import data_of
from attnlab.lab.sweep import COMMAND
from attnlab.lab.text_table import counted
from attnlab.nested import differing, flatten
from attnlab.report.page import Facts, Paragraph, Section, number, p_equation
from attnlab.report.panel import Panel, mean_of

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
COSTS = {
    "parameters": "parameters", "flops": "flops_per_token", "cache": "cache_bytes_per_token"
}  # fmt: skip
"""Budget -> its field of `ModelSizes`."""
NEARLY_EQUAL = 1.02
"""The largest cost divided by the smallest: no width of the FFN meets a budget exactly."""
RELATIONS = {"at most": np.less_equal, "at least": np.greater_equal, "exactly": np.equal}


def question(panels: Sequence[Panel]) -> str:
    """The title: the question of the sweep, else made of its tags."""
    if questions := dict.fromkeys(p.about.question for p in panels if p.about.question):
        return " ".join(questions)
    results, unit = panels[0].results, panels[0].metric.unit
    varied = differing([dict(variant) for variant in results.variants])
    names = " and ".join(name.rpartition(".")[2].replace("_", " ") for name in varied)
    return f"Which {names} has the best held-out {unit}?" if names else f"Held-out {unit}"


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
    every = list(panel.comparisons.itertuples())
    rows = [row for row in every if row.over] or every
    if len(rows) > MOST_SHOWN:
        found = [_counted(panel, rows)]
    elif rows:
        found = [_answer(panel, row) for row in rows]
    else:  # a single variant, or a baseline that diverged
        digits, labels = panel.metric.digits, panel.results.labels
        means = [f"{labels[v]}: {number(mean_of(s), digits)}" for v, s in panel.scores.items()]
        found = [("Nothing to compare.", "; ".join(means) or "Every run diverged.")]
    start = f"{panel.title}: " if panel.title else ""
    return [Paragraph(text, start + lead, "answer") for lead, text in found]


def _counted(panel: Panel, rows: Sequence[Any]) -> tuple[str, str]:
    """How many comparisons have which conclusion, and their variants; with their baselines, where
    these differ."""
    several = len({row.baseline for row in rows}) > 1
    found: dict[str, list[str]] = {word: [] for word in SENTENCES}
    for row in rows:
        against = f" against {row.baseline}" if several else ""
        found[row.conclusion].append(f"{row.variant}{against}")
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
    unit, digits = panel.metric.unit, panel.metric.digits
    over = f", averaged over {row.over}" if row.over else ""
    words = {"variant": row.variant, "baseline": row.baseline, "over": over, "unit": unit}
    lead = SENTENCES[row.conclusion].format(margin=panel.about.margin, **words)
    if row.least < 0 < row.most:
        ends = f"{number(row.least, digits)} and {number(row.most, digits)}"
        lead += f" The sign depends on {row.over}: the single differences are between {ends}."
    if not row.pairs:
        return lead, "There is no seed with scores of both."
    interval = f"95 % interval {number(row.low, digits)} to {number(row.high, digits)}"
    if row.pairs == 1:
        interval = "one pair of runs, no interval"
    difference = f"{number(row.difference, digits)} {unit}"
    return lead, f"Difference {difference} ({interval}, {p_equation(row.p_holm)})."


def warnings(panel: Panel) -> list[Paragraph]:
    """What is wrong with the runs."""
    lines, labels = _other_data(panel), panel.results.labels
    for name, values in differing([r.provenance.environment for r in panel.results]).items():
        listed = " or ".join(map(str, dict.fromkeys(values)))
        lines.append(f"The runs had different environments: {name} is {listed}.")
    for variant, runs in panel.results.variants.items():
        if gone := [run for run in runs if run.status == "diverged"]:
            seeds = ", ".join(str(run.spec.seed) for run in gone)
            why = f" ({gone[0].message})" if gone[0].message else ""
            lines.append(f"{labels[variant]} diverged with seed {seeds}{why}.")
    worse: dict[str, list[str]] = {}
    for variant in panel.scores:
        worse.setdefault(panel.worse_than(variant), []).append(labels[variant])
    lines += [
        f"Worse than a baseline without a model ({name}): {'; '.join(some)}. Check the learning "
        "rate and the number of steps before you compare them."
        for name, some in worse.items()
        if name
    ]
    if unknown := [str(dict(tags)) for tags in panel.about.named if panel.find(tags) is None]:
        lines.append(f"Not compared, since no variant, or several, have tags: {_listed(unknown)}.")
    if waiting := [spec.id for spec in panel.unfinished]:
        lines.append(f"Not finished, so not shown: {_listed(waiting)}.")
    there = {run.spec.seed for run in panel.results}
    if added := there.difference(panel.about.planned_seeds or there):
        lines.append(
            f"Seeds {', '.join(map(str, sorted(added)))} were added after scores were seen: pairs "
            "are judged by a test that allows it, and averages over other choices by the planned "
            "seeds alone."
        )
    return [Paragraph(line, panel.title and f"{panel.title}:", "warning") for line in lines]


def _other_data(panel: Panel) -> list[str]:
    """Were runs trained on other data than their tags say?"""
    trained_on = {(data_of(run), run.data.sha256) for run in panel.results}
    configs = {data for data, _ in trained_on}
    if len(trained_on) > len(configs):
        return [
            "Runs of the same data config were trained on different data (their digests differ), "
            "so their scores cannot be compared."
        ]
    texts = {(panel.results.text_of(run), run.data.sha256) for run in panel.results}
    if len(texts) > len({digest or text for text, digest in texts}):
        return [
            "Two of the texts are the same data (their digests are equal), but count as two, so "
            "intervals over texts are too narrow."
        ]
    fields = differing([flatten(json.loads(config)) for config in configs])
    tags = {name for variant in panel.results.variants for name, _ in variant}
    other = sorted(set(fields) - tags)
    if len(panel.results.texts) > 1 or not other:
        return []
    return [f"Variants were trained on different data: {', '.join(other)} differ."]


def expectations(panel: Panel) -> list[Paragraph]:
    """Which expected results were found, those that were not first."""
    found: dict[str, list[str]] = {"Not as expected:": [], "As expected:": [], "No result:": []}
    for expected in panel.about.expectations:
        lead, text = _judge(panel, expected)
        found[lead].append(text)
    parts = [
        Paragraph(f"{'; '.join(some)}.", lead, "answer") for lead, some in found.items() if some
    ]
    if parts and panel.about.source:
        parts.append(Paragraph(f"The expectation is of {panel.about.source}."))
    return parts


def _judge(panel: Panel, expected: Expectation) -> tuple[str, str]:
    """Was it found, and in which words?"""
    values, others = (
        np.array([] if variant is None else panel.numbers(variant, expected.number), np.float64)
        for variant in (panel.find(expected.tags), panel.find(expected.over or expected.tags))
    )
    if not len(values) or not len(others):
        missing = expected.over if expected.over and len(values) else expected.tags
        return "No result:", ", ".join(map(str, missing.values()))
    numbers, judged = {"mean": values.mean(), "min": values.min(), "max": values.max()}, values
    if expected.over:
        judged = numbers["ratio"] = values.mean() / others.mean()
    held = np.all(RELATIONS[expected.relation](judged, expected.value))
    wanted = f"expected: {expected.relation} {expected.value:g}"
    return (
        "As expected:" if held else "Not as expected:",
        f"{expected.text.format(**numbers)} ({wanted})",
    )


def limits(panel: Panel) -> list[str]:
    """Sentences on what the comparison does not say."""
    texts, seeds = len(panel.results.texts), len({run.spec.seed for run in panel.results})
    sizes = {run.sizes.parameters for run in panel.results}
    rates: dict[str, set[float]] = {}
    for run in panel.results:
        rate = run.spec.config.train.optimizer.learning_rate
        rates.setdefault(panel.results.text_of(run), set()).add(rate)
    lines = list(panel.about.notes)
    if seeds == texts == 1:
        lines.append("One seed: there are no intervals.")
    elif texts == 1:
        lines.append("Intervals cover variation over seeds only, not over texts or model sizes.")
    else:
        lines.append(
            f"Intervals cover variation over texts ({texts}) and seeds: they are for other texts "
            "of this kind, not for other model sizes."
        )
    if texts == 1 < seeds <= FEW_SEEDS:
        freedom = counted(seeds - 1, "degree")
        lines.append(
            f"Few seeds: the interval of a difference has {freedom} of freedom, so it is wide."
        )
    if panel.tuning is None and any(len(some) > 1 for some in rates.values()):
        lines.append("Learning rates differ between variants: see the table Budgets.")
    elif panel.tuning is None and len(panel.results.variants) > 1:
        lines.append("One learning rate for all variants, which may suit some better.")
    if equal := panel.about.matched:
        costs = [getattr(run.sizes, COSTS.get(equal, ""), 1) for run in panel.results]
        lines.append(
            f"Equal for all variants: {equal}. Other budgets differ."
            if max(costs) <= NEARLY_EQUAL * min(costs)
            else f"Not equal, though matched: {equal}, of {min(costs):,} to {max(costs):,}."
        )
    elif len(sizes) > 1:
        lines.append(
            f"Not at an equal budget: variants have {min(sizes):,} to {max(sizes):,} parameters."
        )
    return lines


def making_section(panels: Sequence[Panel]) -> Section:
    """Data, training, model, seeds, versions, command, seconds; each value once."""
    facts: dict[str, dict[str, None]] = {}
    runs = [run for panel in panels for run in panel.results]
    for run in runs:
        for name, text in _facts(run):
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
    train, model, data = run.spec.config.train, run.spec.config.model, run.data
    given = {**json.loads(data_of(run)), **data.facts, "sha256": data.sha256}
    facts = [f"{name} {value}" for name, value in given.items() if value or value == 0]
    yield "Data", ", ".join(filter(None, [data.name, *facts]))
    yield "Task", run.task.description or str(run.spec.config.task)
    if run.provenance.start:
        yield "Start", run.provenance.start
    yield (
        "Training",
        f"{train.steps:,} steps of {train.batch_size:,} rows of {train.length:,} tokens; "
        f"{train.optimizer.name}, {train.schedule.name.replace('_', ' ')} schedule, "
        f"{train.schedule.warmup(train.steps):,} steps of warm-up",
    )
    windows = train.evaluation.windows
    yield "Scored", f"at most {windows:,} held-out rows" if windows else "all held-out rows"
    yield "Seeds", str(run.spec.seed)
    sizes = f"{model.num_layers} layers, width {model.width:,}, {model.heads.num_heads} heads"
    yield "Model", f"{model.kind}, {sizes}, vocabulary {model.vocab_size:,}"
    yield "Versions", ", ".join(f"{n} {v}" for n, v in run.provenance.environment.items())
    if run.folder is not None:
        yield from _provenance(run.folder)


def _provenance(folder: Path) -> Iterator[tuple[str, str]]:
    """The command as it was typed, and the commit; `folder` is that of a run."""
    command, process = folder.parent.parent / COMMAND, folder / PROVENANCE
    if command.exists():
        yield "Command", command.read_text(encoding="utf-8").strip()
    if git := json.loads(process.read_text(encoding="utf-8"))["git"] if process.exists() else None:
        changed = " with changes (changes.diff of each run)" if git["changed"] else ""
        yield "Commit", f"{git['commit'][:12]}{changed}"
