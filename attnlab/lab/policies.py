"""Policies for `sweep(..., policies=[...])`: they choose learning rates and add seeds."""

import csv
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np

from attnlab.lab.experiment import Experiment
from attnlab.lab.result import RunResult
from attnlab.lab.results import Results, data_of, planned_results
from attnlab.lab.spec import RunSpec, Tag, with_values
from attnlab.lab.stats import (
    LOOKS,
    VariantKey,
    best_rate,
    compare_pairs,
    more_seeds_may_decide,
    paired_difference,
)
from attnlab.lab.sweep import Run, load_results

RATE = "learning_rate"
FIRST_RATE = "train.optimizer.learning_rate"
FINAL_RATE = "train.schedule.final_learning_rate"
TUNING = "tuning"
"""Folder in a workdir for the sweep that chooses learning rates."""
TUNING_SEED = 1000
FACTOR = 2.0
"""Between two learning rates that are tried."""
MOST_RATES = 12
"""Learning rates of a variant that are tried at most."""


@dataclasses.dataclass(frozen=True)
class AddSeeds:
    """Adds a seed to every variant until the mean of each is known well enough.

    Only the width of intervals decides, never their place: adding seeds until the results please
    would make intervals of a fixed number of seeds too narrow. `DecideComparisons` adds seeds until
    comparisons are decided, with a test that allows it. (In simulated sweeps 95 % intervals after
    this policy hold the truth in 93.7 % to 95.1 %.)

    Attributes:
      half_width: largest half of a 95 % interval of a variant's mean.
      most: seeds of a variant.

        lab.sweep(specs, "runs/layouts", policies=[lab.AddSeeds(half_width=0.01, most=8)])
    """

    half_width: float
    most: int = 10

    def __call__(self, specs: Sequence[RunSpec], run: Run) -> list[RunSpec]:
        """The specs with the seeds that are added."""
        return run_proposed(specs, run, self.propose)

    def propose(self, results: Results) -> list[RunSpec]:
        """A further seed of each variant, none when all are known well enough."""
        few = [runs for runs in results.variants.values() if _num_seeds(runs) < self.most]
        metric = results.metric
        scores = [[run.scores.heldout for run in runs] for runs in few]
        found = [paired_difference([one[metric] for one in s if metric in one]) for s in scores]
        # The width is NaN of one score.
        if all(one.high - one.mean <= self.half_width for one in found):
            return []
        return [spec for runs in few for spec in _further_seeds(runs, 1)]


Pairs: TypeAlias = Sequence[tuple[Mapping[str, Tag], Mapping[str, Tag]]]
"""(variant, baseline), each by as many tags as are needed to name it."""


@dataclasses.dataclass(frozen=True)
class DecideComparisons:
    """Adds seeds to the variants of a comparison until it is significant, equivalent within the
    margin, or more seeds could not make it so.

    Unlike `AddSeeds` it reads the differences themselves, which makes the intervals of a fixed
    number of seeds too narrow: comparisons then need the test that holds at any time (`seeds_added`
    of `Description` and of `compare_pairs`).

    Attributes:
      pairs: the comparisons, one family for Holm's correction; empty: every two variants. Those of
        a variant that a policy before left out are left out, too.
      most: seeds of a variant.
      margin: equivalence margin; 0: none.
      step: seeds that are added at once; with several texts more, where there would be more than
        the 4 looks at scores that their p-values count.

    Raises (when it is called):
      ValueError: tags in `pairs` name several variants, or every pair has tags that name none.
    """

    pairs: Pairs = ()
    most: int = 12
    margin: float = 0.0
    step: int = 3
    reads_scores: ClassVar = True

    def __call__(self, specs: Sequence[RunSpec], run: Run) -> list[RunSpec]:
        """The specs with the seeds that are added."""
        known = planned_results(specs)
        pairs = [pair for pair in self.pairs if all(map(known.with_tags, pair))]
        for tags in itertools.chain(*(pairs or self.pairs)):
            known.variant(tags)  # raises
        step, planned = self.step, len({spec.seed for spec in specs})
        if len({repr(spec.config.data) for spec in specs}) > 1:  # p-values then count LOOKS
            step = max(step, math.ceil((self.most - planned) / (LOOKS - 1)))
        return run_proposed(specs, run, dataclasses.replace(self, step=step, pairs=pairs).propose)

    def propose(self, results: Results) -> list[RunSpec]:
        """Further seeds of the variants of undecided comparisons."""
        new: dict[str, RunSpec] = {}
        for variant in self._undecided(results):
            runs = results.variants[variant]
            count = min(self.step, self.most - _num_seeds(runs))
            new |= {spec.id: spec for spec in _further_seeds(runs, count)}
        return list(new.values())

    def _undecided(self, results: Results) -> list[VariantKey]:
        """The variants of comparisons that more seeds may decide."""
        scores = results.scores()
        whole = [v for v, runs in results.variants.items() if len(scores[v]) == len(runs)]
        given = [(results.variant(a), results.variant(b)) for a, b in self.pairs]
        pairs = given or [(a, b) for b, a in itertools.combinations(whole, 2)]
        pairs = [(a, b) for a, b in pairs if a in whole and b in whole]
        found = compare_pairs(scores, pairs, margin=self.margin, seeds_added=True)
        undecided: list[VariantKey] = []
        for one in found:
            a, b = scores[one.variant], scores[one.baseline]
            gaps, most = [a[key] - b[key] for key in a if key in b], self.most * max(one.texts, 1)
            if one.conclusion == "inconclusive" and more_seeds_may_decide(
                gaps, most, self.margin, len(found)
            ):
                undecided += [one.variant, one.baseline]
        return list(dict.fromkeys(undecided))


