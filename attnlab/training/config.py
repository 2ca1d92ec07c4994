"""`TrainConfig`: how to train, checked; and the records that it is made of."""

import dataclasses
import re
from collections.abc import Mapping

from attnlab.fields import Spec, bounded
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.training.optimizers import axes_by_shape, make_transform
from attnlab.training.schedules import SCHEDULES


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OptimizerConfig(Spec, prefix="optimizer."):
    """The optimizer: what it does with a gradient.

    Attributes:
      name: an entry of `OPTIMIZERS`, which reads the other fields.
      learning_rate: the largest, at the end of the warm-up.
      beta1, beta2, epsilon: of Adam and its relatives.
      weight_decay: multiplied by the learning rate; biases, scales and norms have none.
      base_fan_in: adamw only; None: off. Sets the learning rate of each matrix of attention and FFN
        to `learning_rate` x base_fan_in / fan-in. Embeddings, LM head, positions, norms and biases
        keep `learning_rate`. Epsilon and weight decay are not scaled: every matrix shrinks by
        `learning_rate` x `weight_decay` a step, so the number of steps that it averages over does
        not depend on its fan-in.
      per_head: muon only; the q, k and v of each head are orthogonalised by themselves, not as one
        matrix of all heads.
      clip_norm: largest norm of a gradient; 0: no clipping.
      frozen: regular expression of parameters that keep their initial values (see `frozen_mask`).

    Raises:
      ValueError: an unknown `name`, a value out of range, a `frozen` that is no regular expression,
        or a field that the optimizer cannot use.

    >>> OptimizerConfig(frozen="attention.[qk]$", clip_norm=0.0)  # the repr omits defaults
    OptimizerConfig(clip_norm=0.0, frozen='attention.[qk]$')
    """

    name: str = "adamw"
    learning_rate: float = bounded(3e-3, above=0.0)
    beta1: float = bounded(0.9, least=0.0, below=1.0)
    beta2: float = bounded(0.99, above=0.0, below=1.0)
    epsilon: float = bounded(1e-8, above=0.0)
    weight_decay: float = bounded(0.1, least=0.0)
    base_fan_in: int | None = bounded(None, least=1)
    per_head: bool = False
    clip_norm: float = bounded(1.0, least=0.0)
    frozen: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.frozen)
        except re.error as error:
            raise ValueError(
                f"optimizer.frozen={self.frozen!r} is no regular expression: {error}"
            ) from None
        # Raises where the entry cannot be made of these fields.
        make_transform(self, lambda step: self.learning_rate, axes_by_shape)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ScheduleConfig(Spec, prefix="schedule."):
    """The learning rate of each step; the largest is `OptimizerConfig.learning_rate`.

    Attributes:
      name: an entry of `SCHEDULES`.
      final_learning_rate: where the decay would arrive at step `steps`; the last step, `steps` - 1,
        is a little above it.
      warmup_steps: steps of a linear rise to the largest learning rate.
      decay_share: share of the steps at the end in which `warmup_stable_decay` decays.

    Raises:
      ValueError: an unknown `name`, or a value out of range.

    >>> from attnlab.training import make_optimizer
    >>> schedule = ScheduleConfig(name="constant", warmup_steps=3)
    >>> rate = make_optimizer(TrainConfig(steps=10, schedule=schedule)).schedule
    >>> [round(float(rate(step)), 5) for step in (0, 1, 3, 9)]  # the first step is 0
    [0.00075, 0.0015, 0.003, 0.003]
    >>> schedule = ScheduleConfig(name="linear", final_learning_rate=0.0, warmup_steps=0)
    >>> rate = make_optimizer(TrainConfig(steps=10, schedule=schedule)).schedule
    >>> [round(float(rate(step)), 5) for step in (8, 9, 10)]  # the last of 10 steps is 9
    [0.0006, 0.0003, 0.0]
    """

    name: str = "cosine"
    final_learning_rate: float = bounded(3e-4, least=0.0)
    warmup_steps: int = bounded(50, least=0)
    decay_share: float = bounded(0.2, above=0.0, most=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        lookup(SCHEDULES, self.name, what="schedule")


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
      log_every: steps between two lines of the log.
      checkpoint_every: steps between two checkpoints.

    Raises:
      ValueError: a value out of range; seeds that are equal, negative or 2**32 or more; a
        `batch_size` that `accumulate` does not divide; or a warm-up not shorter than `steps`.

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
        if self.schedule.warmup_steps >= self.steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} must be below steps "
                f"{self.steps}; lower it"
            )
        SCHEDULES[self.schedule.name](self)  # raises where it cannot be made of these fields

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
        given = dict(fields)
        try:
            for name, kind in PARTS.items():
                if isinstance(part := given.get(name), Mapping):
                    given[name] = kind(**part)
            if "seeds" in given:
                given["seeds"] = tuple(given["seeds"])
            return cls(**given)
        except TypeError as error:  # of an unknown field
            raise ValueError(str(error)) from None


PARTS: dict[str, type[Spec]] = {
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "evaluation": EvaluationConfig,
}
"""Field of `TrainConfig` -> its record."""
