"""`Panel`: results that are compared with each other, and what the report needs to know of them."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnlab.lab.description import Description, Tags
from attnlab.lab.result import MetricInfo, RunResult
from attnlab.lab.results import Results
from attnlab.lab.stats import (
    Comparison,
    Effect,
    Scores,
    Variant,
    average_effects,
    compare_pairs,
)
from attnlab.nested import JSON, differing
from attnlab.report.style import Style, style
from attnlab.training.loggers import read_metrics

METRICS = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class Panel:
    """Results of one budget and one model size (and one text, or several together).

    Attributes:
      results: of the runs.
      about: what is to be decided.
      title: what these runs have in common; needed where a report has several panels.
      unfinished: ids of runs that have no result yet.
      tuning: runs that chose the learning rates, if they are not among the results.
    """

    results: Results
    about: Description = Description()
    title: str = ""
    unfinished: Sequence[str] = ()
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
    def variants(self) -> dict[Variant, list[RunResult]]:
        """Variant -> its runs, in the order of the sweep."""
        return self.results.by_variant()

    @functools.cached_property
    def labels(self) -> dict[Variant, str]:
        """Variant -> its name for people."""
        return self.results.labels

    @functools.cached_property
    def scores(self) -> dict[Variant, Scores]:
        """Of the variants that have any, best mean first."""
        if not any(run.scores.heldout for run in self.results):
            return {}
        found = {v: s for v, s in self.results.scores().items() if s}
        return dict(sorted(found.items(), key=lambda item: self.sign * mean_of(item[1])))

    @functools.cached_property
    def baseline(self) -> Variant | None:
        """The variant that others are compared with: the one of `about`, else the first."""
        if self.about.baseline and (named := self.find(self.about.baseline)):
            return named if named in self.scores else None
        return next((variant for variant in self.variants if variant in self.scores), None)

    def find(self, tags: Tags) -> Variant | None:
        """The variant that has these tags; None where there is none."""
        try:
            return self.results.variant(tags)
        except ValueError:
            return None

    @functools.cached_property
    def comparisons(self) -> list[Comparison]:
        """The pairs of `about`, else each variant against the baseline."""
        pairs = [(v, self.baseline) for v in self.scores if v != self.baseline]
        if self.about.pairs:
            named = [(self.find(a), self.find(b)) for a, b in self.about.pairs]
            pairs = [(a, b) for a, b in named if a is not None]
        return compare_pairs(
            self.scores,
            [(a, b) for a, b in pairs if b is not None and {a, b} <= self.scores.keys()],
            margin=self.about.margin,
            seeds_added=self.about.seeds_added,
        )

    @functools.cached_property
    def effects(self) -> list[Effect]:
        """Values of a tag averaged over the others, where all combinations were run."""
        if len(self.scores) < len(self.variants):
            return []
        pairs, tags = self.about.pairs, None
        if pairs:  # the tags that the question is about
            tags = list(dict.fromkeys(n for a, b in pairs for n in a if a[n] != b.get(n, a[n])))
        ordered = {variant: self.scores[variant] for variant in self.variants}
        reference = dict(self.baseline or ()) | dict(self.about.baseline)
        return average_effects(
            ordered,
            reference=reference,
            tags=tags,
            seeds=self.about.planned_seeds or None,
            margin=self.about.margin,
            seeds_added=self.about.seeds_added and not self.about.planned_seeds,
        )

    @functools.cached_property
    def styles(self) -> dict[Variant, Style]:
        """The first tag that varies gives the colour, the others dashes and marker."""
        varied = differing([dict(v) for v in self.variants])
        first = next(iter(varied), None)
        colours: dict[str, int] = {}
        patterns: dict[str, int] = {}
        found = {}
        for variant in self.variants:
            tags = dict(variant)
            colour = repr(tags.get(first) if first else None)
            rest = repr([tags.get(name) for name in varied if name != first])
            found[variant] = style(
                colours.setdefault(colour, len(colours)), patterns.setdefault(rest, len(patterns))
            )
        return found

    def mean(self, variant: Variant, part: str, metric: str) -> float | None:
        """Mean of a metric of a part over the runs that have it."""
        runs = [getattr(run.scores, part) for run in self.variants[variant]]
        values = [of[metric] for of in runs if metric in of]
        return float(np.mean(values)) if values else None

    def numbers(self, variant: Variant, name: str) -> list[float]:
        """A number of each run: held out, of its weights, or the last of this name in its metrics;
        "": the main metric."""
        name = name or self.metric.name
        found = []
        for run in self.variants[variant]:
            if name in run.scores.heldout or name in run.weights:
                found.append({**run.weights, **run.scores.heldout}[name])
            elif (curve := self.curve(run, name)) and curve:
                found.append(curve[max(curve)])
        return found

    def curve(self, run: RunResult, name: str) -> dict[int, float]:
        """Step -> a number of its metrics; empty where the run left none."""
        folder = self.results.folder_of(run)
        if folder is None or not (folder / METRICS).exists():
            return {}
        rows = [row for row in _rows(folder / METRICS) if name in row]
        return {int(row["step"]): float(np.ravel(row[name])[0]) for row in rows}

    def named(self, text: str) -> str:
        """A heading with the title of the panel."""
        return f"{text}: {self.title}" if self.title else text


def mean_of(scores: Scores) -> float:
    """Mean over texts and seeds."""
    return float(np.mean(list(scores.values()))) if scores else math.nan


def spread_of(scores: Scores) -> float | None:
    """Standard deviation over texts and seeds; None of one score."""
    return float(np.std(list(scores.values()), ddof=1)) if len(scores) > 1 else None


@functools.lru_cache(maxsize=512)
def _rows(path: Path) -> list[JSON]:
    return read_metrics(path)
