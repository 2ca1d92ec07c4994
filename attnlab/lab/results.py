"""`Results`: the results of a sweep as tables and comparisons."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnlab.extras import extra
from attnlab.lab.result import MetricInfo, ModelSizes, RunResult, Scores, metric_infos
from attnlab.lab.spec import RunSpec, Tag, as_tag
from attnlab.lab.stats import Comparison, SeedScores, VariantKey, average_effects, compare_pairs
from attnlab.lab.text_table import counted
from attnlab.load import IMPORTS
from attnlab.nested import differing, field_path, flatten

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Results", "VariantKey", "label_of"]

COLUMNS = (
    "variant", "baseline", "over", "difference", "low", "high", "p_holm", "conclusion", "p",
    "p_equivalent", "least", "most", "pairs", "texts", "df", "method",
)  # fmt: skip
"""Of `Results.compare`."""

TEXT_TAGS = ("path", "text")
"""Tags that name a text: they do not make another variant."""


class Results(Sequence[RunResult]):
    """The results of runs.

    Runs with equal tags are one variant; they differ in their seeds, and in their text if several
    texts were trained on. Runs with equal tags and another config (another optimizer, say) are
    other variants: `variants` adds the fields that differ.

    Args:
      runs: the results. A report has learning curves of those with a `folder`.

    >>> from attnlab.lab.experiment import Experiment
    >>> from attnlab.lab.result import ModelSizes, Scores
    >>> from attnlab.lab.spec import product
    >>> sizes = ModelSizes(parameters=9, applied_parameters=9, flops_per_token=9, ffn_width=4)
    >>> runs = [
    ...     RunResult(
    ...         spec=spec, status="complete", sizes=sizes,
    ...         scores=Scores(heldout={"bits_per_byte": 2.5 + spec.seed}),
    ...     )
    ...     for spec in product(layout=["standard", "wide"], seeds=[0, 1])
    ... ]
    >>> results = Results(runs)
    >>> results, list(results.labels.values())
    (Results of 4 runs, 2 variants, ['standard', 'wide'])
    >>> results.filter(lambda run: run.spec.tags["layout"] == "wide")[0].scores.heldout
    {'bits_per_byte': 2.5}
    """

    def __init__(self, runs: Iterable[RunResult]) -> None:
        self.runs = tuple(runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        picked = self.runs[index]
        return Results(picked) if isinstance(index, slice) else picked

    def __add__(self, other: "Results") -> "Results":
        return Results([*self.runs, *other.runs])

    def filter(self, keep: Callable[[RunResult], bool]) -> "Results":
        """The results for which `keep` is True."""
        return Results(run for run in self.runs if keep(run))

    @property
    def metrics(self) -> dict[str, MetricInfo]:
        """Name -> metric of the task, the main one first, with "loss" last."""
        known: dict[str, MetricInfo] = {}
        for run in self.runs:  # one that no run wrote may lack the metrics of its task
            task = run.spec.config.objective
            known |= {m.name: m for m in run.task.metrics or metric_infos(task)}
        return {**known, "loss": MetricInfo(name="loss", unit="loss")}

    @property
    def metric(self) -> str:
        """The main metric, which tables have by default: the first of the task that runs have."""
        there = {name for run in self.runs for name in run.scores.heldout}
        return next((name for name in self.metrics if name in there), "loss")

    def sign(self, metric: str) -> int:
        """1 where lower is better, -1 where higher is."""
        known = self.metrics.get(metric)
        return -1 if known and known.better == "higher" else 1

    @functools.cached_property
    def variants(self) -> dict[VariantKey, list[RunResult]]:
        """Variant -> its runs, in the order of the sweep."""
        tagged: dict[VariantKey, list[RunResult]] = {}
        for run in self.runs:
            tags = tuple((n, v) for n, v in run.spec.tags.items() if n not in TEXT_TAGS)
            tagged.setdefault(tags, []).append(run)
        found: dict[VariantKey, list[RunResult]] = {}
        for tags, runs in tagged.items():
            for more, run in zip(_distinguish(runs), runs, strict=True):
                found.setdefault((*tags, *more), []).append(run)
        return found

    @functools.cached_property
    def labels(self) -> dict[VariantKey, str]:
        """Variant -> its name for people: the values of the tags that differ. Never read back."""
        varied = differing([dict(v) for v in self.variants])
        return {v: label_of([t for t in v if t[0] in varied] or v) for v in self.variants}

    def scores(self, metric: str | None = None) -> dict[VariantKey, SeedScores]:
        """Variant -> (text, seed) -> held-out score.

        Raises:
          ValueError: two runs of one variant, text and seed.
        """
        metric = self.known_metric(metric)
        found: dict[VariantKey, SeedScores] = {}
        for variant, runs in self.variants.items():
            of: dict[tuple[str, int], RunResult] = {}
            for run in (run for run in runs if metric in run.scores.heldout):
                other = of.setdefault((self.text_of(run), run.spec.seed), run)
                if other is not run:
                    raise ValueError(
                        f"{other.spec.id!r} and {run.spec.id!r} are the same variant and seed, "
                        "which would count twice; leave one of them out (`filter`)"
                    )
            found[variant] = {key: run.scores.heldout[metric] for key, run in of.items()}
        return found

    def to_pandas(self) -> "DataFrame":
        """One row a run: id, seed, status, its tags, scores (heldout_loss, ...), sizes, seconds.

        A tag with the name of a column, here and in other tables, is the column "name (tag)".
        """
        return _frame([_flat(run) for run in self.runs])

    def table(self, metric: str | None = None) -> "DataFrame":
        """One row a variant, best mean first: mean, standard deviation over seeds and number of
        scores of the held-out `metric`; runs that diverged; sizes; mean seconds of the others.

        Raises:
          ValueError: no run has the metric.
        """
        metric = self.known_metric(metric)
        rows = []
        for variant, scores in self.scores(metric).items():
            runs = self.variants[variant]
            rows.append(_beside(variant, {
                "mean": float(np.mean(list(scores.values()))) if scores else math.nan,
                "sd": spread(scores),
                "seeds": len({seed for _, seed in scores}),
                **({"texts": len({text for text, _ in scores})} if len(self.texts) > 1 else {}),
                "diverged": sum(run.status == "diverged" for run in runs),
                **_sizes(runs[0]),
                "seconds": mean_seconds(runs),
            }))  # fmt: skip
        return _frame(rows).sort_values(
            "mean", ascending=self.sign(metric) > 0, ignore_index=True, kind="stable"
        )

    @functools.cached_property
    def texts(self) -> list[str]:
        """The texts, if variants were trained on several; else [""]."""
        return list(dict.fromkeys(map(self.text_of, self.runs))) or [""]

    @functools.cached_property
    def _text_fields(self) -> list[str]:
        """Fields of the data that differ between runs of one variant."""
        data = [[json.loads(data_of(run)) for run in runs] for runs in self.variants.values()]
        return sorted({name for some in data for name in differing(some)})

    def text_of(self, run: RunResult) -> str:
        """Which of `texts` a run was trained on: the fields of its data that differ between runs of
        one variant. A tokenizer that is swept is no such field."""
        data = json.loads(data_of(run))
        return ", ".join(f"{name}={data.get(name)!r}" for name in self._text_fields)

    def with_tags(self, tags: Mapping[str, Tag]) -> list[VariantKey]:
        """The variants that have these tags."""
        return [v for v in self.variants if all(dict(v).get(k) == w for k, w in tags.items())]

    def variant(self, tags: Mapping[str, Tag]) -> VariantKey:
        """The one variant that has these tags. Raises ValueError where none or several do."""
        fits = self.with_tags(tags)
        if len(fits) != 1:
            known = "; ".join(str(dict(v)) for v in self.variants)
            raise ValueError(f"{dict(tags)} names {len(fits)} variants; there are {known}")
        return fits[0]

    def compare(
        self,
        baseline: Mapping[str, Tag] | None = None,
        metric: str | None = None,
        *,
        pairs: Sequence[tuple[Mapping[str, Tag], Mapping[str, Tag]]] = (),
        margin: float = 0.0,
        seeds_added: bool = False,
        planned_seeds: Sequence[int] = (),
    ) -> "DataFrame":
        """One row a comparison: paired differences over the seeds that both variants have.

        Where all combinations of two or more tags were run, the first rows compare the values of a
        tag, averaged over the others (`over`); `least` and `most` are the lowest and the highest of
        the differences that are averaged. Then each variant is compared with the baseline.

        `difference` is the variant's mean less the baseline's, `low` and `high` its 95 % interval,
        `p` its two-sided p-value, `p_holm` that after Holm's correction among the rows with (or
        without) `over`, `method` the test (`attnlab.lab.stats.compare_pairs`). `conclusion` is
        "better" or "worse" where p_holm < 0.05; "equivalent" where the difference is within the
        margin, by a test that is corrected the same way (`p_equivalent`); else "inconclusive". With
        one text the intervals are over seeds alone, not over texts or learning rates.

        Args:
          baseline: tags of one variant, as many as are needed to name it; None: the first one. If
            all of its runs diverged, nothing is compared with it.
          metric: of the held-out part.
          pairs: (variant, baseline) by their tags, if only these are to be compared.
          margin: differences below it are of no interest.
          seeds_added: were seeds added after looking at the scores? Then the test holds at any
            time, however often one looked.
          planned_seeds: seeds that were fixed before; averages have these alone.

        Raises:
          ValueError: `baseline` names no variant, or several.
        """
        metric = self.known_metric(metric)
        scores = {variant: some for variant, some in self.scores(metric).items() if some}
        first = self.variant(baseline) if baseline else next(iter(self.variants))
        named = [(self.variant(a), self.variant(b)) for a, b in pairs]
        chosen = named or [(variant, first) for variant in scores if variant != first]
        chosen = [(a, b) for a, b in chosen if a in scores and b in scores]
        sign, found = self.sign(metric), []
        if len(scores) == len(self.variants):  # averages need every combination
            planned = {
                variant: {key: x for key, x in some.items() if key[1] in planned_seeds}
                for variant, some in scores.items()
            }
            found = average_effects(
                planned if planned_seeds else scores,
                reference=dict(first) | dict(baseline or {}),
                tags=[tag for a, b in pairs for tag in a if a[tag] != b.get(tag, a[tag])] or None,
                margin=margin,
                seeds_added=seeds_added and not planned_seeds,
                sign=sign,
            )
        found += compare_pairs(scores, chosen, margin=margin, seeds_added=seeds_added, sign=sign)
        return _frame([_row(one, self.labels) for one in found], columns=list(COLUMNS))

    def known_metric(self, metric: str | None) -> str:
        """The metric, or the main one for None. Raises ValueError where no run has it."""
        metric = metric or self.metric
        known = sorted({name for run in self.runs for name in run.scores.heldout})
        if not known:
            raise ValueError(
                f"no run has a held-out score: of {counted(len(self.runs), 'run')}, "
                f"{sum(run.status == 'diverged' for run in self.runs)} diverged"
            )
        if metric not in known:
            raise ValueError(f"no run has the metric {metric!r}; known: {', '.join(known)}")
        return metric

    def _repr_html_(self) -> str | None:
        if not any(run.scores.heldout for run in self.runs):
            return None  # notebooks then show the repr
        shown: str = self.table().round(3).to_html(index=False, na_rep="–")
        return shown

    def __repr__(self) -> str:
        return (
            f"Results of {counted(len(self.runs), 'run')}, {counted(len(self.variants), 'variant')}"
        )


def label_of(tags: Sequence[tuple[str, Tag]]) -> str:
    """Tags for people: values of texts, name=value of others; of a path the last name, where it is
    the only one.

    >>> label_of([("layout", "wide"), ("model.heads.num_heads", 4)])
    'wide, num_heads=4'
    """
    last = [name.rpartition(".")[2] for name, _ in tags]
    words = [
        v if isinstance(v, str) else f"{short if last.count(short) == 1 else n}={_short(v)}"
        for (n, v), short in zip(tags, last, strict=True)
    ]
    return ", ".join(words) or "run"


def data_of(run: RunResult) -> str:
    """What a run was trained on: its data config as JSON."""
    return json.dumps(run.spec.config.to_dict()["data"], sort_keys=True)


def config_fields(run: RunResult) -> dict[str, Tag]:
    """Path -> value of the config of a run without its data and seeds, and without the places of
    modules, which may move."""
    fields = run.spec.config.to_dict()
    del fields["data"], fields["train"]["seeds"]
    fields.pop(IMPORTS, None)
    return {field_path(path): as_tag(value) for path, value in flatten(fields).items()}


def mean_seconds(runs: Iterable[RunResult]) -> float:
    """Of the runs that are complete; NaN where none is. Others have stopped early."""
    seconds = [run.timing.seconds for run in runs if run.status == "complete"]
    return float(np.mean(seconds)) if seconds else math.nan


def planned_results(specs: Iterable[RunSpec]) -> Results:
    """Of runs that are still to come: their variants, without scores."""
    sizes = ModelSizes(parameters=0, applied_parameters=0, flops_per_token=0, ffn_width=0)
    return Results(
        RunResult(spec=spec, status="complete", scores=Scores(), sizes=sizes) for spec in specs
    )


def check_named(named: Iterable[Mapping[str, Tag]], specs: Iterable[RunSpec]) -> None:
    """Raises ValueError unless each of these tags will name one variant of the runs of `specs`."""
    planned = planned_results(specs)
    for tags in named:
        planned.variant(tags)


def _distinguish(runs: Sequence[RunResult]) -> list[VariantKey]:
    """For each run of equal tags, the config fields that tell it from others on the same text."""
    configs, texts = [config_fields(run) for run in runs], [data_of(run) for run in runs]
    varied: dict[str, None] = {}
    for text in dict.fromkeys(texts):
        same = [config for config, other in zip(configs, texts, strict=True) if other == text]
        varied |= dict.fromkeys(differing(same))
    found: list[VariantKey] = [() for _ in runs]
    for name in varied:
        more = [(*old, (name, one.get(name))) for old, one in zip(found, configs, strict=True)]
        if len(set(map(repr, more))) > len(set(map(repr, found))):  # it splits further
            found = more
    return found


def _frame(rows: Sequence[object], **options: list[str]) -> "DataFrame":
    with extra("lab"):
        import pandas
    return pandas.DataFrame(rows, **options)


def _short(value: Tag) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(one: Comparison, labels: Mapping[VariantKey, str]) -> tuple[object, ...]:
    """`COLUMNS` of a comparison."""
    d, name = one.difference, label_of if one.over else labels.__getitem__
    least, most = min(one.single, default=math.nan), max(one.single, default=math.nan)
    return (
        name(one.variant), name(one.baseline), " and ".join(one.over), d.mean, d.low, d.high,
        one.p_holm, one.conclusion, d.p, one.p_equivalent, least, most, d.count, one.texts, d.df,
        d.method,
    )  # fmt: skip


def spread(scores: SeedScores) -> float:
    """Standard deviation over seeds: within texts, where there are several. NaN where no text has
    two seeds."""
    texts: dict[str, list[float]] = {}
    for (text, _), score in scores.items():
        texts.setdefault(text, []).append(score)
    squares = sum(float(np.var(some)) * len(some) for some in texts.values())
    return math.sqrt(squares / df) if (df := len(scores) - len(texts)) else math.nan


def _flat(run: RunResult) -> dict[str, Tag]:
    found: dict[str, Tag] = {
        f"{part}_{name}": value
        for part in ("heldout", "train", "validation")
        for name, value in getattr(run.scores, part).items()
    }
    found |= _sizes(run) | dataclasses.asdict(run.timing)
    head: dict[str, Tag] = {"id": run.spec.id, "seed": run.spec.seed, "status": run.status}
    rate = {"learning_rate": run.spec.config.train.optimizer.learning_rate}
    return head | rate | _beside(run.spec.tags.items(), head | found)


def _beside(tags: Iterable[tuple[str, Tag]], columns: Mapping[str, Tag]) -> dict[str, Tag]:
    """The tags, then the columns; a tag with the name of a column is "name (tag)"."""
    return {f"{n} (tag)" if n in columns else n: v for n, v in tags} | dict(columns)


def _sizes(run: RunResult) -> dict[str, Tag]:
    names = ("parameters", "applied_parameters", "flops_per_token", "ffn_width")
    return {name: getattr(run.sizes, name) for name in names}
