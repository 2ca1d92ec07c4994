"""Policies: functions of results that propose further runs, for `sweep(..., policy=...)`."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from attnlab.extras import extra
from attnlab.lab.result import RunResult
from attnlab.lab.results import LEVEL, Results
from attnlab.lab.spec import RunSpec, Tag, with_values

RATE = "learning_rate"


@dataclasses.dataclass(frozen=True)
class AddSeeds:
    """One more seed for every variant until the mean of each is known well enough.

    Looking at results and adding seeds until they please makes intervals of a fixed number of seeds
    too narrow; here only the width of intervals decides, never their place.

    Attributes:
      half_width: largest half of a 95 % interval of a variant's mean.
      most: seeds of a variant.
    """

    half_width: float
    most: int = 10

    def __call__(self, results: Results) -> list[RunSpec]:
        """A further seed of each variant, none when all are known well enough."""
        with extra("train"):
            from scipy import stats
        wide, proposed = False, []
        for runs in results.by_variant().values():
            scores = np.array([r.heldout[results.metric] for r in runs if r.heldout])
            count = len(runs)
            if count >= self.most:
                continue
            if len(scores) > 1:
                t = stats.t.ppf((1 + LEVEL) / 2, len(scores) - 1)
                wide |= bool(t * scores.std(ddof=1) / len(scores) ** 0.5 > self.half_width)
            else:
                wide = True
            proposed.append(_with_seed(runs[0].spec, max(r.spec.seed for r in runs) + 1))
        return proposed if wide else []


@dataclasses.dataclass(frozen=True)
class TuneLearningRate:
    """Runs each variant at learning rates further out until the best one lies between two others.

    The scores are those of the validation part, so the held-out part judges nothing here; the data
    need one (`Text(validation=0.1)`). Each run has its rate as the tag "learning_rate".

    Attributes:
      factor: between two rates.
      most: rates of a variant.
    """

    factor: float = 3**0.5
    most: int = 9

    def __call__(self, results: Results) -> list[RunSpec]:
        """Rates that the variants need."""
        proposed: list[RunSpec] = []
        for runs in _without_rate(results).values():
            scores = {run.spec.config.train.learning_rate: run.validation for run in runs}
            if not any(scores.values()):
                raise ValueError("no validation scores; give the data a validation part")
            rates = sorted(scores)
            losses = [scores[rate].get("loss", np.inf) for rate in rates]
            best, one = int(np.argmin(losses)), runs[0].spec
            if len(rates) >= self.most:
                continue
            if best == 0:
                proposed.append(with_rate(one, rates[0] / self.factor))
            if best == len(rates) - 1:
                proposed.append(with_rate(one, rates[-1] * self.factor))
        return proposed


def best_rates(results: Results) -> dict[tuple[tuple[str, Tag], ...], float]:
    """Variant (its tags without the rate) -> the learning rate with the lowest validation loss."""
    found = {}
    for variant, runs in _without_rate(results).items():
        best = min(runs, key=lambda run: run.validation.get("loss", np.inf))
        found[variant] = best.spec.config.train.learning_rate
    return found


def with_rate(spec: RunSpec, rate: float) -> RunSpec:
    """The run at another learning rate (3 digits), which is one of its tags."""
    rate = float(f"{rate:.3g}")
    final = spec.config.train.final_learning_rate / spec.config.train.learning_rate * rate
    values = {"train.learning_rate": rate, "train.final_learning_rate": final}
    name = "-".join(part for part in spec.id.split("-") if not part.startswith("rate"))
    config = with_values(spec.config, values)
    return RunSpec(f"{name}-rate{rate:g}", config, spec.seed, {**spec.tags, RATE: rate})


def with_rates(specs: Sequence[RunSpec], rates: Sequence[float]) -> list[RunSpec]:
    """Each run at each of the rates."""
    return [with_rate(spec, rate) for spec in specs for rate in rates]


def _with_seed(spec: RunSpec, seed: int) -> RunSpec:
    stem = spec.id.removesuffix(f"-seed{spec.seed}")
    return dataclasses.replace(spec, id=f"{stem}-seed{seed}", seed=seed)


def _without_rate(results: Results) -> dict[tuple[tuple[str, Tag], ...], list[RunResult]]:
    found: dict[tuple[tuple[str, Tag], ...], list[RunResult]] = {}
    for run in results:
        tags = tuple((name, value) for name, value in run.spec.tags.items() if name != RATE)
        found.setdefault(tags, []).append(run)
    return found
