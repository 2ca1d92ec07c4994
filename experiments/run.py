"""Trains one model, with one or several seeds.

    python -m experiments.run --config=experiments/configs/byte_lm.py:layout=wide --workdir=runs/one

Every field of the config is a flag (--config.model.num_layers=8). Repeat the command to resume a
killed run; its numbers are those of a run without a stop. With more --config.train.steps it trains
finished runs for longer, if the schedule allows it. Each seed of train.seeds is a run in
WORKDIR/runs. On many hosts start the command on each, with --distributed (see
docs/howto/many_machines.md).
"""

import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from attnlab import lab
from attnlab.lab.machine import keep_compiled, read_threads, threads, use_threads, write_threads
from attnlab.lab.sweep import COMMAND
from attnlab.lab.workdir import add_specs
from attnlab.training import sharding
from attnlab.training.interrupts import Stopped, stop_signals
from experiments import app, config

_FLAGS = flags.FLAGS
HOSTS = ("coordinator_address", "num_processes", "process_id")


def define_flags() -> None:
    """The flags of the command."""
    app.define_run()
    flags.DEFINE_bool("distributed", False, "Join the other hosts of a pod or cluster.")
    flags.DEFINE_string(
        "coordinator_address", None, "HOST:PORT of process 0, where no launcher says it."
    )
    flags.DEFINE_integer("num_processes", None, "Number of processes on all hosts.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "Index of this process, from 0.", lower_bound=0)
    parts = "Devices that compute one model together: each a share of heads and FFN units."
    flags.DEFINE_integer("model_parallel", 1, parts, lower_bound=1)
    flags.DEFINE_bool("shard_state", False, "Shard parameters and optimizer state over devices.")


def join_hosts() -> None:
    """Joins the other processes, if flags ask for that. Raises ValueError."""
    given: dict[str, Any] = {name: _FLAGS[name].value for name in HOSTS}
    if not _FLAGS.distributed and set(given.values()) == {None}:
        return
    if (address := given["coordinator_address"]) and not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"--coordinator_address={address} is not HOST:PORT, as host0:8476")
    try:
        jax.distributed.initialize(**given)
    except ValueError as error:
        raise ValueError(
            f"--distributed: {str(error).rstrip('.')}; under srun of SLURM, mpirun of Open MPI, "
            "Kubernetes and on Cloud TPUs it needs no other flag; elsewhere give "
            "--coordinator_address=HOST:PORT, --num_processes=N and --process_id=0 to N - 1"
        ) from None


def run_config(
    given: ConfigDict | lab.Experiment,
    folder: Path,
    options: lab.RunOptions = lab.RunOptions(),  # noqa: B008
) -> list[lab.RunResult]:
    """Trains the model of a config with each of its seeds, one after the other, in this process.

    Args:
      given: a config, or an experiment.
      folder: workdir; each seed is a run in it.
      options: of `run_one`.

    Raises:
      Exceptions of `lab.run_one`.
    """
    specs = config.one_model(given).specs()
    if jax.process_index() == 0:
        add_specs(specs, folder)
        write_threads(folder, threads())
    results = []
    with stop_signals() as stop_requested:
        for spec in specs:
            results.append(lab.run_one(spec, folder, options=options))
            if sharding.any_process(bool(stop_requested())):
                raise Stopped(
                    f"stopped; {len(results)} of {len(specs)} runs are complete; repeat the "
                    "command to resume"
                )
    return results


def main(file: config.ConfigFile) -> None:
    """Runs all seeds and prints their held-out scores."""
    join_hosts()
    folder = Path(_FLAGS.workdir)
    use_threads(_FLAGS.threads or read_threads(folder))
    keep_compiled()
    options = lab.RunOptions(
        model_parallel=_FLAGS.model_parallel,
        shard_state=_FLAGS.shard_state,
        loggers=tuple(_FLAGS.loggers),
        profile=_FLAGS.profile,
    )
    results = run_config(file.config, folder, options)
    (folder / COMMAND).write_text(app.given_command(), encoding="utf-8")
    for result in (one for one in results if one.status == "complete"):
        for metric in result.task.metrics:
            value = result.scores.heldout.get(metric.name, math.nan)  # a score that is not finite
            text = f"{value:.{metric.digits + 1}f} {metric.unit}"
            print(f"seed {result.spec.seed}: held-out {text}")
    if diverged := [result.message for result in results if result.status == "diverged"]:
        sys.exit(f"error: {'; '.join(diverged)}")
    place = shlex.quote(str(folder))
    print(f"python -m experiments.report {place}", file=sys.stderr)
    print(f"python -m experiments.view --workdir={place} --out=heads.html", file=sys.stderr)
    if results[0].spec.config.task == "causal_lm":
        print(f'python -m experiments.sample --workdir={place} --text="The "', file=sys.stderr)


if __name__ == "__main__":
    define_flags()
    app.start(main)
