"""`TrainConfig`: how to train, checked; and the records that it is made of."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from attnlab.models.checks import check_number
from attnlab.models.specs import Spec
from attnlab.names import check_count, lookup
from attnlab.training.optimizers import axes_by_shape, make_transform
from attnlab.training.schedules import SCHEDULES

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON, at the edge: a stored config, the notes of a checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OptimizerConfig(Spec):
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
      clip_norm: largest norm of a gradient; 0: no clipping.
      frozen: regular expression of parameters that keep their initial values (see `frozen_mask`).
    """

    name: str = "adamw"
    learning_rate: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    base_fan_in: int | None = None
    clip_norm: float = 1.0
    frozen: str = ""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "beta2", "epsilon"):
            check_number(f"optimizer.{name}", getattr(self, name), above=0.0)
        for name in ("beta1", "weight_decay", "clip_norm"):
            check_number(f"optimizer.{name}", getattr(self, name), least=0.0)
        if self.base_fan_in is not None:
            check_count("optimizer.base_fan_in", self.base_fan_in, 1)
        try:
            re.compile(self.frozen)
        except re.error as error:
            raise ValueError(
                f"optimizer.frozen={self.frozen!r} is no regular expression: {error}"
            ) from None
        # Raises where the entry cannot be made of these fields.
        make_transform(self, lambda step: self.learning_rate, axes_by_shape)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ScheduleConfig(Spec):
    """The learning rate of each step; the largest is `OptimizerConfig.learning_rate`.

    Attributes:
      name: an entry of `SCHEDULES`.
      final_learning_rate: that of the last step, where the schedule decays to one.
      warmup_steps: steps of a linear rise to the largest learning rate.
      decay_share: share of the steps at the end in which `warmup_stable_decay` decays.
    """

    name: str = "cosine"
    final_learning_rate: float = 3e-4
    warmup_steps: int = 50
    decay_share: float = 0.2

    def __post_init__(self) -> None:
        lookup(SCHEDULES, self.name, what="schedule")
        check_number("schedule.final_learning_rate", self.final_learning_rate, least=0.0)
        check_count("schedule.warmup_steps", self.warmup_steps, 0)
        check_number("schedule.decay_share", self.decay_share, above=0.0, most=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationConfig(Spec):
    """When and on how many rows the model is scored.

    Attributes:
      every: steps between two points of the learning curves.
      batch_size: rows that are scored at a time.
      windows: rows scored at the end; 0: all.
      curve_windows: rows scored for a point of the learning curves.
    """

    every: int = 100
    batch_size: int = 64
    windows: int = 2048
    curve_windows: int = 256

    def __post_init__(self) -> None:
        for name in ("every", "batch_size", "curve_windows"):
            check_count(f"evaluation.{name}", getattr(self, name), 1)
        check_count("evaluation.windows", self.windows, 0)


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

    >>> TrainConfig(steps=200, optimizer=OptimizerConfig(learning_rate=0.01))
    TrainConfig(steps=200, optimizer=OptimizerConfig(learning_rate=0.01))
    """

    steps: int = 800
    batch_size: int = 16
    accumulate: int = 1
    length: int = 64
    seeds: tuple[int, ...] = (0, 1, 2)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    label_smoothing: float = 0.0
    log_every: int = 50
    checkpoint_every: int = 400

    def __post_init__(self) -> None:
        for name, kind in PARTS.items():
            if not isinstance(part := getattr(self, name), kind):
                raise ValueError(f"{name} must be of type {kind.__name__}, not {part!r}")
        for name in (
            "steps", "batch_size", "accumulate", "length", "log_every", "checkpoint_every",
        ):  # fmt: skip
            check_count(name, getattr(self, name), 1)
        check_number("label_smoothing", self.label_smoothing, least=0.0, below=1.0)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers of 0 or more, not {self.seeds}")
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

    def to_dict(self) -> JsonObject:
        """Nested dicts; `from_dict` reads them as the same config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: JsonObject) -> "TrainConfig":
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
