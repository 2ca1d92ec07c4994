r"""Runs all variants of a config, with several seeds of each, and writes the report.

    python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
        --workdir=runs/first

The variants are those of the config file (`variants`), or all combinations of --vary:

    python -m experiments.sweep --config=experiments/configs/byte_lm.py --workdir=runs/layouts \
        --vary=model.heads.layout=standard,wide --vary=model.sharing=separate --seeds=0,1,2

Repeat the command to resume: complete runs are skipped, the others continue, and the report is
written again. Runs are computed in parallel, in --jobs processes; left out, as many as the cores
(or GPUs) allow. --launcher=slurm submits them as an array of SLURM jobs with the options of
--slurm="--time=4:00:00". --print_only writes the specs and prints the command of a worker, which
you may start on other machines as often as you like. See docs/howto/running.md.

--max_seeds=20 adds seeds to undecided comparisons, until they are decided or more seeds could not
decide them. --margin=0.01 is the equivalence margin. --tune=7 first tries seven learning rates for
each variant (more if the best one is at an end), with a separate seed, on the validation part.
--tune_from=runs/first takes the rates of another sweep of the same variants, or of a table
(docs/results/heads_and_sharing.csv).
"""

import dataclasses
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
from absl import flags

from attnlab import lab
from attnlab.lab.description import read_description
from attnlab.lab.executors import worker_command
from attnlab.lab.machine import write_threads
from attnlab.lab.policies import with_known_rates
from attnlab.lab.results import check_named
from attnlab.lab.sweep import COMMAND, described, forget_errors
from attnlab.lab.workdir import add_specs
from attnlab.lab.worker import forward_flops
from attnlab.load import SPECS
from attnlab.models import num_parameters
from experiments import app, config, report

_FLAGS = flags.FLAGS
PASSES = 3
"""Forward passes that a training step costs."""


def define_flags() -> None:
    """The flags of the command."""
    app.define_run()
    flags.DEFINE_multi_string(
        "vary", [], "FIELD=VALUE,VALUE,...: variants in place of those of the config file."
    )
    flags.DEFINE_list(
        "seeds", [], "Seeds of each variant, as 0,1,2; left out: train.seeds of the config."
    )
    flags.DEFINE_integer(
        "jobs", None, "Number of processes; left out: as many as cores or GPUs allow.", 1
    )
    flags.DEFINE_enum(
        "busy", "wait", ["wait", "skip"], "Wait for runs that another process computes, or skip."
    )
    flags.DEFINE_integer(
        "max_seeds", 0, "Add seeds to undecided comparisons, up to so many per variant.", 0
    )
    flags.DEFINE_float("margin", 0.0, "Equivalence margin, in the unit of the scores.", 0.0)
    flags.DEFINE_integer(
        "tune", 0, "Number of learning rates to try for each variant; 0: no tuning.", 0
    )
    flags.DEFINE_string(
        "tune_from", "", "A tuned sweep or a CSV table to take learning rates from."
    )
    flags.DEFINE_enum("launcher", "local", ["local", "slurm"], "Where the runs are computed.")
    flags.DEFINE_string("slurm", "", "Options of sbatch, in one string.")
    flags.DEFINE_bool("print_only", False, "Only write the specs (and the SLURM script).")
    flags.register_validator(
        "seeds", lambda a: all(map(str.isdigit, a)), "write whole numbers with commas, as 0,1,2"
    )
    flags.register_validator("margin", math.isfinite, "give a number of the unit of the scores")


def main(file: config.ConfigFile) -> None:
    """Runs the sweep."""
    jax.config.update("jax_platforms", "cpu")  # accelerators are for the runs
    folder = Path(_FLAGS.workdir)
    specs, about = planned(file)
    policies = policies_of(specs, about)
    if _FLAGS.print_only and _FLAGS.launcher == "local":
        print_workers(specs, about, folder)
        return
    print(header(specs, folder), file=sys.stderr, flush=True)
    problem = ""
    try:
        waits, where = _FLAGS.busy == "wait", executor()
        lab.sweep(specs, folder, executor=where, policies=policies, description=about, waits=waits)
    except lab.Queued as queued:
        print(queued, file=sys.stderr)
    except lab.SweepFailed as failed:
        problem = str(failed)
    (folder / COMMAND).write_text(app.given_command(), encoding="utf-8")
    problem = "\n".join(filter(None, (problem, write_report(folder))))
    if problem:
        sys.exit(f"error: {problem}")


