"""`TrainConfig`: how to train, checked."""

import dataclasses
import re

from attnlab.training.optimizers import make_optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. Validated when it is made; a ValueError says what to change.

    Attributes:
      steps: optimizer steps.
      batch_size: rows of a step.
      accumulate: the batch goes through the model in so many equal parts, one after the other: less
        memory, the same gradient (see `train_step`).
      length: tokens of a row of the dataset.
      seeds: one model for each, trained side by side in one program.
      optimizer, schedule: names of entries of `OPTIMIZERS` and `SCHEDULES`, which read the fields
        from here to `clip_norm`.
      learning_rate: the largest, at the end of the warm-up.
      final_learning_rate: that of the last step, where the schedule decays to one.
      warmup_steps: steps of a linear rise to `learning_rate`.
      decay_share: share of the steps at the end in which `warmup_stable_decay` decays.
      beta1, beta2, epsilon: of Adam and its relatives.
      weight_decay: multiplied by the learning rate; biases, scales and norms have none.
      base_fan_in: adamw only; None: off. Sets the learning rate of each matrix of attention and FFN
        to `learning_rate` x base_fan_in / fan-in. Embeddings, LM head, positions, norms and biases
        keep `learning_rate`. Epsilon and weight decay are not scaled: every matrix shrinks by
        `learning_rate` x `weight_decay` a step, so the number of steps that it averages over does
        not depend on its fan-in.
      clip_norm: largest norm of a gradient; 0: no clipping.
      frozen: regular expression of parameters that keep their initial values (see `frozen`).
      label_smoothing: `smoothing` of `objectives.cross_entropy` in training, in `train/loss` too;
        an evaluation is never smoothed.
      log_every, eval_every, checkpoint_every: steps between two lines, evaluations, checkpoints.
      eval_batch_size: rows of a step of an evaluation.
      eval_windows, curve_windows: rows scored at the end, and for learning curves; 0: all.
    """

    steps: int = 800
    batch_size: int = 16
    accumulate: int = 1
    length: int = 64
    seeds: tuple[int, ...] = (0, 1, 2)
    optimizer: str = "adamw"
    schedule: str = "cosine"
    learning_rate: float = 3e-3
    final_learning_rate: float = 3e-4
    warmup_steps: int = 50
    decay_share: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    base_fan_in: int | None = None
    clip_norm: float = 1.0
    frozen: str = ""
    label_smoothing: float = 0.0
    log_every: int = 50
    eval_every: int = 100
    eval_batch_size: int = 64
    eval_windows: int = 2048
    curve_windows: int = 256
    checkpoint_every: int = 400

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name not in _NOT_NUMBERS:
                _check_number(field.name, getattr(self, field.name))
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers of 0 or more, not {self.seeds}")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by accumulate {self.accumulate}; "
                f"use a multiple of {self.accumulate}"
            )
        if self.decay_share > 1:
            raise ValueError(f"decay_share must be at most 1, not {self.decay_share}")
        if self.label_smoothing >= 1:
            raise ValueError(f"label_smoothing must be below 1, not {self.label_smoothing}")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} must be below steps {self.steps}; lower it"
            )
        try:
            re.compile(self.frozen)
        except re.error as error:
            raise ValueError(f"frozen={self.frozen!r} is no regular expression: {error}") from None
        make_optimizer(self)  # raises where the optimizer cannot be made of these fields


def _check_number(name: str, value: float | None) -> None:
    if name == "base_fan_in" and value is None:
        return
    may_be_zero = name in _MAY_BE_ZERO
    if value is None or isinstance(value, bool) or value < 0 or (value == 0 and not may_be_zero):
        least = "0 or more" if may_be_zero else "more than 0"
        raise ValueError(f"{name} must be {least}, not {value!r}")


_NOT_NUMBERS = {"seeds", "optimizer", "schedule", "frozen"}
_MAY_BE_ZERO = {
    "final_learning_rate", "warmup_steps", "weight_decay", "eval_windows", "beta1",
    "label_smoothing", "clip_norm",
}  # fmt: skip