@dataclasses.dataclass(frozen=True)
class TuneLearningRate:
    """Chooses a learning rate for each variant: the wanted runs are those at the chosen rates.

    Each variant is run at rates around its own, then further out until the best one lies between
    two others; if the next rate above the best one diverged, the one half-way is tried. These
    runs are a sweep of their own in the folder `tuning` of the workdir, with a seed that no other
    run has and the rate as the tag "learning_rate". The scores are those of the main metric on the
    validation part, so the held-out part judges nothing here. A variant of which a run failed, or
    every run diverged, is left out.

    Attributes:
      count: rates that each variant begins with, 3 or more.
      most: rates of a variant.

    Raises (when it is called):
      ValueError: fewer than 3 rates, data without a validation part, two configs of the same
        tags, or a tag "learning_rate"; or every variant diverged at every rate.

        base = lab.Experiment(data=Text(validation=0.1))
        specs = lab.product(base, layout=["standard", "wide"])
        lab.sweep(specs, "runs/layouts", policies=[lab.TuneLearningRate()])
        lab.best_rates(lab.load_results("runs/layouts/tuning"))
    """

    count: int = 3
    most: int = MOST_RATES

    def __call__(self, specs: Sequence[RunSpec], run: Run) -> list[RunSpec]:
        """The specs, each at the rate of its variant."""
        tried = tuning_specs(specs, self.count)
        for spec in {repr(spec.config.data): spec for spec in specs}.values():
            data, length = spec.config.data, spec.config.train.length
            share = getattr(data, "validation", None)  # of data without the field, they are loaded
            if not (data.load(length).validation if share is None else share):
                raise ValueError(
                    f"the data of {spec.id!r} have no validation part, which tuning needs; use "
                    "data with one (Text by --config.data.validation=0.1), or do not tune"
                )
        while tried:
            results = run(tried, TUNING)
            complete = {result.spec.id for result in results}
            failed = {variant_without_rate(s) for s in tried if s.id not in complete}
            tried = [spec for spec in tried if variant_without_rate(spec) not in failed]
            further = [] if failed else self.propose(results)
            if not failed and not further:
                if not (rates := best_rates(results)):
                    raise ValueError(f"all {len(results)} tuning runs diverged; give lower rates")
                return at_rates(specs, rates)
            tried += further
        return []

    def propose(self, results: Results) -> list[RunSpec]:
        """Rates that the variants need."""
        specs = {variant_without_rate(run.spec): run.spec for run in reversed(results)}
        tried = tried_rates(results, results.metric)
        rates = {v: next_rate(some) for v, some in tried.items() if len(some) < self.most}
        return [with_rate(specs[v], rate) for v, rate in rates.items() if rate is not None]