def planned(file: config.ConfigFile) -> tuple[list[lab.RunSpec], lab.Description]:
    """The runs that file and flags describe, and what they are to decide. Raises ValueError."""
    setup = config.setup_of(file, config.parse_variants(_FLAGS.vary) if _FLAGS.vary else None)
    if not setup.variants:
        raise ValueError(
            f"{file.path} has no variants; give some by --vary=FIELD=VALUE,VALUE, or use "
            "experiments.run for one model"
        )
    specs = setup.specs([int(seed) for seed in _FLAGS.seeds])
    check_named(setup.description.named, specs)
    if _FLAGS.tune_from:
        if _FLAGS.tune:
            raise ValueError("--tune chooses learning rates, --tune_from reads them; leave one out")
        specs = with_known_rates(specs, Path(_FLAGS.tune_from))
    margin = _FLAGS.margin or setup.description.margin
    return specs, dataclasses.replace(setup.description, margin=margin)


def policies_of(specs: Sequence[lab.RunSpec], about: lab.Description) -> list[lab.Policy]:
    """What --tune and --max_seeds ask for. Raises ValueError for flags without an effect."""
    local, tune, most = _FLAGS.launcher == "local", _FLAGS.tune, _FLAGS.max_seeds
    seeds = len({spec.seed for spec in specs})
    if local and _FLAGS.slurm:
        raise ValueError("--slurm are options of sbatch; add --launcher=slurm")
    if 0 < most <= seeds:
        raise ValueError(f"--max_seeds={most} adds no seed to the {seeds} of each variant")
    if local and _FLAGS.print_only and (tune or most):
        raise ValueError(
            "--print_only runs nothing, but --tune and --max_seeds need results; leave them out "
            "(--tune_from takes learning rates that are known), or add --launcher=slurm"
        )
    policies: list[lab.Policy] = [lab.TuneLearningRate(tune)] if tune else []
    if most:
        policies.append(lab.DecideComparisons(about.pairs, most, about.margin))
    return policies


def executor() -> lab.Executor:
    """Where the flags want the runs to be computed."""
    jobs, threads, options = _FLAGS.jobs, _FLAGS.threads, _run_options()
    variables = app.jax_flags()
    if _FLAGS.launcher == "local":
        return lab.LocalExecutor(jobs, threads, options, variables)
    mode: Literal["submit", "write"] = "write" if _FLAGS.print_only else "submit"
    return lab.SlurmExecutor(
        jobs, _FLAGS.slurm, run_options=options, environment=variables, threads=threads, mode=mode
    )


def _run_options() -> lab.RunOptions:
    return lab.RunOptions(loggers=tuple(_FLAGS.loggers), profile=_FLAGS.profile)


def header(specs: Sequence[lab.RunSpec], folder: Path) -> str:
    """What is about to run: a line for each variant."""
    variants = {spec.title: num_parameters(spec.config.model) for spec in specs}
    lines = [f"  {title}: {count:,} parameters" for title, count in variants.items()]
    flops = sum(PASSES * forward_flops(spec.config) for spec in specs)
    title = f"{len(specs)} runs of {len(variants)} variants, {flops:.2e} FLOPs, in {folder}"
    if _FLAGS.tune:
        first = _FLAGS.tune * len(variants)
        title = f"first {first} runs or more to choose learning rates, then {title}"
    if _FLAGS.max_seeds:
        title += f", then up to {_FLAGS.max_seeds} seeds of each variant"
    return "\n".join([title, *lines])


def print_workers(specs: Sequence[lab.RunSpec], about: lab.Description, folder: Path) -> None:
    """Writes the specs and prints what runs them."""
    command = worker_command(folder.absolute(), _run_options())
    add_specs(specs, folder)
    described(read_description(folder, about), specs).write(folder)
    forget_errors(specs, folder)
    if _FLAGS.threads:
        write_threads(folder, _FLAGS.threads)
    variables = [f"{name}={value}" for name, value in app.jax_flags().items()]
    print(shlex.join([*(["env"] if variables else []), *variables, "python", *command[1:]]))
    print(
        f"{header(specs, folder)}\nStart that command as often as you like, on any machine that "
        "has the folder, then this one again without --print_only.",
        file=sys.stderr,
    )


def write_report(folder: Path) -> str:
    """Writes the report of what is complete and prints its table. Returns what is wrong, or "".

    Where learning rates are still to be chosen, no run is wanted yet and there is no report.
    """
    if not (folder / SPECS).exists():
        return ""
    results = lab.load_results(folder)
    diverged = [run for run in results if run.status == "diverged"]
    if len(diverged) < len(results):
        print(results.table().to_string(index=False))
    if len(results):
        print(f"report: {report.write([folder])}")
    names = ", ".join(f"{run.spec.id}: {run.message}" for run in diverged)
    return f"{len(diverged)} of {len(results)} runs diverged: {names}" if diverged else ""


if __name__ == "__main__":
    define_flags()
    app.start(main)
