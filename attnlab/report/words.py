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
MOST_NAMES = 8
"""Names of variants in such a list."""
FEW_SEEDS = 3
RELATIONS = {"at most": np.less_equal, "at least": np.greater_equal, "exactly": np.equal}


def question(panels: Sequence[Panel]) -> str:
    """The title: the question of the sweep, else made of its tags."""
    questions = list(dict.fromkeys(p.about.question for p in panels if p.about.question))
    if questions:
        return " ".join(questions)
    panel = panels[0]
    varied = [name for name in differing([dict(v) for v in panel.variants]) if name != "seed"]
    if not varied:
        return f"Held-out {panel.metric.unit} of {label_of(next(iter(panel.variants)))}"
    names = " and ".join(name.rpartition(".")[2].replace("_", " ") for name in varied)
    return f"Which {names} has the best held-out {panel.metric.unit}?"


def subject(panels: Sequence[Panel]) -> str:
    """What was run, and what the scores are."""
    runs = [run for panel in panels for run in panel.results]
    names = dict.fromkeys(run.data.name or type(run.spec.config.data).__name__ for run in runs)
    counts = (
        counted(max(len(panel.variants) for panel in panels), "variant"),
        counted(len({run.spec.seed for run in runs}), "seed"),
        counted(len(runs), "run"),
    )
    units = {
        f"{panel.metric.unit} ({'lower' if panel.sign > 0 else 'higher'} is better)": None
        for panel in panels
    }
    return (
        f"{', '.join(counts)}, trained on {' and '.join(names)}. Scores are {' or '.join(units)} "
        "on held-out data."
    )


def answers(panel: Panel) -> list[Paragraph]:
    """The conclusions of a panel: those of averages over other tags, where there are any, else
    those of single comparisons."""
    if not panel.scores:
        return [Paragraph("Every run diverged.", panel.named("Nothing to compare"), "answer")]
    unit, digits = panel.metric.unit, panel.metric.digits
    if len(panel.scores) == 1:
        [(variant, scores)] = panel.scores.items()
        text = (
            f"{number(mean_of(scores), digits)} {unit} held out, {counted(len(scores), 'run')}. "
            "There is no other variant to compare it with."
        )
        return [Paragraph(text, _titled(panel, f"{panel.labels[variant]}:"), "answer")]
    every = list(panel.comparisons.itertuples())
    rows = [row for row in every if row.over] or every
    if len(rows) > MOST_SHOWN:
        return [_counted(panel, rows)]
    return [_answer(panel, row) for row in rows]


def _counted(panel: Panel, rows: Sequence[Any]) -> Paragraph:
    """How many comparisons have which conclusion, and their variants."""
    groups: dict[str, list[str]] = {word: [] for word in SENTENCES}
    for row in rows:
        groups[row.conclusion].append(row.variant)
    lead = ", ".join(f"{len(some)} {word}" for word, some in groups.items() if some)
    listed = [
        f"{word.capitalize()}: {'; '.join(some[:MOST_NAMES])}"
        f"{f' and {len(some) - MOST_NAMES} more' if len(some) > MOST_NAMES else ''}."
        for word, some in groups.items()
        if some and word != "inconclusive"
    ]
    text = " ".join([*listed, f"The table {panel.named('Comparisons')} has all."])
    lead = f"Of {counted(len(rows), 'comparison')}: {lead}."
    return Paragraph(text, _titled(panel, lead), "answer")


def _answer(panel: Panel, row: Any) -> Paragraph:
    """The conclusion of one comparison, and its numbers; `row` is one of the table."""
    digits, unit = panel.metric.digits, panel.metric.unit
    lead = SENTENCES[row.conclusion].format(
        variant=row.variant, baseline=row.baseline, margin=panel.about.margin, unit=unit,
        over=f", averaged over {row.over}" if row.over else "",
    )  # fmt: skip
    if row.least < 0 < row.most:
        lead += (
            f" The sign depends on {row.over}: the single differences are between "
            f"{number(row.least, digits)} and {number(row.most, digits)}."
        )
    text = f"Difference {number(row.difference, digits)} {unit} "
    text += f"({interval(row.low, row.high, digits)}, {p_equation(row.p_holm)})."
    return Paragraph(text, _titled(panel, lead), "answer")