def run_proposed(
    specs: Sequence[RunSpec], run: Run, propose: Callable[[Results], list[RunSpec]]
) -> list[RunSpec]:
    """Runs specs, and what is proposed after reading their results until that is nothing, or
    another process still has a run (`sweep(waits=False)`).

    Returns:
      All of them.
    """
    wanted = list(specs)
    while len(results := run(wanted)) == len(wanted) and (proposed := propose(results)):
        wanted += proposed
    return wanted


def next_rate(tried: Mapping[float, float]) -> float | None:
    """The rate to try next so that the best lies between two others; None where it does.

    Args:
      tried: rate -> score, lower is better, infinite where the run diverged.

    >>> next_rate({0.5: 3.0, 1.0: 2.0}), next_rate({0.5: 3.0, 1.0: 2.0, 2.0: 2.5})
    (2.0, None)
    """
    rates = sorted(tried)
    best = min(rates, key=tried.__getitem__)
    at = rates.index(best)
    if math.isinf(tried[best]) or at == 0:
        return rates[0] / FACTOR
    if at == len(rates) - 1:
        return rates[-1] * FACTOR
    if math.isinf(tried[rates[at + 1]]):
        return math.sqrt(best * rates[at + 1])
    return None


def tried_rates(results: Results, metric: str) -> dict[VariantKey, dict[float, float]]:
    """Variant (its tags without the rate) -> rate -> mean validation score, the lower the better;
    infinite where a run diverged."""
    found: dict[VariantKey, dict[float, list[float]]] = {}
    for run in results:
        if run.status == "complete" and not run.scores.validation:
            raise ValueError(
                f"{run.spec.id} has no validation scores, by which rates are chosen; train it on "
                "data with a validation part"
            )
        score = results.sign(metric) * run.scores.validation.get(metric, math.nan)
        tried = found.setdefault(variant_without_rate(run.spec), {})
        rate = run.spec.config.train.optimizer.learning_rate
        tried.setdefault(rate, []).append(score if math.isfinite(score) else math.inf)
    return {
        variant: {rate: float(np.mean(scores)) for rate, scores in tried.items()}
        for variant, tried in found.items()
    }


def best_rates(results: Results) -> dict[VariantKey, float]:
    """Variant (its tags without the rate) -> its best learning rate, where one was found.

    See `attnlab.lab.stats.best_rate`: the lowest point of a parabola, or the best that was tried.

    Args:
      results: of runs whose learning rate is the tag "learning_rate", as `with_rate` makes them.

        for variant, rate in best_rates(load_results("runs/tuning")).items():
            print(dict(variant), rate)
    """
    tried = tried_rates(results, results.metric)
    best = {variant: best_rate(scores) for variant, scores in tried.items()}
    return {variant: found.rate for variant, found in best.items() if found}


def tuning_seed(seeds: Sequence[int]) -> int:
    """A seed for the runs that choose learning rates. It is at least 500 above those of the judged
    runs, which may become more.

    >>> tuning_seed([0, 1, 2]), tuning_seed([999])
    (1000, 1998)
    """
    last = max(seeds)
    return TUNING_SEED if 2 * last < TUNING_SEED else 2 * last


