"""Runs what is left of a sweep, as one of its workers: `python -m attnlab.lab WORKDIR`."""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from attnlab.lab.machine import keep_compiled
from attnlab.lab.run import RunOptions
from attnlab.lab.worker import work
from attnlab.names import import_module


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m attnlab.lab", description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--cores", default="", help="the cores that it may use: 0,1")
    registers = "a module or file.py that registers a logger; repeatable"
    parser.add_argument("--import", dest="modules", default=[], action="append", help=registers)
    parser.add_argument("--skip", default=[], action="append", help="a run that is left out")
    parser.add_argument("--loggers", default="", help="further loggers: tensorboard,wandb")
    parser.add_argument("--profile", default="", help="steps of each run to trace: 10:20")
    parser.add_argument("--follow", action="store_true", help="stop when the parent process ends")
    args = parser.parse_args(argv)
    if args.follow and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if args.cores and sys.platform == "linux":
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    for module in args.modules:
        import_module(module)
    keep_compiled()
    loggers = tuple(filter(None, args.loggers.split(",")))
    options = RunOptions(loggers=loggers, profile=args.profile)
    return work(args.workdir, options, args.skip)


if __name__ == "__main__":
    sys.exit(main())
