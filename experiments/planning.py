"""The flags of `experiments.sweep` as a plan and an executor of the lab."""

import ast
import dataclasses
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from attnlab import lab
from attnlab.lab.executors import worker_command
from attnlab.lab.machine import write_threads
from attnlab.lab.policies import with_known_rates
from attnlab.lab.spec import specs_of
from attnlab.lab.sweep import REPORT, Policy, add_specs, described
from attnlab.lab.worker import forward_flops
from attnlab.models import num_parameters
from attnlab.report.tables import PASSES
from experiments import app
from experiments.benchmarks.peaks import PEAKS
from experiments.setup import setup_of

EXAMPLE, SHARE = "NVIDIA H100 80GB HBM3", 0.3
"""A device, and the share of its peak that is assumed."""


def parse_variants(lines: list[str]) -> list[lab.Variant]:
    """The combinations of `--vary` lines.

    >>> [variant.id for variant in parse_variants(["train.steps=10,20"])]
    ['10', '20']
    """
    found: dict[str, list[object]] = {}
    for line in lines:
        path, equals, values = line.partition("=")
        if not (path and equals and values):
            raise ValueError(f"--vary={line}: write FIELD=VALUE,VALUE,...")
        if path in found:
            raise ValueError(f"--vary={path}=... is given twice; write all its values in one")
        found[path] = [_literal(value) for value in values.split(",")]
    return lab.grid(**found)


def _literal(text: str) -> object:
    """A Python value; what is none is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class Plan(NamedTuple):
    """What the flags want `lab.sweep` to run."""

    specs: list[lab.RunSpec]
    description: lab.Description
    policies: list[Policy]


def plan_of() -> Plan:
    """The plan that the flags describe.

    Raises:
      ValueError: there is nothing to run, or flags do not go together.
    """
    given = flags.FLAGS
    path, preset = app.config_file()
    vary = parse_variants(given.vary) if given.vary else None
    setup = setup_of(app.config(), app.config_module(), preset, vary, app.overrides())
    if not setup.variants:
        raise ValueError(
            f"{path} has no variants; give some by --vary=FIELD=VALUE,VALUE, or use "
            "experiments.run for one model"
        )
    seeds = _seeds() or list(setup.seeds)
    _check_flags(len(seeds))
    specs = specs_of(setup.base, setup.variants, seeds, setup.match)
    if given.tune_from:
        specs = with_known_rates(specs, Path(given.tune_from))
    about = setup.description
    about = dataclasses.replace(about, margin=given.margin or about.margin)
    policies: list[Policy] = []
    if given.tune:
        policies.append(lab.TuneLearningRate(given.tune))
    if given.max_seeds:
        policies.append(lab.DecideComparisons(about.pairs, given.max_seeds, about.margin))
    return Plan(specs, about, policies)


def _seeds() -> list[int]:
    """Those of --seeds."""
    try:
        return [int(seed) for seed in flags.FLAGS.seeds]
    except ValueError:
        given = ",".join(flags.FLAGS.seeds)
        raise ValueError(f"--seeds={given}: write whole numbers with commas, as 0,1,2") from None


def _check_flags(seeds: int) -> None:
    given = flags.FLAGS
    if 0 < given.max_seeds <= seeds:
        raise ValueError(
            f"--max_seeds={given.max_seeds} adds no seed to the {seeds} that each variant has; "
            "give more, or leave it out"
        )
    if not math.isfinite(given.margin):
        raise ValueError(f"--margin={given.margin}: give a number of the unit of the scores")
    if given.tune and given.tune_from:
        raise ValueError(
            "--tune chooses learning rates and --tune_from reads chosen ones; leave one out"
        )
    if given.print_only and given.launcher == "local" and (given.tune or given.max_seeds):
        raise ValueError(
            "--tune and --max_seeds read results, which --print_only has not; leave them out "
            "(--tune_from takes learning rates that are known), or add --launcher=slurm"
        )
    if given.slurm and given.launcher != "slurm":
        raise ValueError("--slurm are options of sbatch; add --launcher=slurm")


def executor() -> lab.Executor:
    """Where the flags want the runs to be computed."""
    given = flags.FLAGS
    options = _run_options()
    if given.launcher == "local":
        return lab.LocalExecutor(given.jobs, given.threads, options, app.jax_flags())
    return lab.SlurmExecutor(
        given.jobs,
        given.slurm,
        run_options=options,
        environment=app.jax_flags(),
        threads=given.threads,
        mode="write" if given.print_only else "submit",
    )


def _run_options() -> lab.RunOptions:
    given = flags.FLAGS
    return lab.RunOptions(loggers=tuple(given.loggers), profile=given.profile)


def training_flops(specs: Sequence[lab.RunSpec]) -> int:
    """Of all runs: three forward passes of each token."""
    return sum(PASSES * forward_flops(spec.config) for spec in specs)


def header(plan: Plan, folder: Path) -> str:
    """What is about to run: a line for each variant."""
    first: dict[str, lab.RunSpec] = {}
    for spec in plan.specs:
        first.setdefault(spec.title, spec)
    lines = [
        f"  {title}: {num_parameters(spec.config.model):,} parameters"
        for title, spec in first.items()
    ]
    flops = training_flops(plan.specs)
    title = f"{len(plan.specs)} runs of {len(first)} variants, {flops:.2e} FLOPs, in {folder}"
    return "\n".join([title, *lines])


def print_workers(plan: Plan, folder: Path) -> None:
    """Writes the specs and prints what runs them, and an estimate."""
    specs = plan.specs
    command = worker_command(folder.absolute(), _run_options())
    description = described(plan.description, specs, folder)
    add_specs(specs, folder)
    description.write(folder)
    if flags.FLAGS.threads:
        write_threads(folder, flags.FLAGS.threads)
    variables = [f"{name}={value}" for name, value in app.jax_flags().items()]
    print(shlex.join([*(["env"] if variables else []), *variables, "python", *command[1:]]))
    flops = training_flops(specs)
    peak = PEAKS[EXAMPLE].flops["bfloat16"]
    print(
        f"{len(plan.specs)} runs are written to {folder}; start that command as often as you like, "
        "on any machine that has the folder, then this one again without --print_only.\n"
        f"{flops:.2e} FLOPs: {flops / (SHARE * peak) / 60:.3g} minutes at {SHARE:.0%} of the "
        f"{peak / 1e12:.0f} TFLOP/s of an H100 in bfloat16, without evaluation, starting and "
        "compiling",
        file=sys.stderr,
    )


def report(folder: Path) -> str:
    """Writes the report of what is complete and prints its table. Returns what is wrong, or ""."""
    results = lab.load_results(folder)
    if not len(results):
        return ""
    diverged = [run for run in results if run.status == "diverged"]
    if len(diverged) < len(results):
        print(results.table().to_string(index=False))
    path = lab.report(folder, folder / REPORT)
    print(f"report: {path}")
    if not diverged:
        return ""
    names = ", ".join(f"{run.spec.id}: {run.message}" for run in diverged)
    return f"{len(diverged)} of {len(results)} runs diverged: {names}"
