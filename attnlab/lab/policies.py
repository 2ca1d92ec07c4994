"""Policies: functions of results that propose further runs, for `sweep(..., policy=...)`; and what
they choose."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from attnlab.lab.experiment import Experiment
from attnlab.lab.result import RunResult
from attnlab.lab.results import Results, data_of
from attnlab.lab.spec import RunSpec, Tag, with_values
from attnlab.lab.stats import (
    Variant,
    best_rate,
    compare_pairs,
    more_seeds_may_decide,
    paired_difference,
)

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

        lab.sweep(specs, "runs/layouts", policy=lab.AddSeeds(half_width=0.01, most=8))
    """

    half_width: float
    most: int = 10

    def __call__(self, results: Results) -> list[RunSpec]:
        """A further seed of each variant, none when all are known well enough."""
        some = [runs for runs in results.by_variant().values() if _num_seeds(runs) < self.most]
        scores = [[r.scores.heldout[results.metric] for r in runs if r.scores.heldout]
                  for runs in some]  # fmt: skip
        if not any(self._is_wide(one) for one in scores):
            return []
        return [spec for runs in some for spec in _further_seeds(runs, 1)]

    def _is_wide(self, scores: Sequence[float]) -> bool:
        found = paired_difference(scores)
        return not found.high - found.mean <= self.half_width  # NaN of one score too


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
      pairs: the comparisons, one family for Holm's correction; empty: every two variants.
      most: seeds of a variant.
      margin: equivalence margin; 0: none.
      step: seeds that are added at once.
    """

    pairs: Pairs = ()
    most: int = 12
    margin: float = 0.0
    step: int = 3

    def __call__(self, results: Results) -> list[RunSpec]:
        """Further seeds of the variants of undecided comparisons."""
        variants = results.by_variant()
        chosen = [variants[variant] for variant in self._undecided(results)]
        counts = [min(self.step, self.most - _num_seeds(runs)) for runs in chosen]
        new = [_further_seeds(runs, n) for runs, n in zip(chosen, counts, strict=True)]
        return list({spec.id: spec for specs in new for spec in specs}.values())

    def _undecided(self, results: Results) -> list[Variant]:
        """The variants of comparisons that more seeds may decide."""
        scores = results.scores()
        whole = [v for v, runs in results.by_variant().items() if len(scores[v]) == len(runs)]
        given = [(results.variant(a), results.variant(b)) for a, b in self.pairs]
        pairs = given or [(a, b) for i, b in enumerate(whole) for a in whole[i + 1 :]]
        pairs = [(a, b) for a, b in pairs if a in whole and b in whole]
        found = compare_pairs(scores, pairs, margin=self.margin, seeds_added=True)
        open_: dict[Variant, None] = {}
        for one in found:
            both = sorted(set(scores[one.variant]) & set(scores[one.baseline]))
            gaps = [scores[one.variant][key] - scores[one.baseline][key] for key in both]
            if one.conclusion == "inconclusive" and more_seeds_may_decide(
                gaps, self.most * max(one.texts, 1), self.margin, len(found)
            ):
                open_ |= {one.variant: None, one.baseline: None}
        return list(open_)


@dataclasses.dataclass(frozen=True)
class TuneLearningRate:
    """Runs each variant at learning rates further out until the best one lies between two others.

    The scores are those of the main metric on the validation part, so the held-out part judges
    nothing here; the data need one (`Text(validation=0.1)`). Each run has its rate as the tag
    "learning_rate". Between the best rate and a neighbour that diverged the one half-way is tried.

    Attributes:
      factor: between two rates.
      most: rates of a variant.

        base = lab.Experiment(data=Text(validation=0.1))
        specs = lab.product(base, layout=["standard", "wide"], seeds=[1000])
        tried = lab.sweep(
            lab.with_rates(specs, [0.003, 0.006]), "runs/tuning", policy=lab.TuneLearningRate()
        )
        lab.best_rates(tried)  # {(("layout", "standard"),): 0.0047, ...}
    """

    factor: float = FACTOR
    most: int = MOST_RATES

    def __call__(self, results: Results) -> list[RunSpec]:
        """Rates that the variants need."""
        proposed: list[RunSpec] = []
        for runs in _without_rate(results).values():
            tried = _tried(results, runs, results.metric)
            rate = next_rate(tried, self.factor)
            if rate is not None and len(tried) < self.most:
                proposed.append(with_rate(runs[0].spec, rate))
        return proposed


def next_rate(tried: Mapping[float, float], factor: float = FACTOR) -> float | None:
    """The rate to try next so that the best lies between two others; None where it does.

    Args:
      tried: rate -> score, lower is better, infinite where the run diverged.
      factor: how far beyond the end where the best is.

    >>> next_rate({0.5: 3.0, 1.0: 2.0}), next_rate({0.5: 3.0, 1.0: 2.0, 2.0: 2.5})
    (2.0, None)
    """
    rates = sorted(tried)
    best = min(rates, key=tried.__getitem__)
    at = rates.index(best)
    if math.isinf(tried[best]) or at == 0:
        return rates[0] / factor
    if at == len(rates) - 1:
        return rates[-1] * factor
    if math.isinf(tried[rates[at + 1]]):
        return math.sqrt(best * rates[at + 1])
    return None


def tried_rates(results: Results, metric: str) -> dict[Variant, dict[float, float]]:
    """Variant (its tags without the rate) -> rate -> mean validation score, the lower the better;
    infinite where a run diverged."""
    return {v: _tried(results, runs, metric) for v, runs in _without_rate(results).items()}


def _tried(results: Results, runs: Sequence[RunResult], metric: str) -> dict[float, float]:
    found: dict[float, list[float]] = {}
    for run in runs:
        if run.status == "complete" and not run.scores.validation:
            raise ValueError(
                "no validation scores; give the data a validation part (--config.data.validation "
                "=0.1)"
            )
        score = results.sign(metric) * run.scores.validation.get(metric, math.nan)
        score = score if math.isfinite(score) else math.inf
        found.setdefault(run.spec.config.train.optimizer.learning_rate, []).append(score)
    return {rate: float(np.mean(scores)) for rate, scores in found.items()}


def best_rates(results: Results) -> dict[Variant, float]:
    """Variant (its tags without the rate) -> its best learning rate, where one was found.

    That is the lowest point of a parabola through the best rates (`statistics.best_rate`), or the
    best that was tried where there is none between rates that were tried.

    Args:
      results: of runs whose learning rate is the tag "learning_rate", as `with_rates` makes them.

        for variant, rate in best_rates(load_results("runs/tuning")).items():
            print(dict(variant), rate)
    """
    found = {}
    for variant, tried in tried_rates(results, results.metric).items():
        fitted = best_rate(tried)
        inside = fitted and min(tried) <= fitted.rate <= max(tried)
        best = min(tried, key=tried.__getitem__)
        if math.isfinite(tried[best]):
            found[variant] = fitted.rate if fitted and inside else best
    return found


def tuning_seed(seeds: Sequence[int], most: int = 0) -> int:
    """A seed for the runs that choose learning rates, which none of the judged runs has.

    Args:
      seeds: of the judged runs.
      most: seeds that a variant may have after seeds were added.

    >>> tuning_seed([0, 1, 2]), tuning_seed([999, 1000])
    (1000, 1001)
    """
    last = max(seeds)
    return max(TUNING_SEED, last + max(most - len(set(seeds)), 0) + 1)


def first_rates(middle: float, count: int, factor: float = FACTOR) -> list[float]:
    """So many rates around the middle one, each `factor` times the one before.

    >>> first_rates(0.01, 3)
    [0.005, 0.01, 0.02]
    """
    return [middle * factor**k for k in range(-(count // 2), count - count // 2)]


def tuning_specs(specs: Sequence[RunSpec], count: int, most_seeds: int = 0) -> list[RunSpec]:
    """The runs that begin to choose a learning rate for each variant of `specs`.

    Args:
      specs: the runs that will be judged.
      count: rates of each variant, around its own.
      most_seeds: seeds that a variant may have after seeds were added.

    Raises:
      ValueError: fewer than 3 rates, or two variants have the same tags.
    """
    if count < 3:
        raise ValueError(f"--tune={count}: give at least 3 learning rates, which a parabola needs")
    seed = tuning_seed([spec.seed for spec in specs], most_seeds)
    first: dict[Variant, RunSpec] = {}
    for spec in specs:
        one = first.setdefault(tuple(spec.tags.items()), spec)
        if _with_seed(one, 0).digest != _with_seed(spec, 0).digest:
            raise ValueError(
                f"{one.id!r} and {spec.id!r} have the tags {dict(spec.tags)} and different "
                "configs; give them different tags"
            )
    found = []
    for spec in first.values():
        rates = first_rates(spec.config.train.optimizer.learning_rate, count)
        found += [with_rate(_with_seed(spec, seed), rate) for rate in rates]
    return found


def at_rates(specs: Sequence[RunSpec], rates: Mapping[Variant, float]) -> list[RunSpec]:
    """The specs, each at the learning rate of its variant; those of variants without one are left
    out."""
    known = [(spec, rates.get(tuple(spec.tags.items()))) for spec in specs]
    return [
        dataclasses.replace(spec, config=_at_rate(spec, rate))
        for spec, rate in known
        if rate is not None
    ]


def _at_rate(spec: RunSpec, rate: float) -> Experiment:
    """With the `final_learning_rate` of its schedule in proportion."""
    train = spec.config.train
    final = train.schedule.final_learning_rate * rate / train.optimizer.learning_rate
    values = {FIRST_RATE: rate, FINAL_RATE: final}
    return with_values(spec.config, values)


def with_rate(spec: RunSpec, rate: float) -> RunSpec:
    """The run at another learning rate (4 digits), which is one of its tags and ends its id."""
    rate = float(f"{rate:.4g}")
    stem = spec.id
    if RATE in spec.tags:
        stem = stem.removesuffix(f"-rate{spec.tags[RATE]:g}")
    return RunSpec(
        f"{stem}-rate{rate:g}", _at_rate(spec, rate), spec.seed, {**spec.tags, RATE: rate}
    )


def with_rates(specs: Sequence[RunSpec], rates: Sequence[float]) -> list[RunSpec]:
    """Each run at each of the rates.

    Args:
      specs: runs.
      rates: learning rates; the final one of the schedule is scaled alike.

    Returns:
      A spec for each run and rate, with the rate in its id and as the tag "learning_rate".

    >>> [spec.id for spec in with_rates([RunSpec("wide", Experiment())], [0.001, 0.01])]
    ['wide-rate0.001', 'wide-rate0.01']
    """
    return [with_rate(spec, rate) for spec in specs for rate in rates]


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


def _without_rate(results: Results) -> dict[Variant, list[RunResult]]:
    found: dict[Variant, list[RunResult]] = {}
    for run in results:
        found.setdefault(variant_without_rate(run.spec), []).append(run)
    return found


def variant_without_rate(spec: RunSpec) -> Variant:
    """The tags of a run but its learning rate."""
    return tuple((name, value) for name, value in spec.tags.items() if name != RATE)
