"""`fit_in_memory`: the same training without a run folder or output, for a notebook or a test."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from attnlab.data.dataset import Dataset
from attnlab.sharing import Params
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.config import TrainConfig, make_optimizer
from attnlab.training.fit import FitOptions, FitResult, fit
from attnlab.training.loggers import Row, read_metrics
from attnlab.training.metrics import Recorder
from attnlab.training.objectives.objective import Model, Objective
from attnlab.training.optimizers import Optimizer


class InMemoryFit(NamedTuple):
    """What `fit_in_memory` returns.

    found = fit_in_memory(model, objective, config, dataset)
    steps, values = found.curve("eval/loss")  # [P], [S, P]
    params = found.params(0)
    """

    result: FitResult
    """Of `fit`: the parameters in `result.state.params`, each with a leading axis of seeds."""
    records: list[Row]
    """What was recorded: "step", and numbers with one value per seed."""

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps [P], values [S, P]) of a number that was recorded, as "eval/bits_per_byte".

        Raises:
          ValueError: nothing was recorded under this name.
        """
        records = [record for record in self.records if name in record]
        if not records:
            known = sorted({other for record in self.records for other in record} - {"step"})
            raise ValueError(f"{name!r} was not recorded; there are {', '.join(known)}")
        steps = np.array([record["step"] for record in records])
        return steps, np.array([record[name] for record in records]).T

    def params(self, seed: int = 0) -> Params:
        """The trained parameters of one seed, counted from 0 in the order of `config.seeds`.

        Raises:
          ValueError: there are not so many seeds.
        """
        count = len(self.result.state.step)
        if not 0 <= seed < count:  # JAX would take the last one
            raise ValueError(f"seed {seed} is not there; {count} seeds are counted from 0")
        params: Params = jax.tree.map(lambda a: a[seed], self.result.state.params)
        return params


def fit_in_memory(
    model: Model,
    objective: Objective,
    config: TrainConfig,
    dataset: Dataset,
    *,
    optimizer: Optimizer | None = None,
    options: FitOptions = FitOptions(),  # noqa: B008
) -> InMemoryFit:
    """`fit` with temporary files, which are deleted afterwards, and without output.

    Use `fit` for a run that is kept, or resumed after a stop.

    Args:
      model: with `init` and `apply`.
      objective: what it is trained to predict; an entry of `OBJECTIVES`.
      config: steps, batch size, seeds, and how often to evaluate.
      dataset: of batches and scored rows.
      optimizer: default `make_optimizer(config)`.
      options: as of `fit`.

    Returns:
      The result of `fit`, and what was recorded.

    Raises:
      NonFiniteLoss: a loss became NaN or infinite.
      Stopped: after SIGTERM or SIGINT.
      ValueError: the model or the dataset does not fit the objective.

        from attnlab.data import Text
        from attnlab.models import ModelConfig
        from attnlab.training import OBJECTIVES, TrainConfig, fit_in_memory

        config = TrainConfig(steps=200, seeds=(0,))
        data = Text().load(config.length)
        found = fit_in_memory(ModelConfig().build(), OBJECTIVES["causal_lm"], config, data)
        found.result.heldout["bits_per_byte"]  # [1]: one value per seed
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            Recorder(folder, config.seeds, speaks=False) as recorder,
            Checkpoints(folder / "checkpoints") as checkpoints,
        ):
            result = fit(
                model,
                objective,
                optimizer or make_optimizer(config),
                config,
                dataset,
                recorder=recorder,
                checkpoints=checkpoints,
                options=options,
            )
        return InMemoryFit(result, read_metrics(folder / "metrics.jsonl"))
