"""`Panel`: results that are compared with each other, and what the report needs to know of them."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnlab.extras import extra
from attnlab.lab.description import Description, Tags, read_description
from attnlab.lab.policies import FINAL_RATE, FIRST_RATE, TUNING
from attnlab.lab.result import MetricInfo, RunResult
from attnlab.lab.results import COLUMNS, Results, config_fields
from attnlab.lab.spec import RunSpec, read_specs
from attnlab.lab.stats import Scores, Variant
from attnlab.lab.sweep import load_results
from attnlab.load import SPECS
from attnlab.nested import JSON, differing
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

    def find(self, tags: Tags) -> Variant | None:
        """The variant that has these tags; None where there is none."""
        try:
            return self.results.variant(tags)
        except ValueError:
            return None

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
        varied = differing([dict(v) for v in self.variants])
        first = next(iter(varied), None)
        colours: dict[str, int] = {}
        patterns: dict[str, int] = {}
        found = {}
        for variant in self.variants:
            tags = dict(variant)
            colour = repr(tags.get(first) if first else None)
            rest = repr([tags.get(name) for name in varied if name != first])
            found[self.labels[variant]] = style(
                colours.setdefault(colour, len(colours)), patterns.setdefault(rest, len(patterns))
            )
        return found

    def numbers(self, variant: Variant, name: str) -> list[float]:
        """A number of each run: held out, or the last of this name in its metrics; "": the main
        metric."""
        name = name or self.metric.name
        found = []
        for run in self.variants[variant]:
            if name in run.scores.heldout:
                found.append(run.scores.heldout[name])
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


@functools.lru_cache(maxsize=512)
def _rows(path: Path) -> list[JSON]:
    return read_metrics(path)


def read_panels(
    given: Sequence[Results | str | Path], description: Description | None = None
) -> list[Panel]:
    """One panel for each workdir, or results. Those with the same variants and configs but for the
    data (and the learning rates) are one panel: their texts are a source of variation.

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
            panel = Panel(one, description or Description(), title=f"results {i}")
        else:
            folder = Path(one)
            unique = folder.name if names.count(folder.name) == 1 else str(folder)
            panel = _read(folder, unique, description)
        same = (
            k
            for k, other in enumerate(panels)
            if _configs(other.results) == _configs(panel.results) and _data(other) != _data(panel)
        )
        if (k := next(same, None)) is None:
            panels.append(panel)
        else:
            panels[k] = _together(panels[k], panel)
    return [dataclasses.replace(panels[0], title="")] if len(panels) == 1 else panels


def _together(one: Panel, other: Panel) -> Panel:
    """The same variants on other texts."""
    return dataclasses.replace(
        one,
        results=one.results + other.results,
        title=f"{one.title} and {other.title}",
        unfinished=[*one.unfinished, *other.unfinished],
        tuning=one.tuning and other.tuning and one.tuning + other.tuning,
    )


def _read(workdir: Path, title: str, description: Description | None) -> Panel:
    results = load_results(workdir)
    if not len(results):
        raise ValueError(f"no run in {workdir} has a result yet; let the sweep finish one")
    done = {run.spec.id for run in results}
    specs = read_specs((workdir / SPECS).read_text(encoding="utf-8"))
    tuning = workdir / TUNING
    return Panel(
        results,
        description or read_description(workdir),
        title=title,
        unfinished=[spec for spec in specs if spec.id not in done],
        tuning=load_results(tuning) if (tuning / SPECS).exists() else None,
    )


def _configs(results: Results) -> set[str]:
    found = set()
    for variant, runs in results.by_variant().items():
        # Learning rates are tuned on each text.
        rates = (FIRST_RATE, FINAL_RATE)
        fields = {n: v for n, v in config_fields(runs[0]).items() if n not in rates}
        found.add(repr((variant, sorted(fields.items(), key=repr))))
    return found


def _data(panel: Panel) -> set[str]:
    return {repr(run.spec.config.data) + run.data.sha256 for run in panel.results}
