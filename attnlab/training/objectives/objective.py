"""`Objective`: what a model is trained to predict, its loss and its metrics."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.attention.masks import Edges
from attnlab.data.dataset import BYTES, Batch, BatchShapes, Dataset, DataSizes, DeviceBatch
from attnlab.models import ModelConfig, Outputs
from attnlab.models.config import Kind
from attnlab.sharing import Params, PyTree

Inputs: TypeAlias = dict[str, Array | Edges]
"""Arguments of a model's call."""
Losses: TypeAlias = dict[str, Array]
"""Auxiliary losses by name."""


@runtime_checkable
class Model(Protocol):
    """What training needs of a model; those of `attnlab.models` have it."""

    @property
    def init(self) -> Callable[..., Mapping[str, Params]]:
        """(key, inputs of a call) -> {"params": new parameters}."""

    @property
    def apply(self) -> Callable[..., Outputs]:
        """({"params": params}, inputs of a call) -> outputs."""


class Example(NamedTuple):
    """A batch as the model reads it. The first axis of every array is the rows.

    Attributes:
      inputs: arguments of the model's call.
      targets: what it is to predict.
      weights: one per target: 1 if it counts, else 0.
      sizes: how many units of a metric a target stands for: its bytes. None: 1 each.
    """

    inputs: Inputs
    targets: Array
    weights: Array
    sizes: Array | None = None


Sums: TypeAlias = tuple[Array, Array]
"""(amounts, counts): arrays to be summed."""


