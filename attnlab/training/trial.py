"""A training that leaves nothing on disk and says nothing: for a notebook, a test, a first look."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab.training import shard
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.config import TrainConfig
from attnlab.training.fit import Result, fit
from attnlab.training.metrics import Recorder, read_metrics
from attnlab.training.optimizers import Optimizer, make_optimizer
from attnlab.training.sources.source import Source
from attnlab.training.tasks.task import Task


class Trial(NamedTuple):
    """What `trial` returns."""

    result: Result
    """Of `fit`: the weights in `result.state.params`, each with a leading axis of seeds."""
    rows: list[dict[str, Any]]
    """What was recorded: "step", and numbers with one value per seed."""

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps [P], values [S, P]) of a number that was recorded, as "eval/bits_per_byte"."""
        rows = [row for row in self.rows if name in row]
        if not rows:
            known = sorted({other for row in self.rows for other in row} - {"step"})
            raise ValueError(f"{name!r} was not recorded; there are {', '.join(known)}")
        return np.array([row["step"] for row in rows]), np.array([row[name] for row in rows]).T

    def params(self, seed: int = 0) -> Any:
        """The trained weights of one seed, counted from 0 in the order of `config.seeds`."""
        return jax.tree.map(lambda a: a[seed], self.result.state.params)


def trial(
    model: Any,
    task: Task,
    config: TrainConfig,
    source: Source,
    *,
    params: Any = None,
    optimizer: Optimizer | None = None,
    watch: Callable[[Any, Any], dict[str, jax.Array]] | None = None,
) -> Trial:
    """`fit` on all devices, with the optimizer of `config` where none is given, in a folder that is
    gone afterwards.

    Arguments and errors are those of `fit`; for a run that is to be kept, or to go on after a
    stop, call that.
    """
    mesh = shard.data_mesh(batch_size=config.batch_size)
    optimizer = optimizer or make_optimizer(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            Recorder(folder, config.seeds, speaks=False) as recorder,
            Checkpoints(folder / "checkpoints") as checkpoints,
        ):
            result = fit(
                model,
                task,
                optimizer,
                config,
                source,
                mesh=mesh,
                recorder=recorder,
                checkpoints=checkpoints,
                params=params,
                watch=watch,
            )
        return Trial(result, read_metrics(folder / "metrics.jsonl"))
