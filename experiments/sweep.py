r"""Runs all variants of a config, with several seeds of each, and writes the report.

    python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
        --workdir=runs/first

The variants are those of the config file (`variants`), or all combinations of --vary:

    python -m experiments.sweep --config=experiments/configs/byte_lm.py --workdir=runs/layouts \
        --vary=model.heads.layout=standard,wide --vary=model.sharing=separate --seeds=0,1,2

Repeat the command to resume: complete runs are skipped, the others continue, and the report is
written again. Runs are computed in parallel, in --jobs processes; left out, as many as the cores
(or GPUs) allow. --launcher=slurm submits them as an array of SLURM jobs with the options of
--slurm="--time=4:00:00". --print_only writes the specs and prints an estimate for an H100 and the
command of a worker, which you may start on other machines as often as you like. See
docs/howto/running.md.

--max_seeds=20 adds seeds to undecided comparisons, until they are decided or more seeds could not
decide them. --margin=0.01 is the equivalence margin. --tune=7 first tries seven learning rates for
each variant (more if the best one is at an end), with a separate seed, on the validation part.
--tune_from=runs/first takes the rates of another sweep of the same variants, or of a table
(docs/results/heads_and_sharing.csv).
"""

import sys
from pathlib import Path

import jax
from absl import flags

from attnlab import lab
from experiments import app, planning

_FLAGS = flags.FLAGS


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
        "jobs",
        None,
        "Number of processes; left out: as many as cores or GPUs allow.",
        lower_bound=1,
    )
    flags.DEFINE_enum(
        "busy",
        "wait",
        ["wait", "skip"],
        "Wait for runs that another process computes, or skip them.",
    )
    flags.DEFINE_integer(
        "max_seeds",
        0,
        "Add seeds to undecided comparisons, up to so many per variant.",
        lower_bound=0,
    )
    flags.DEFINE_float("margin", 0.0, "Equivalence margin, in the unit of the scores.", 0.0)
    flags.DEFINE_integer(
        "tune", 0, "Number of learning rates to try for each variant; 0: no tuning.", lower_bound=0
    )
    flags.DEFINE_string(
        "tune_from", "", "A tuned sweep or a CSV table to take learning rates from."
    )
    flags.DEFINE_enum("launcher", "local", ["local", "slurm"], "Where the runs are computed.")
    flags.DEFINE_string("slurm", "", "Options of sbatch, in one string.")
    flags.DEFINE_bool("print_only", False, "Only write the specs (and the SLURM script).")


def main() -> None:
    """Runs the sweep."""
    jax.config.update("jax_platforms", "cpu")  # accelerators are for the runs
    folder = Path(_FLAGS.workdir)
    plan = planning.plan_of()
    if _FLAGS.print_only and _FLAGS.launcher == "local":
        planning.print_workers(plan, folder)
        return
    print(planning.header(plan, folder), file=sys.stderr, flush=True)
    problem = ""
    try:
        lab.sweep(
            plan.specs,
            folder,
            executor=planning.executor(),
            policies=plan.policies,
            description=plan.description,
            waits=_FLAGS.busy == "wait",
        )
    except lab.Queued as queued:
        print(queued, file=sys.stderr)
    except lab.SweepFailed as failed:
        problem = str(failed)
    problem = planning.report(folder) or problem
    if problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    define_flags()
    app.start(main)
