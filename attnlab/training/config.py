"""`TrainConfig`: how to train, checked; its optimizer and schedule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.fields import Spec, bounded
from attnlab.nested import JSON
from attnlab.training.optimizers import (
    AxesOf,
    Optimizer,
    OptimizerConfig,
    axes_by_shape,
    make_transform,
)
from attnlab.training.schedules import ScheduleConfig, make_schedule


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationConfig(Spec, prefix="evaluation."):
    """When and on how many rows the model is scored.

    Attributes:
      every: steps between two points of the learning curves.
      batch_size: rows that are scored at a time.
      windows: rows scored at the end; 0: all.
      curve_windows: rows scored for a point of the learning curves.

    Raises:
      ValueError: a value is below its minimum.

    >>> EvaluationConfig(curve_windows=0)
    Traceback (most recent call last):
    ValueError: evaluation.curve_windows must be a whole number of at least 1, not 0
    """

    every: int = bounded(100, least=1)
    batch_size: int = bounded(64, least=1)
    windows: int = bounded(2048, least=0)
    curve_windows: int = bounded(256, least=1)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainConfig(Spec):
    """How to train. Validated when it is made; a ValueError says what to change.

    Attributes:
      steps: optimizer steps.
      batch_size: rows of a step.
      accumulate: the batch goes through the model in so many equal parts, one after the other: less
        memory, the same gradient (see `train_step`).
      length: tokens of a row of the dataset.
      seeds: one model for each, trained side by side in one program.
      optimizer, schedule, evaluation: records of their own.
      label_smoothing: `smoothing` of `objectives.cross_entropy` in training, in `train/loss` too;
        an evaluation is never smoothed.
      loss_tokens: tokens whose logits are computed at a time in training: less memory, the same
        loss and gradient but for rounding, the same time. 0: those of a whole batch (or part of
        `accumulate`) of up to 2**26 logits, of a larger one as many as have 2**25; an evaluation
        computes those of `evaluation.batch_size` rows.
      log_every: steps between two lines of the log.
      checkpoint_every: steps between two checkpoints.

    Raises:
      ValueError: a value out of range; seeds that are equal, negative or 2**32 or more; a
        `batch_size` that `accumulate` does not divide; a warm-up not shorter than `steps`; or a
        `final_learning_rate` above the learning rate, where the schedule reads it.

    >>> TrainConfig(steps=200, optimizer=OptimizerConfig(learning_rate=0.01))
    TrainConfig(steps=200, optimizer=OptimizerConfig(learning_rate=0.01))
    """

    steps: int = bounded(800, least=1)
    batch_size: int = bounded(16, least=1)
    accumulate: int = bounded(1, least=1)
    length: int = bounded(64, least=1)
    seeds: tuple[int, ...] = bounded((0, 1, 2), least=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    label_smoothing: float = bounded(0.0, least=0.0, below=1.0)
    loss_tokens: int = bounded(0, least=0)
    log_every: int = bounded(50, least=1)
    checkpoint_every: int = bounded(400, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be different numbers of 0 or more, not {self.seeds}")
        if max(self.seeds) >= 2**32:
            raise ValueError(f"seeds must be below 2**32, not {max(self.seeds)}; lower it")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by accumulate {self.accumulate}; "
                f"use a multiple of {self.accumulate}"
            )
        if (warmup := self.schedule.warmup(self.steps)) >= self.steps:
            raise ValueError(
                f"schedule.warmup_steps {warmup} must be below steps {self.steps}; lower it"
            )
        # Raises where it cannot be made of these fields.
        make_schedule(self.schedule, self.optimizer.learning_rate, self.steps)

    @property
    def device_batches(self) -> dict[str, int]:
        """Name -> rows that go through the model at a time, which the devices share evenly.

        >>> TrainConfig(batch_size=16, accumulate=2).device_batches
        {'batch_size / accumulate': 8, 'evaluation.batch_size': 64}
        """
        name = "batch_size" if self.accumulate == 1 else "batch_size / accumulate"
        rows = self.batch_size // self.accumulate
        return {name: rows, "evaluation.batch_size": self.evaluation.batch_size}

    def to_dict(self) -> JSON:
        """Nested dicts; `from_dict` reads them as the same config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: JSON) -> "TrainConfig":
        """The config of nested dicts, as `to_dict` made them; missing fields have their defaults.

        Raises:
          ValueError: an unknown field, or a value that cannot be.

        >>> TrainConfig.from_dict({"steps": 200, "optimizer": {"learning_rate": 0.01}})
        TrainConfig(steps=200, optimizer=OptimizerConfig(learning_rate=0.01))
        """
        try:
            given = {n: one for n, one in fields.items() if n in PARTS and isinstance(one, dict)}
            parts = {name: PARTS[name](**one) for name, one in given.items()}
            return cls(**fields | parts)
        except TypeError as error:  # of an unknown field
            raise ValueError(str(error)) from None


PARTS: dict[str, type[Spec]] = {
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "evaluation": EvaluationConfig,
}
"""Field of `TrainConfig` -> its record."""


def make_optimizer(config: TrainConfig, axes: AxesOf = axes_by_shape) -> Optimizer:
    """The optimizer and schedule of a `TrainConfig`.

    Args:
      config: with the fields `optimizer`, `schedule` and `steps`.
      axes: which axes of each parameter form a matrix.

    Raises:
      ValueError: the optimizer cannot use a field of the config.

    >>> rate = make_optimizer(TrainConfig(steps=200)).schedule  # 50 steps of warm-up, then a cosine
    >>> [round(float(rate(step)), 5) for step in (0, 50, 125, 200)]
    [6e-05, 0.003, 0.00165, 0.0003]
    """
    rate = make_schedule(config.schedule, config.optimizer.learning_rate, config.steps)
    return Optimizer(make_transform(config.optimizer, rate, axes), rate)


@functools.cache
def common_steps(config: TrainConfig, steps: int) -> int:
    """How many first steps have the same rates in a training of `steps` steps.

    >>> for name in ("cosine", "warmup_stable_decay", "constant"):
    ...     config = TrainConfig(steps=800, schedule=ScheduleConfig(name=name, warmup_steps=50))
    ...     print(name, common_steps(config, 1200))
    cosine 51
    warmup_stable_decay 641
    constant 800
    """
    shorter, longer = sorted((config.steps, steps))
    schedule, peak = config.schedule, config.optimizer.learning_rate
    one, other = (make_schedule(schedule, peak, length) for length in (shorter, longer))
    same = jax.jit(lambda step: jnp.broadcast_to(one(step) == other(step), step.shape))
    return int(np.argmin(np.append(same(np.arange(shorter)), False)))
