"""`Panel`: results that are compared with each other, and what the report needs to know of them."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from attnlab.extras import extra
from attnlab.lab.description import Description, Tags, read_description
from attnlab.lab.policies import FINAL_RATE, FIRST_RATE, TUNING
from attnlab.lab.result import MetricInfo, RunResult
from attnlab.lab.results import COLUMNS, Results, config_fields, data_of
from attnlab.lab.spec import RunSpec
from attnlab.lab.stats import SeedScores, VariantKey
from attnlab.lab.sweep import described, load_results
from attnlab.lab.workdir import specs_in
from attnlab.load import SPECS
from attnlab.nested import differing
from attnlab.report.style import Style, style
from attnlab.training.loggers import read_metrics

with extra("lab"):
    import pandas

METRICS = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class Panel:
    """Results of one budget and one model size (and one text, or several together).

    Attributes:
      results: of the runs.
      about: what is to be decided.
      title: what these runs have in common; needed where a report has several panels.
      unfinished: runs that have no result yet.
      tuning: runs that chose the learning rates, if they are not among the results.
    """

    results: Results
    about: Description = Description()
    title: str = ""
    unfinished: Sequence[RunSpec] = ()
    tuning: Results | None = None

    @functools.cached_property
    def metric(self) -> MetricInfo:
        """The main metric."""
        return self.results.metrics[self.results.metric]

    @property
    def sign(self) -> int:
        """1 where lower is better, -1 where higher is."""
        return self.results.sign(self.metric.name)

    @functools.cached_property
    def scores(self) -> dict[VariantKey, SeedScores]:
        """Of the variants that have any, best mean first."""
        if not any(run.scores.heldout for run in self.results):
            return {}
        found = {v: s for v, s in self.results.scores().items() if s}
        return dict(sorted(found.items(), key=lambda item: self.sign * mean_of(item[1])))

    def find(self, tags: Tags) -> VariantKey | None:
        """The variant that has these tags; None where none or several do."""
        fits = self.results.with_tags(tags)
        return fits[0] if len(fits) == 1 else None

    @functools.cached_property
    def comparisons(self) -> pandas.DataFrame:
        """`Results.compare` as the description asks for it; averages first, then best first."""
        if not self.scores:
            return pandas.DataFrame(columns=list(COLUMNS))
        about = self.about
        found = self.results.compare(
            about.baseline if self.find(about.baseline) else None,
            pairs=[(a, b) for a, b in about.pairs if self.find(a) and self.find(b)],
            margin=about.margin,
            seeds_added=about.seeds_added,
            planned_seeds=about.planned_seeds,
        )
        order = [(not row.over, self.sign * row.difference) for row in found.itertuples()]
        return found.iloc[sorted(range(len(found)), key=order.__getitem__)]

    @functools.cached_property
    def styles(self) -> dict[str, Style]:
        """Label of a variant -> its style. The first tag that varies gives the colour, the others
        dashes and marker."""
        tags = [dict(variant) for variant in self.results.variants]
        first, *others = differing(tags) or [""]
        looks = [(one.get(first), tuple(one.get(name) for name in others)) for one in tags]
        colours, patterns = (list(dict.fromkeys(some)) for some in zip(*looks, strict=True))
        return {
            label: style(colours.index(colour), patterns.index(pattern))
            for label, (colour, pattern) in zip(self.results.labels.values(), looks, strict=True)
        }

    def baselines(self, runs: Iterable[RunResult]) -> dict[str, float]:
        """Baseline without a model -> its value of the main metric, the mean over the data of the
        runs."""
        name = self.metric.name
        texts = {data_of(run): run.scores.baselines.get(name, {}) for run in runs}
        return dict(pandas.DataFrame(texts).mean(axis=1))

    def worse_than(self, variant: VariantKey) -> str:
        """The weakest of the baselines without a model, where the variant is worse; else ""."""
        scored = [run for run in self.results.variants[variant] if run.scores.heldout]
        known = self.baselines(scored).items()
        weakest = max(known, key=lambda one: self.sign * one[1], default=("", math.nan))
        return weakest[0] if self.sign * (mean_of(self.scores[variant]) - weakest[1]) > 0 else ""

    def numbers(self, variant: VariantKey, name: str) -> list[float]:
        """A number of each run: held out, or the last of this name in its metrics; "": the main
        metric."""
        name, found = name or self.metric.name, []
        for run in self.results.variants[variant]:
            if name in run.scores.heldout:
                found.append(run.scores.heldout[name])
            elif curve := self.curve(run, name):
                found.append(curve[max(curve)])
        return found

    def curve(self, run: RunResult, name: str) -> dict[int, float]:
        """Step -> a number of its metrics; empty where the run left none."""
        rows = read_metrics(run.folder / METRICS) if run.folder else []
        return {int(row["step"]): float(np.ravel(row[name])[0]) for row in rows if name in row}

    def named(self, text: str) -> str:
        """A heading with the title of the panel."""
        return f"{text}: {self.title}" if self.title else text


def mean_of(scores: SeedScores) -> float:
    """Mean over texts and seeds."""
    return float(np.mean(list(scores.values()))) if scores else math.nan


def read_panels(
    given: Sequence[Results | str | Path], description: Description | None = None
) -> list[Panel]:
    """One panel for each workdir, or results. Those with the same variants and configs are one
    panel, whatever their texts (a source of variation) and learning rates.

    They stay apart if they have a text and seed in common (the same sweep on another machine), the
    same text under two data configs or two texts under one, or other comparisons, another margin or
    other expected results in their descriptions.

    Raises:
      ValueError: a workdir holds no sweep, none of its runs has a result, or it is given twice.
    """
    folders = [Path(one) for one in given if not isinstance(one, Results)]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"{', '.join(map(str, folders))}: the same workdir twice; leave one out")
    names = [folder.name for folder in folders]
    panels: list[Panel] = []
    for i, one in enumerate(given, start=1):
        if isinstance(one, Results):
            about = described(description or Description(), [run.spec for run in one])
            panel = Panel(one, about, title=f"results {i}")
        else:
            panel = _read(Path(one), description, unique=names.count(Path(one).name) == 1)
        for k, other in enumerate(panels):
            if _belong_together(other, panel):
                panels[k] = _together(other, panel)
                break
        else:
            panels.append(panel)
    return [dataclasses.replace(panels[0], title="")] if len(panels) == 1 else panels


def _belong_together(one: Panel, other: Panel) -> bool:
    """Are they the same variants and comparisons, on other texts or with other seeds?"""
    decide = ("baseline", "pairs", "margin", "expectations")
    if any(getattr(one.about, name) != getattr(other.about, name) for name in decide):
        return False
    ours, theirs = (
        {(data_of(run), run.data.sha256 or data_of(run), run.spec.seed) for run in panel.results}
        for panel in (one, other)
    )
    same_text = [(a == b, s == t, n == m) for a, s, n in ours for b, t, m in theirs]
    return _configs(one.results) == _configs(other.results) and all(
        config == digest and not (config and seed) for config, digest, seed in same_text
    )


def _together(one: Panel, other: Panel) -> Panel:
    """The same variants on other texts, or with other seeds: those of either that were added after
    scores were seen are not planned."""
    planned, added, abouts = set[int](), set[int](), (one.about, other.about)
    for panel, about in zip((one, other), abouts, strict=True):
        there = {run.spec.seed for run in panel.results}
        fixed = set(about.planned_seeds) or (set() if about.seeds_added else there)
        planned, added = planned | fixed, added | there - fixed
    is_known = any(about.planned_seeds or about.seeds_added for about in abouts)
    about = dataclasses.replace(
        one.about,
        seeds_added=any(about.seeds_added for about in abouts),
        planned_seeds=tuple(sorted(planned - added)) if is_known else (),
        notes=tuple(dict.fromkeys((*one.about.notes, *other.about.notes))),
    )
    return dataclasses.replace(
        one,
        about=about,
        results=one.results + other.results,
        title=f"{one.title} and {other.title}",
        unfinished=[*one.unfinished, *other.unfinished],
        tuning=one.tuning and other.tuning and one.tuning + other.tuning,
    )


def _read(workdir: Path, description: Description | None, *, unique: bool) -> Panel:
    """Of a workdir; `unique`: no other one has its name."""
    results, tuning = load_results(workdir), workdir / TUNING
    if not len(results):
        raise ValueError(f"no run in {workdir} has a result yet; let the sweep finish one")
    done = {run.spec.id for run in results}
    return Panel(
        results,
        read_description(workdir, description),
        title="/".join(workdir.resolve().parts[-1 if unique else -2 :]),
        unfinished=[spec for name, spec in specs_in(workdir).items() if name not in done],
        tuning=load_results(tuning) if (tuning / SPECS).exists() else None,
    )


def _configs(results: Results) -> str:
    """The variants and their configs without data, and without learning rates, which are tuned on
    each text."""
    configs = {variant: config_fields(runs[0]) for variant, runs in results.variants.items()}
    for fields in configs.values():
        del fields[FIRST_RATE], fields[FINAL_RATE]
    return repr(sorted(configs.items(), key=repr))
