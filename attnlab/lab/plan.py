"""`run_plan`: a sweep with its questions: learning rates are chosen, and seeds are added."""

import csv
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attnlab.lab.description import Description, read_description
from attnlab.lab.executors import Executor
from attnlab.lab.policies import (
    TUNING,
    DecideComparisons,
    TuneLearningRate,
    at_rates,
    best_rates,
    tuning_specs,
    variant_without_rate,
)
from attnlab.lab.results import Results
from attnlab.lab.spec import RunSpec, Tag
from attnlab.lab.stats import Variant
from attnlab.lab.sweep import SweepFailed, check_specs, load_results, specs_in, sweep
from attnlab.load import SPECS

REPORT = "report.html"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a sweep is to run and to decide.

    Attributes:
      specs: the runs whose seeds were planned.
      description: question, comparisons, margin.
      tune: learning rates of each variant that are tried first; 0: none.
      rates_from: a sweep that chose learning rates, or a table of one; None: none.
      most_seeds: seeds are added to undecided comparisons up to so many of a variant; 0: none.
    """

    specs: Sequence[RunSpec]
    description: Description = Description()
    tune: int = 0
    rates_from: Path | None = None
    most_seeds: int = 0

    def __post_init__(self) -> None:
        if self.tune and self.rates_from:
            raise ValueError(
                "--tune chooses learning rates and --tune_from reads chosen ones; leave one out"
            )
        if self.tune:
            tuning_specs(self.specs, self.tune)
            for spec in self.specs:
                if not getattr(spec.config.data, "validation", True):
                    raise ValueError(
                        f"--tune chooses learning rates on a validation part, and the data of "
                        f"{spec.id} have none: give a text one by --config.data.validation=0.1"
                    )


def run_plan(
    plan: Plan, workdir: Path, executor: Executor, *, progress: bool = True, waits: bool = True
) -> Results:
    """Chooses learning rates, runs all, adds seeds.

    Args:
      plan: what to run.
      workdir: of the sweep; the runs that choose rates are a sweep of their own in `tuning`.
      executor, progress, waits: as of `sweep`.

    Raises:
      Exceptions of `sweep`. Where a run of the tuning failed, its variant is left out and
      SweepFailed is raised when the others are complete.
      ValueError: no learning rate is known for a variant.
    """
    specs, failure = list(plan.specs), None
    if plan.rates_from:
        specs = with_known_rates(specs, plan.rates_from)
    if plan.tune:
        _check_before_tuning(specs, workdir)
    else:
        check_specs(specs, specs_in(workdir), workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    described(plan, workdir).write(workdir)
    if plan.tune:
        first = tuning_specs(specs, plan.tune, plan.most_seeds)
        call = functools.partial(
            sweep, workdir=workdir / TUNING, executor=executor, policy=TuneLearningRate(),
            progress=progress, waits=waits,
        )  # fmt: skip
        tuned, failure = _tune(first, call)
        specs = at_rates(specs, best_rates(tuned))
    more = None
    if plan.most_seeds:
        about = plan.description
        more = DecideComparisons(about.pairs, plan.most_seeds, about.margin)
    results = sweep(specs, workdir, executor=executor, policy=more, progress=progress, waits=waits)
    if failure:
        raise failure
    return results


def described(plan: Plan, workdir: Path) -> Description:
    """The description of a plan. Seeds that the workdir gets after its report was written count as
    added, whether a policy or a person added them."""
    there = {spec.seed for spec in specs_in(workdir).values()}
    if not (workdir / REPORT).exists() or not there:
        return plan.description
    planned = read_description(workdir).planned_seeds or tuple(sorted(there))
    if there | {spec.seed for spec in plan.specs} <= set(planned):
        return plan.description
    return dataclasses.replace(plan.description, seeds_added=True, planned_seeds=planned)


def _check_before_tuning(specs: Sequence[RunSpec], workdir: Path) -> None:
    """Raises ValueError where runs of the workdir are others, whatever their rates will be."""
    there = specs_in(workdir)
    again = [spec for spec in specs if spec.id in there]
    if again and not (workdir / TUNING / SPECS).exists():
        raise ValueError(
            f"{workdir} has runs whose learning rates --tune did not choose, such as "
            f"{again[0].id!r}; use another workdir, or leave --tune out"
        )
    rates = {tuple(s.tags.items()): there[s.id].config.train.optimizer.learning_rate for s in again}
    check_specs(at_rates(again, rates), there, workdir)


def _tune(
    specs: list[RunSpec], call: Callable[[list[RunSpec]], Results]
) -> tuple[Results, SweepFailed | None]:
    """The results of the tuning without variants of which a run failed, and the first failure.

    Raises SweepFailed where no variant is left.
    """
    failure = None
    while True:
        try:
            return call(specs), failure
        except SweepFailed as error:
            failure = failure or error
            gone = [variant_without_rate(spec) for spec in error.specs]
            specs = [spec for spec in specs if variant_without_rate(spec) not in gone]
            if not specs:
                raise


def with_known_rates(specs: Sequence[RunSpec], source: Path) -> list[RunSpec]:
    """The specs at the learning rates that another sweep of the same variants chose.

    Args:
      specs: the runs.
      source: the workdir of that sweep, or its results.csv.

    Raises:
      ValueError: a variant has no rate there, or several.
    """
    if source.is_dir():
        if not (source / TUNING / SPECS).exists():
            raise ValueError(f"{source} has no chosen learning rates; run its sweep with --tune")
        rates = best_rates(load_results(source / TUNING))
    elif source.is_file():
        rates = _rates_of_table(specs, source)
    else:
        raise ValueError(f"{source} is neither the workdir of a sweep nor a results.csv")
    variants = dict.fromkeys(tuple(spec.tags.items()) for spec in specs)
    if missing := [variant for variant in variants if variant not in rates]:
        names = "; ".join(", ".join(str(value) for _, value in variant) for variant in missing)
        raise ValueError(f"{source} has no learning rate for {names}")
    return at_rates(specs, rates)


def _rates_of_table(specs: Sequence[RunSpec], source: Path) -> dict[Variant, float]:
    with source.open(newline="", encoding="utf-8-sig") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or "learning_rate" not in rows[0]:
        raise ValueError(f"{source} has no rows with a column learning_rate")
    found = {}
    for variant in dict.fromkeys(tuple(spec.tags.items()) for spec in specs):
        rates = {row["learning_rate"] for row in rows if _fits(row, variant)}
        if len(rates) > 1:
            name = ", ".join(str(value) for _, value in variant)
            raise ValueError(
                f"{source} has several learning rates for {name}: {', '.join(sorted(rates))}; "
                "keep the rows of one"
            )
        if rates:
            found[variant] = float(rates.pop())
    return found


def _fits(row: Mapping[str, str], variant: Sequence[tuple[str, Tag]]) -> bool:
    return all(row.get(f"{tag} (tag)", row.get(tag)) == str(value) for tag, value in variant)