def interval(low: float, high: float, digits: int) -> str:
    """The interval in words."""
    if low != low:
        return "one pair of runs, no interval"
    return f"95 % interval {number(low, digits)} to {number(high, digits)}"


def _titled(panel: Panel, lead: str) -> str:
    return f"{panel.title}: {lead}" if panel.title else lead


def warnings(panel: Panel) -> list[Paragraph]:
    """What is wrong with the runs."""
    lines = []
    for name, values in differing([dict(r.provenance.environment) for r in panel.results]).items():
        known = " or ".join(dict.fromkeys(map(str, values)))
        lines.append(f"The runs had different environments: {name} is {known}.")
    for variant, runs in panel.variants.items():
        if gone := [run for run in runs if run.status == "diverged"]:
            seeds = ", ".join(str(run.spec.seed) for run in gone)
            why = f" ({gone[0].message})" if gone[0].message else ""
            lines.append(f"{panel.labels[variant]} diverged with seed {seeds}{why}.")
    lines += _other_data(panel)
    lines += [
        f"Worse than a baseline without a model ({name}): {'; '.join(some)}. Check the learning "
        "rate and the number of steps before you compare them."
        for name, some in _worse_than_baselines(panel).items()
    ]
    if waiting := [spec.id for spec in panel.unfinished]:
        lines.append(f"Not finished, so not shown: {', '.join(waiting)}.")
    planned = panel.about.planned_seeds
    there = sorted({run.spec.seed for run in panel.results})
    if added := [str(seed) for seed in there if planned and seed not in planned]:
        lines.append(
            f"Seeds {', '.join(added)} were added after scores were seen: pairs are judged by a "
            "test that allows it, and averages over other tags by the planned seeds alone."
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


def expectations(panel: Panel) -> list[Paragraph]:
    """Which expected results were found, those that were not first."""
    about = panel.about
    found = [_judge(panel, expected) for expected in about.expectations]
    parts = []
    for held, lead in ((False, "Not as expected:"), (True, "As expected:"), (None, "No result:")):
        if some := [text for judged, text in found if judged is held]:
            parts.append(Paragraph("; ".join(some) + ".", lead, "answer"))
    if parts and about.source:
        parts.append(Paragraph(f"The expectation is of {about.source}."))
    return parts


def _judge(panel: Panel, expected: Expectation) -> tuple[bool | None, str]:
    """Did it come (None: no result), and in which words?"""
    values = _numbers(panel, expected, expected.tags)
    if not len(values):
        return None, ", ".join(map(str, expected.tags.values()))
    numbers = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    judged = values
    if expected.over is not None:
        others = _numbers(panel, expected, expected.over)
        if not len(others):
            return None, ", ".join(map(str, expected.over.values()))
        numbers["ratio"] = values.mean() / others.mean()
        judged = np.array([numbers["ratio"]])
    held = bool(np.all(RELATIONS[expected.relation](judged, expected.value)))
    expectation = f"expected: {expected.relation} {expected.value:g}"
    return held, f"{expected.text.format(**numbers)} ({expectation})"


def _numbers(panel: Panel, expected: Expectation, tags: Tags) -> Array:
    variant = panel.find(tags)
    return np.array(panel.numbers(variant, expected.number) if variant else [], np.float64)


def limits(panel: Panel) -> list[str]:
    """Sentences on what the comparison does not say."""
    texts = panel.results.texts
    seeds = {run.spec.seed for run in panel.results}
    lines = list(panel.about.notes)
    if len(panel.results) == 1:
        lines.append("One run: a result, not a comparison.")
    elif len(seeds) == 1 and len(texts) == 1:
        lines.append("One seed: there are no intervals.")
    elif len(texts) == 1:
        lines.append("Intervals cover variation over seeds only, not over texts or model sizes.")
    else:
        lines.append(
            f"Intervals cover variation over texts ({len(texts)}) and seeds: they are for other "
            "texts of this kind, not for other model sizes."
        )
    if len(texts) == 1 and 2 <= len(seeds) <= FEW_SEEDS:
        lines.append(
            f"Few seeds: the interval of a difference has {counted(len(seeds) - 1, 'degree')} of "
            "freedom, so it is wide."
        )
    lines.append(_rates(panel))
    if panel.about.matched:
        lines.append(f"Equal for all variants: {panel.about.matched}. Other budgets differ.")
    elif len(parameters := sorted({run.sizes.parameters for run in panel.results})) > 1:
        lines.append(
            f"Not at an equal budget: variants have {parameters[0]:,} to {parameters[-1]:,} "
            "parameters."
        )
    return [line for line in lines if line]


def _rates(panel: Panel) -> str:
    """How learning rates were chosen."""
    rates = sorted({run.spec.config.train.optimizer.learning_rate for run in panel.results})
    if panel.tuning is not None:
        return "Each variant has a learning rate of its own, chosen on the validation part."
    if len(rates) == 1:
        same = f"One learning rate for all variants ({rates[0]:g}), which may suit some better."
        return same if len(panel.variants) > 1 else ""
    if "learning_rate" in {name for variant in panel.variants for name, _ in variant}:
        return "Each learning rate is a variant of its own here; none was chosen."
    return f"Learning rates differ between variants ({', '.join(f'{r:g}' for r in rates)})."


def making_section(panels: Sequence[Panel]) -> Section:
    """Data, training, model, seeds, versions, command, seconds; each value once."""
    facts: dict[str, dict[str, None]] = {}
    for panel in panels:
        for run in panel.results:
            for name, text in (*_facts(run), *_provenance(panel, run)):
                facts.setdefault(name, {})[text] = None
    runs = [run for panel in panels for run in panel.results]
    seconds = sum(run.timing.seconds for run in runs)
    shown = [(name, "; ".join(list(texts)[:12])) for name, texts in facts.items()]
    shown.append(("Time", f"{seconds:,.0f} seconds of {counted(len(runs), 'run')} together"))
    text = (
        "Every value that a run used is in its spec.json. results.csv has one row per run; each "
        "table is a CSV file in tables/, each figure an SVG file in figures/."
    )
    return Section("How it was made", [Facts(shown), Paragraph(text)])


def _facts(run: RunResult) -> Iterator[tuple[str, str]]:
    train, model = run.spec.config.train, run.spec.config.model
    source = run.spec.config.to_dict()["data"]
    given = [f"{n} {v}" for n, v in source.items() if v not in ("", None, (), [])]
    facts = [f"{v:,} {n}" if isinstance(v, int) else f"{n}: {v}" for n, v in run.data.facts.items()]
    digest = [f"sha256 {run.data.sha256}"] if run.data.sha256 else []
    yield "Data", ", ".join([run.data.name, *given, *facts, *digest]).lstrip(", ")
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
    scored = train.evaluation.windows
    yield "Scored", f"{scored:,} held-out rows" if scored else "all held-out rows"
    yield "Seeds", str(run.spec.seed)
    sizes = f"{model.num_layers} layers, width {model.width:,}, {model.heads.num_heads} heads"
    yield "Model", f"{model.kind}, {sizes}, vocabulary {model.vocab_size:,}"
    yield "Versions", ", ".join(f"{n} {v}" for n, v in run.provenance.environment.items())


def _provenance(panel: Panel, run: RunResult) -> Iterator[tuple[str, str]]:
    folder = panel.results.folder_of(run)
    if folder is None:
        return
    if (command := folder.parent.parent / COMMAND).exists():
        yield "Command", command.read_text(encoding="utf-8").strip()
    if (folder / PROVENANCE).exists():
        git = json.loads((folder / PROVENANCE).read_text(encoding="utf-8")).get("git")
        if git:
            changed = " with changes (changes.diff of each run)" if git["changed"] else ""
            yield "Commit", f"{git['commit'][:12]}{changed}"