def tuning_specs(specs: Sequence[RunSpec], count: int) -> list[RunSpec]:
    """The runs that begin to choose a learning rate for each variant of `specs`.

    Args:
      specs: the runs that will be judged.
      count: rates of each variant, around its own.

    Raises:
      ValueError: as of `TuneLearningRate`.
    """
    if count < 3:
        raise ValueError(f"--tune={count}: give at least 3 learning rates, which a parabola needs")
    seed = tuning_seed([spec.seed for spec in specs])
    first: dict[VariantKey, RunSpec] = {}
    for spec in specs:
        if RATE in spec.tags:
            raise ValueError(f"{spec.id!r} has the tag {RATE!r}, which tuning sets; leave one out")
        one = first.setdefault(tuple(spec.tags.items()), spec)
        if _with_seed(one, 0).digest != _with_seed(spec, 0).digest:
            raise ValueError(
                f"{one.id!r} and {spec.id!r} have the tags {dict(spec.tags)} and different "
                "configs; give them different tags"
            )
    factors = [FACTOR**k for k in range(-(count // 2), count - count // 2)]
    return [
        with_rate(_with_seed(spec, seed), spec.config.train.optimizer.learning_rate * factor)
        for spec in first.values()
        for factor in factors
    ]


def at_rates(specs: Sequence[RunSpec], rates: Mapping[VariantKey, float]) -> list[RunSpec]:
    """The specs, each at the learning rate of its variant; those of variants without one are left
    out."""
    return [
        dataclasses.replace(spec, config=_at_rate(spec, rates[variant]))
        for spec in specs
        if (variant := tuple(spec.tags.items())) in rates
    ]


def _at_rate(spec: RunSpec, rate: float) -> Experiment:
    """With the `final_learning_rate` of its schedule in proportion."""
    train = spec.config.train
    final = train.schedule.final_learning_rate * rate / train.optimizer.learning_rate
    values = {FIRST_RATE: rate, FINAL_RATE: final}
    return with_values(spec.config, values)


def with_rate(spec: RunSpec, rate: float) -> RunSpec:
    """The run at another learning rate (4 digits), which is its tag "learning_rate" and ends its
    id; the final one of the schedule is scaled alike.

    >>> with_rate(RunSpec("wide", Experiment()), 0.01).id
    'wide-rate0.01'
    """
    rate = float(f"{rate:.4g}")
    stem = spec.id
    if RATE in spec.tags:
        stem = stem.removesuffix(f"-rate{spec.tags[RATE]:g}")
    return RunSpec(
        f"{stem}-rate{rate:g}", _at_rate(spec, rate), spec.seed, {**spec.tags, RATE: rate}
    )


def with_known_rates(specs: Sequence[RunSpec], source: Path) -> list[RunSpec]:
    """The specs at the learning rates that another sweep of the same variants chose.

    Args:
      specs: the runs.
      source: the workdir of that sweep, or its results.csv.

    Raises:
      ValueError: a variant has no rate there, or several; or the workdir was not tuned.
      FileNotFoundError: there is no such table.
    """
    known = best_rates(load_results(source / TUNING)) if source.is_dir() else {}
    text = "" if source.is_dir() else source.read_text(encoding="utf-8-sig")
    table = list(csv.DictReader(text.splitlines()))
    rates = {}
    for variant in dict.fromkeys(tuple(spec.tags.items()) for spec in specs):
        found = {known[variant]} if variant in known else _rates_in(table, variant)
        if len(found) != 1:
            name = ", ".join(str(value) for _, value in variant)
            listed = ", ".join(map(str, sorted(found))) or "none"
            raise ValueError(f"{source} must have one learning rate for {name}, and has {listed}")
        rates[variant] = found.pop()
    return at_rates(specs, rates)


def _rates_in(table: Sequence[Mapping[str, str]], variant: VariantKey) -> set[float]:
    """Of the rows that have the tags of a variant."""
    return {
        float(row[RATE])
        for row in table
        if row.get(RATE)
        and all(_cell(row.get(f"{name} (tag)", row.get(name))) == _cell(v) for name, v in variant)
    }


def _cell(value: Tag) -> str:
    """A tag as tables have it: nothing for None; 4.0 and 4 are the same."""
    return "" if value is None else str(value).removesuffix(".0")


def _further_seeds(runs: Sequence[RunResult], count: int) -> list[RunSpec]:
    """The next seeds of a variant, on each of its texts."""
    first = max(run.spec.seed for run in runs) + 1
    specs = {data_of(run): run.spec for run in reversed(runs)}  # the first of each text
    return [_with_seed(s, seed) for seed in range(first, first + count) for s in specs.values()]


def _num_seeds(runs: Sequence[RunResult]) -> int:
    return len({run.spec.seed for run in runs})


def _with_seed(spec: RunSpec, seed: int) -> RunSpec:
    stem = spec.id.removesuffix(f"seed{spec.seed}").removesuffix("-")
    return dataclasses.replace(spec, id=f"{stem}-seed{seed}" if stem else f"seed{seed}", seed=seed)


def variant_without_rate(spec: RunSpec) -> VariantKey:
    """The tags of a run but its learning rate."""
    return tuple((name, value) for name, value in spec.tags.items() if name != RATE)