@runtime_checkable
class Prepare(Protocol):
    """Makes the `Example` of a batch. Where `valid` of the batch is False inside a row, weights are
    0; whole rows of padding are left out in evaluation."""

    def __call__(self, batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example: ...


@runtime_checkable
class Loss(Protocol):
    """(predictions, targets, label smoothing) -> one number per target."""

    def __call__(self, predictions: Array, targets: Array, /, smoothing: float = 0.0) -> Array: ...


class Metric(NamedTuple):
    """A number that says how good predictions are: sum(amounts) / sum(counts) / divisor.

    Both sums add over rows, batches and processes.

    Attributes:
      name: in files: `heldout_bits_per_byte`.
      unit: in words, after a number: "2.71 bits per byte".
      better: which numbers are.
      measure: (prediction, example) of one row, arrays [1, ...] -> `Sums`. It is mapped over the
        rows with `jax.vmap`, so that those of padding are left out. None: the objective's
        `final_metrics` return the number.
      divisor: of the mean.
      digits: decimals in a report.
    """

    name: str
    unit: str
    better: Literal["lower", "higher"]
    measure: Callable[[Array, Example], Sums] | None = None
    divisor: float = 1.0
    digits: int = 3


def cross_entropy(
    logits: Float[Array, "*B vocab"], targets: Int[Array, "*B"], smoothing: float = 0.0
) -> Float[Array, "*B"]:
    """-sum_v q_v log softmax(logits)_v in nats, with q_v = (1 - e) [v = target] + e / vocab.

    e is `smoothing`; with 0 it is -log softmax(logits)[target]. Label smoothing is of Szegedy et
    al. 2016, section 7, arXiv 1512.00567, used by Vaswani et al. 2017, section 5.4, with e = 0.1;
    the uniform part covers the whole vocabulary, the target included.

    >>> cross_entropy(jnp.zeros((1, 1, 4)), jnp.array([[2]])) == jnp.log(4)
    Array([[ True]], dtype=bool)
    """
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if smoothing:
        picked = (1 - smoothing) * picked + smoothing * jnp.mean(logits, axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def squared_error(
    predictions: Float[Array, "*B A"], targets: Float[Array, "*B A"], smoothing: float = 0.0
) -> Float[Array, "*B"]:
    """|prediction - target|^2 over the last axis. Raises ValueError with a `smoothing`: numbers
    have no other classes.

    >>> squared_error(jnp.array([[1.0, 5.0]]), jnp.array([[0.0, 3.0]])).tolist()
    [5.0]
    """
    if smoothing:
        raise ValueError(f"label_smoothing must be 0 with a squared error, not {smoothing}")
    return jnp.sum(jnp.square(predictions - targets), axis=-1)


def _nats(logits: Array, example: Example) -> Sums:
    """Code length of the targets, and how many units they stand for."""
    weights, sizes = example.weights, example.sizes
    counts = weights if sizes is None else weights * sizes
    return cross_entropy(logits, example.targets) * weights, counts


def _correct(logits: Array, example: Example) -> Sums:
    """Targets that have the largest logit."""
    hits = jnp.argmax(logits, axis=-1) == example.targets
    return hits * example.weights, example.weights


def _squares(predictions: Array, example: Example) -> Sums:
    """Squared errors of the targets that count."""
    return squared_error(predictions, example.targets) * example.weights, example.weights


def bits(per: str) -> Metric:
    """Code length in bits per `per`: "byte", "target token"."""
    name = f"bits_per_{per.replace(' ', '_')}"
    return Metric(name, f"bits per {per}", "lower", _nats, math.log(2))


def accuracy(of: str) -> Metric:
    """Share of the targets that have the largest logit, in percent: "% of `of` right"."""
    return Metric("accuracy", f"% of {of} right", "higher", _correct, 0.01, digits=2)


def unexplained_variance() -> Metric:
    """The mean squared error of targets of mean 0 and variance 1, in percent: 100 is what always
    predicting the mean gives."""
    unit = "% of variance unexplained"
    return Metric("unexplained", unit, "lower", _squares, 0.01, digits=4)


class Objective(NamedTuple):
    """What a model is trained to predict.

    Attributes:
      prepare: (batch of a dataset, key, sizes of the data) -> what the model reads, targets,
        weights.
      description: what is predicted, in words: "every next token".
      model_kinds: the kinds of model that can be trained on it.
      metrics: the main one first.
      required_arrays: arrays that a batch must have.
      output: the field of `Outputs` that is the prediction: "logits", "classes", "pooled", ...
      loss: in nats if it is a likelihood.
      special_tokens: names of the objective's own tokens, which are `sizes.vocab_size` and on.
      final_metrics: (model, params of one seed, dataset) -> metric -> value, computed once at the
        end: what needs whole texts to be generated (BLEU).

    >>> from attnlab.data import BYTES
    >>> from attnlab.training import OBJECTIVES
    >>> task = OBJECTIVES["causal_lm"].bind(BYTES)
    >>> example = task.prepare({"tokens": jnp.array([[7, 8, 9]])}, jax.random.key(0))
    >>> {name: a.tolist() for name, a in example.inputs.items()}, example.targets.tolist()
    ({'tokens': [[7, 8]]}, [[8, 9]])
    """

    prepare: Prepare
    description: str
    model_kinds: tuple[Kind, ...]
    metrics: tuple[Metric, ...]
    required_arrays: tuple[str, ...] = ("tokens",)
    output: str = "logits"
    loss: Loss = cross_entropy
    special_tokens: tuple[str, ...] = ()
    final_metrics: Callable[[Model, Params, Dataset], dict[str, float]] | None = None

    def bind(self, sizes: DataSizes) -> "Objective":
        """The objective for data of these sizes."""
        return self._replace(prepare=functools.partial(self.prepare, sizes=sizes))

    def smoothed(self, share: float) -> "Objective":
        """The objective with this share of a target spread over all classes (label smoothing)."""
        return self._replace(loss=functools.partial(self.loss, smoothing=share))

    def predict(
        self, model: Model, params: Params, inputs: Inputs, **options: PyTree
    ) -> tuple[Array, Losses]:
        """(prediction, auxiliary losses of the model by name); `options` go to the model's call."""
        outputs = model.apply({"params": params}, **inputs, **options)
        prediction: Array = getattr(outputs, self.output)
        return prediction, dict(outputs.losses)


def input_shapes(objective: Objective, batch: Batch | BatchShapes) -> dict[str, PyTree]:
    """Shapes of the arguments of the model's call, for a batch of these shapes. Computes nothing.

    Raises:
      ValueError: the batch lacks an array that the objective needs.
    """
    if missing := [name for name in objective.required_arrays if name not in batch]:
        raise ValueError(
            f"the task needs batches with {', '.join(missing)}, the source has "
            f"{', '.join(batch)}; choose another task or data.source"
        )
    example: Example = jax.eval_shape(lambda b: objective.prepare(b, jax.random.key(0)), batch)
    return example.inputs


def check_kind(task: str, objective: Objective, model: ModelConfig) -> None:
    """Raises ValueError where a task needs another kind of model."""
    if model.kind not in objective.model_kinds:
        kinds = " or ".join(map(repr, objective.model_kinds))
        raise ValueError(f"task {task!r} needs model.kind={kinds}, not {model.kind!r}")


def check_output(task: str, objective: Objective, model: ModelConfig, sizes: DataSizes) -> None:
    """Raises ValueError where a task needs a larger vocabulary or another output."""
    most = sizes.vocab_size + len(objective.special_tokens)
    if model.vocab_size < most:
        raise ValueError(
            f"task {task!r} needs model.vocab_size of at least {most}, not {model.vocab_size}"
        )
    if objective.output == "logits" and model.output.kind == "none":
        raise ValueError(
            f"task {task!r} reads logits, model.output.kind='none' has none; give the model an "
            "LM head, or start from a folder with one"
        )
    if objective.output == "classes" and model.output.num_classes != sizes.num_classes:
        raise ValueError(
            f"task {task!r} needs model.output.num_classes={sizes.num_classes} (and a "
            f"model.output.pooler), not {model.output.num_classes}"
        )
