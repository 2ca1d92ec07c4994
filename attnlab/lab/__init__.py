"""Experiments as data: a sweep is a list of `RunSpec`s, its results are `RunResult`s.

    from attnlab import lab
    from attnlab.models import ModelConfig
    from attnlab.training import TrainConfig

    base = lab.Experiment(model=ModelConfig(num_layers=2), train=TrainConfig(steps=200))
    specs = lab.product(base, layout=["standard", "wide"], sharing=["separate"], seeds=[0, 1])
    results = lab.sweep(specs, "runs/layouts")
    print(results.table())
    print(results.compare({"layout": "standard"}))
    lab.report(results, "runs/layouts/report.html")

To resume a sweep that was stopped or killed, call it again: the numbers are the same. Runs are
spread over the cores or GPUs of this machine (`LocalExecutor`) or a cluster (`SlurmExecutor`).
Policies (`AddSeeds`, `DecideComparisons`, `TuneLearningRate`) read results and propose further
runs. Needs the extra `lab`.
"""

import importlib as _importlib
from collections.abc import Sequence as _Sequence
from pathlib import Path as _Path

from attnlab.lab.description import Description, read_description
from attnlab.lab.executors import Executor, InProcess, LocalExecutor, Queued
from attnlab.lab.experiment import Experiment
from attnlab.lab.policies import (
    AddSeeds,
    DecideComparisons,
    TuneLearningRate,
    best_rates,
    with_rate,
)
from attnlab.lab.result import ModelSizes, Provenance, RunResult, Scores, TaskInfo, Timing
from attnlab.lab.results import Results
from attnlab.lab.run import RunOptions, run_one
from attnlab.lab.slurm import SlurmExecutor
from attnlab.lab.spec import Match, RunSpec, Tag, Variant, grid, product, specs_of, with_values
from attnlab.lab.sweep import Policy, SweepFailed, load_results, sweep
from attnlab.lab.workdir import RunInUse

__all__ = [
    "AddSeeds", "DecideComparisons", "Description", "Executor", "Experiment",
    "InProcess", "LocalExecutor", "Match", "ModelSizes", "Policy", "Provenance", "Queued",
    "Results", "RunInUse", "RunOptions", "RunResult", "RunSpec", "Scores", "SlurmExecutor",
    "SweepFailed", "Tag", "TaskInfo", "Timing", "TuneLearningRate", "Variant",
    "best_rates", "grid", "load_results", "product", "read_description", "report", "run_one",
    "specs_of", "sweep", "with_rate", "with_values",
]  # fmt: skip


def report(
    results: Results | str | _Path | _Sequence[Results | str | _Path],
    path: str | _Path,
    description: Description | None = None,
    *,
    heads: bool = False,
) -> _Path:
    """Writes the report of results or workdirs; see `attnlab.report.report`."""
    package = _importlib.import_module("attnlab.report")  # a worker does not need it
    written: _Path = package.report(results, path, description, heads=heads)
    return written
