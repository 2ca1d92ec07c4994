r"""Runs all variants of a config, with several seeds of each, and writes the report.

    python -m experiments.sweep --config=experiments/configs/heads_and_sharing.py \
        --workdir=runs/first

The variants are those of the config file (`variants`), or all combinations of --vary:

    python -m experiments.sweep --config=experiments/configs/byte_lm.py --workdir=runs/layouts \
        --vary=model.heads.layout=standard,wide --vary=model.sharing=separate --seeds=0,1,2

The same command again skips the runs that are complete, goes on with the others and renews the
report. Runs go side by side, in as many processes as there are cores (or GPUs) for, or --jobs.
--launcher=slurm submits them as an array of SLURM jobs, --slurm="--time=4:00:00" are its options;
--print_only writes the specs and prints the command of a worker, to start elsewhere as often as you
like, and what an H100 would need. See docs/howto/running.md.

--max_seeds=20 adds seeds to comparisons that are not significant, until they are, or more seeds
could not make them so. --margin=0.01 is the equivalence margin. --tune=7 first tries so many
learning rates of each variant, with a seed of its own on the validation part of the data, and more
where the best is at an end; --tune_from=runs/first takes those that another sweep of the same
variants chose, or those of a table (docs/results/heads_and_sharing.csv). With
match.budget=seconds the FFN of each variant is solved for equal seconds of a step, which are
measured before the first run and kept; --calibrate_only measures and stops. --sizes=3 trains every
variant at three sizes, each twice as wide as the one before (--sizes_by=depth: as deep).
"""

import sys
from pathlib import Path

import jax
from absl import flags

from attnlab import lab
from attnlab.lab.model_sizes import FIELDS
from attnlab.lab.plan import run_plan
from experiments import app, planning

_FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of the command."""
    app.define_run()
    flags.DEFINE_multi_string("vary", [], "FIELD=VALUE,VALUE,... in place of the file's variants.")
    flags.DEFINE_list("seeds", [], "Seeds of each variant; left out: train.seeds of the config.")
    flags.DEFINE_integer("jobs", None, "Processes; left out: as many as fit.", lower_bound=1)
    flags.DEFINE_enum("busy", "wait", ["wait", "skip"], "What to do with runs of other processes.")
    flags.DEFINE_integer("max_seeds", 0, "Add seeds up to so many of a variant.", lower_bound=0)
    flags.DEFINE_float("margin", 0.0, "Equivalence margin, in the unit of the scores.", 0.0)
    flags.DEFINE_integer("tune", 0, "Learning rates of each variant to choose from.", lower_bound=0)
    flags.DEFINE_string("tune_from", "", "A sweep whose learning rates are taken, or a table.")
    flags.DEFINE_list("sizes", [], "So many sizes, 1, 2, 4, ...; or these: 1,1.5,2.")
    flags.DEFINE_enum("sizes_by", "width", list(FIELDS), "What a size multiplies.")
    flags.DEFINE_enum("launcher", "local", ["local", "slurm"], "Where the runs are computed.")
    flags.DEFINE_string("slurm", "", "Options of sbatch, in one string.")
    flags.DEFINE_bool("calibrate_only", False, "Measure equal seconds, if need be, and stop.")
    flags.DEFINE_bool("print_only", False, "Write the specs (and the SLURM script) and stop.")


def main() -> None:
    """Runs the sweep."""
    jax.config.update("jax_platforms", "cpu")  # accelerators are for the runs
    folder = Path(_FLAGS.workdir)
    plan = planning.plan_of(folder)
    if _FLAGS.calibrate_only:
        return
    if _FLAGS.print_only and _FLAGS.launcher == "local":
        planning.print_workers(plan, folder)
        return
    print(planning.header(plan, folder), file=sys.stderr, flush=True)
    problem = ""
    try:
        run_plan(plan, folder, planning.executor(), waits=_FLAGS.busy == "wait")
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
