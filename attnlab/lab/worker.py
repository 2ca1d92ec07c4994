"""What a worker process does: it runs what is left of a sweep.

It takes the runs of `WORKDIR/specs.json` that have no result, those that cost most first, and
leaves out those that another worker has. So any number of workers share a workdir, on one machine
or on many.
"""

import argparse
import ctypes
import functools
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from attnlab.data import Dataset
from attnlab.lab.experiment import Experiment
from attnlab.lab.machine import keep_compiled, read_threads, use_threads
from attnlab.lab.run import RunOptions, run_one
from attnlab.lab.spec import RunSpec
from attnlab.lab.workdir import RunInUse, complete_result, holder, run_folder, specs_in
from attnlab.models import flops_per_token
from attnlab.names import import_module
from attnlab.training.interrupts import Stopped, stop_signals

ERROR = "error.txt"
STOPPED = 75
"""Exit code after a signal: repeat the command (EX_TEMPFAIL of sysexits.h)."""


def work(workdir: Path, options: RunOptions = RunOptions()) -> int:  # noqa: B008
    """Runs what is left.

    Args:
      workdir: of the sweep.
      options: of `run_one`.

    Returns:
      The exit code: 0, 1 where a run failed, 75 after a signal. The traceback of a run that failed
      is in its `error.txt`, and no worker runs it again before `sweep` has deleted that; the others
      go on.
    """
    code, last = 0, None
    datasets: dict[str, Dataset] = {}
    with stop_signals() as stop_requested:  # from one run to the next, too
        while not stop_requested() and (spec := _next(workdir, last)) is not None:
            last = spec
            error = run_folder(workdir, spec) / ERROR
            try:
                run_one(spec, workdir, options=options, datasets=datasets)
            except RunInUse:
                continue  # it began in this moment
            except (Stopped, KeyboardInterrupt) as stop:
                print(f"[{spec.id}] {stop}", flush=True)
                return STOPPED
            except Exception:
                code = 1
                try:
                    error.parent.mkdir(parents=True, exist_ok=True)
                    error.write_text(traceback.format_exc())
                except OSError:  # the disk is full
                    return code
                print(f"[{spec.id}] failed; see {error}", flush=True)
        return STOPPED if stop_requested() else code


def _next(workdir: Path, last: RunSpec | None) -> RunSpec | None:
    """The next run without a result or an error that nobody has; None where there is none.

    Another seed of the variant that this worker ran last comes first, then variants that no other
    worker runs: what one of them compiles is kept for the next one. Among equals the run of most
    FLOPs comes first: the last ones to end are then short.
    """
    left = [
        spec
        for spec in specs_in(workdir).values()
        if not complete_result(workdir, spec) and not (run_folder(workdir, spec) / ERROR).exists()
    ]
    held = {spec.id: holder(run_folder(workdir, spec)) for spec in left}
    busy = [spec.config for spec in left if held[spec.id]]
    open_ = [spec for spec in left if not held[spec.id]]

    def order(spec: RunSpec) -> tuple[int, int]:
        is_last = last is not None and spec.config == last.config
        return (0 if is_last else 2 if spec.config in busy else 1), -forward_flops(spec.config)

    return min(open_, key=order, default=None)


_flops_per_token = functools.cache(flops_per_token)  # runs of a variant have one model


def forward_flops(config: Experiment) -> int:
    """FLOPs of the forward passes of a training."""
    train = config.train
    tokens = train.steps * train.batch_size * train.length
    return _flops_per_token(config.model, train.length) * tokens


def main(argv: Sequence[str] | None = None) -> int:
    """The command `python -m attnlab.lab WORKDIR`."""
    about = "Runs what is left of a sweep, as one of its workers."
    parser = argparse.ArgumentParser(prog="python -m attnlab.lab", description=about)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--cores", default="", help="the cores that it may use: 0,1")
    registers = "a module or file.py that registers a logger; repeatable"
    parser.add_argument("--import", dest="modules", default=[], action="append", help=registers)
    parser.add_argument("--loggers", default="", help="further loggers: tensorboard,wandb")
    parser.add_argument("--profile", default="", help="steps of each run to trace: 10:20")
    parser.add_argument("--model_parallel", type=int, default=1, help="devices of one model")
    parser.add_argument("--shard_state", action="store_true", help="shard parameters and optimizer")
    parser.add_argument("--follow", action="store_true", help="stop when the parent process ends")
    args = parser.parse_args(argv)
    if args.follow and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if args.cores and sys.platform == "linux":
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    for module in args.modules:
        import_module(module)
    use_threads(read_threads(args.workdir))
    keep_compiled()
    loggers = tuple(filter(None, args.loggers.split(",")))
    shards = {"model_parallel": args.model_parallel, "shard_state": args.shard_state}
    options = RunOptions(loggers=loggers, profile=args.profile, **shards)
    return work(args.workdir, options)
