"""`Results`: the results of a sweep as tables, comparisons, a figure and a report."""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from attnlab.atomic import write_atomic
from attnlab.extras import extra
from attnlab.lab.result import RunResult
from attnlab.lab.spec import Tag
from attnlab.training.loggers import SavesFigure

if TYPE_CHECKING:
    from pandas import DataFrame

Variant: TypeAlias = tuple[tuple[str, Tag], ...]
"""The tags of runs that differ in their seed only."""
LEVEL = 0.95


class Results(Sequence[RunResult]):
    """The results of runs. Runs whose tags are equal are one variant; they differ in their seeds.

    Args:
      runs: the results.
    """

    def __init__(self, runs: Sequence[RunResult]) -> None:
        self.runs = tuple(runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return Results(self.runs[index]) if isinstance(index, slice) else self.runs[index]

    def __iter__(self) -> Iterator[RunResult]:
        return iter(self.runs)

    def filter(self, keep: Callable[[RunResult], bool]) -> "Results":
        """The results for which `keep` is True."""
        return Results([run for run in self.runs if keep(run)])

    @property
    def metric(self) -> str:
        """The metric that tables have by default: bits per byte where there are, else the loss."""
        return "bits_per_byte" if any("bits_per_byte" in r.heldout for r in self.runs) else "loss"

    def by_variant(self) -> dict[Variant, list[RunResult]]:
        """Variant -> its runs, in the order of the sweep."""
        found: dict[Variant, list[RunResult]] = {}
        for run in self.runs:
            found.setdefault(tuple(run.spec.tags.items()), []).append(run)
        return found

    def to_pandas(self) -> "DataFrame":
        """One row a run: id, seed, status, its tags, scores (heldout_loss, ...), sizes, seconds."""
        with extra("lab"):
            import pandas
        return pandas.DataFrame([_flat(run) for run in self.runs])

    def table(self, metric: str | None = None) -> "DataFrame":
        """One row a variant, best first: mean, standard deviation and number of seeds of the
        held-out `metric`; runs that diverged; sizes.

        Raises:
          ValueError: no run has the metric.
        """
        with extra("lab"):
            import pandas
        metric = self._known(metric)
        rows = []
        for variant, runs in self.by_variant().items():
            scores = np.array([run.heldout[metric] for run in runs if metric in run.heldout])
            sizes = runs[0].sizes
            rows.append({
                **dict(variant),
                "mean": scores.mean() if len(scores) else np.nan,
                "sd": scores.std(ddof=1) if len(scores) > 1 else np.nan,
                "seeds": len(scores),
                "diverged": len(runs) - len(scores),
                "parameters": sizes.parameters,
                "applied_parameters": sizes.applied_parameters,
                "flops_per_token": sizes.flops_per_token,
                "ffn_width": sizes.ffn_width,
                "seconds": sum(run.seconds for run in runs),
            })  # fmt: skip
        return pandas.DataFrame(rows).sort_values("mean", ignore_index=True)

    def compare(self, baseline: Mapping[str, Tag], metric: str | None = None) -> "DataFrame":
        """Each other variant against one: paired differences over the seeds that both have.

        A difference is the variant's mean less the baseline's; its 95 % interval is that of
        Student's paired t over seeds, `p` its two-sided p-value and `p_holm` that after Holm's
        correction among all rows. `conclusion` is "lower" or "higher" where p_holm < 0.05, else
        "inconclusive". The intervals are over seeds alone, not over texts or learning rates.

        Args:
          baseline: tags of one variant, as many as are needed to name it.
          metric: of the held-out part.

        Raises:
          ValueError: `baseline` names no variant, or several.
        """
        with extra("lab"):
            import pandas
            from scipy import stats
        metric = self._known(metric)
        variants = self.by_variant()
        fits = [v for v in variants if all(dict(v).get(k) == w for k, w in baseline.items())]
        if len(fits) != 1:
            known = "; ".join(str(dict(v)) for v in variants)
            raise ValueError(f"{dict(baseline)} names {len(fits)} variants; there are {known}")
        reference = _by_seed(variants[fits[0]], metric)
        rows = []
        for variant, runs in variants.items():
            scores = _by_seed(runs, metric)
            seeds = sorted(set(scores) & set(reference))
            if variant == fits[0] or not seeds:
                continue
            gaps = np.array([scores[seed] - reference[seed] for seed in seeds])
            low = high = p = np.nan
            if len(gaps) > 1:
                test = stats.ttest_1samp(gaps, 0.0)
                (low, high), p = test.confidence_interval(LEVEL), test.pvalue
            rows.append({**dict(variant), "difference": gaps.mean(), "low": low, "high": high,
                         "p": p, "seeds": len(gaps)})  # fmt: skip
        table = pandas.DataFrame(rows)
        if len(table):
            table["p_holm"] = holm(table["p"].to_numpy())
            clear = table["p_holm"] < 1 - LEVEL
            sign = np.where(table["difference"] < 0, "lower", "higher")
            table["conclusion"] = np.where(clear, sign, "inconclusive")
        return table

    def figure(self, metric: str | None = None) -> SavesFigure:
        """Each variant's mean held-out `metric` with its 95 % interval over seeds, lowest on top.

        Returns a figure of matplotlib.
        """
        with extra("lab"):
            from scipy import stats

            from attnlab.plotting import dot_plot, style
            from attnlab.plotting.style import Bar
        metric = self._known(metric)
        rows = []
        for variant, runs in self.by_variant().items():
            scores = np.array([run.heldout[metric] for run in runs if metric in run.heldout])
            half = np.nan
            if len(scores) > 1:
                t = stats.t.ppf((1 + LEVEL) / 2, len(scores) - 1)
                half = t * scores.std(ddof=1) / len(scores) ** 0.5
            if len(scores):
                label = ", ".join(str(value) for _, value in variant) or "run"
                rows.append(Bar(label, style(0, 0), float(scores.mean()), float(half)))
        rows.sort(key=lambda row: row.value)
        label = f"held-out {metric.replace('_', ' ')}, mean and 95 % interval over seeds"
        return dot_plot(rows, label)

    def report(self, path: str | Path, baseline: Mapping[str, Tag] | None = None) -> Path:
        """Writes an HTML page: the table, the comparison with `baseline` (None: the first
        variant) and the figure. Returns its path."""
        with extra("lab"):
            import jinja2

            from attnlab.plotting import to_svg
        if not self.runs:
            raise ValueError("no results to report; run the sweep first")
        reference = dict(baseline or self.runs[0].spec.tags)
        baselines = {n: f"{v:.3f}" for n, v in self.runs[0].baselines.get(self.metric, {}).items()}
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("attnlab.lab"), autoescape=True, trim_blocks=True
        )
        page = environment.get_template("report.html.jinja").render(
            metric=self.metric.replace("_", " "),
            reference=", ".join(str(v) for v in reference.values()) or "run",
            table=_markup(self.table()),
            comparison=_markup(self.compare(reference)),
            figure=to_svg(cast(Any, self.figure()), "means"),
            baselines=baselines,
            runs=self.runs,
        )
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, page.encode())
        return path

    def _repr_html_(self) -> str:
        return _markup(self.table())

    def __repr__(self) -> str:
        return f"Results of {len(self.runs)} runs, {len(self.by_variant())} variants"

    def _known(self, metric: str | None) -> str:
        metric = metric or self.metric
        known = sorted({name for run in self.runs for name in run.heldout})
        if metric not in known:
            raise ValueError(f"no run has the metric {metric!r}; known: {', '.join(known)}")
        return metric


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's correction (Holm 1979) of p-values; nan stays nan and does not count.

    >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
    [0.03, 0.06, 0.06]
    """
    corrected = np.full(len(p), np.nan)
    order = [i for i in np.argsort(p) if not np.isnan(p[i])]
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p[i]))
        corrected[i] = highest
    return corrected


def _by_seed(runs: Sequence[RunResult], metric: str) -> dict[int, float]:
    return {run.spec.seed: run.heldout[metric] for run in runs if metric in run.heldout}


def _flat(run: RunResult) -> dict[str, Tag]:
    parts = {"heldout": run.heldout, "train": run.train, "validation": run.validation}
    scores = {f"{part}_{name}": v for part, values in parts.items() for name, v in values.items()}
    sizes = {name: getattr(run.sizes, name) for name in run.sizes.__dataclass_fields__}
    head = {"id": run.spec.id, "seed": run.spec.seed, "status": run.status}
    rate = {"learning_rate": run.spec.config.train.learning_rate}
    speed = {"seconds": run.seconds, "tokens_per_second": run.tokens_per_second}
    return {**head, **rate, **dict(run.spec.tags), **scores, **sizes, **speed}


def _markup(table: "DataFrame") -> str:
    """An HTML table; long ones scroll in their own box."""
    if not len(table):
        return "<p>Nothing to compare.</p>"
    shown = table.rename(columns=lambda name: html.escape(str(name).replace("_", " ")))
    body = shown.to_html(index=False, border=0, float_format=lambda x: f"{x:,.3f}", na_rep="–")
    return f'<div class="scroll" tabindex="0">{body}</div>'
