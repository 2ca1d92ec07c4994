"""`Task`: what is asked of a model, and what an answer is worth."""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.training.sources.source import Batch, Sizes, Source


class Example(NamedTuple):
    """A batch as the model sees it. The first axis of every array is the rows."""

    inputs: dict[str, Array]
    """The arguments of the model's call."""
    targets: Any
    weights: Array
    """One per target: 1 where it counts, else 0."""
    sizes: Array | None = None
    """What a target stands for in the unit of a metric: its bytes. None: 1 each."""


class Metric(NamedTuple):
    """A number that says how good answers are: sum(amounts) / sum(counts) / divisor.

    Both sums add over batches and processes.
    """

    name: str
    """In files: `heldout_bits_per_byte`."""
    unit: str
    """In words, behind a number: "2.71 bits per byte"."""
    better: str
    """"lower" or "higher"."""
    measure: Callable[[Any, Example], tuple[Array, Array]] | None = None
    """(what the model answered, example) -> (amounts, counts), arrays to be summed. None: the
    number comes from the task's `closing` alone."""
    divisor: float = 1.0
    digits: int = 3
    """Decimals that are shown."""

    def describe(self) -> dict[str, Any]:
        """What a report needs to know, as JSON."""
        return {name: getattr(self, name) for name in ("name", "unit", "better", "digits")}


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


def _nats(outputs: Any, example: Example) -> tuple[Array, Array]:
    """Code length of the targets, and how much they stand for."""
    weights, sizes = example.weights, example.sizes
    counts = weights if sizes is None else weights * sizes
    return cross_entropy(outputs, example.targets) * weights, counts


def _right(outputs: Any, example: Example) -> tuple[Array, Array]:
    """Targets that have the largest output."""
    hits = jnp.argmax(outputs, axis=-1) == example.targets
    return hits * example.weights, example.weights


def bits(per: str) -> Metric:
    """Code length in bits per `per`: "byte", "target token"."""
    name = f"bits_per_{per.replace(' ', '_')}"
    return Metric(name, f"bits per {per}", "lower", _nats, math.log(2))


def squared_error(answers: Array, targets: Array, smoothing: float = 0.0) -> Array:
    """|answer - target|^2 over the last axis. Raises ValueError with a `smoothing`: numbers have no
    other classes.

    >>> squared_error(jnp.array([[1.0, 5.0]]), jnp.array([[0.0, 3.0]])).tolist()
    [5.0]
    """
    if smoothing:
        raise ValueError(
            f"a squared error has no smoothing; set label_smoothing=0, not {smoothing}"
        )
    return jnp.sum(jnp.square(answers - targets), axis=-1)


def _squares(outputs: Any, example: Example) -> tuple[Array, Array]:
    """Squared errors of the targets that count."""
    return squared_error(outputs, example.targets) * example.weights, example.weights


def unexplained() -> Metric:
    """The mean squared error of targets of mean 0 and variance 1, in percent: 100 is the mean, said
    always."""
    unit = "% of variance unexplained"
    return Metric("unexplained", unit, "lower", _squares, 0.01, digits=4)


def accuracy(of: str) -> Metric:
    """Share of the targets that have the largest output, in percent: "% of `of` right"."""
    return Metric("accuracy", f"% of {of} right", "higher", _right, 0.01, digits=2)


class Task(NamedTuple):
    """A question. `prepare(batch, key, sizes)` makes of a source's batch what the model sees.

    Places that `batch["valid"]` says are filling have weight 0. Tokens of the task's own are
    `sizes.vocab_size` and on, one per entry of `symbols`.
    """

    prepare: Callable[..., Example]
    asks: str
    """What is to be predicted, in words: "every next token"."""
    kinds: tuple[str, ...]
    """The kinds of model that can answer it."""
    metrics: tuple[Metric, ...]
    """The main one first."""
    needs: tuple[str, ...] = ("tokens",)
    """Arrays that a batch must have."""
    reads: str = "logits"
    """Which of a model's outputs is the answer: "logits", "classes", "pooled", ..."""
    loss: Callable[..., Array] = cross_entropy
    """(answer, targets, smoothing) -> one number per target, in nats where it is a likelihood."""
    symbols: tuple[str, ...] = ()
    """How the task's own tokens are written."""
    closing: Callable[..., dict[str, float]] | None = None
    """(model, params of one seed, source) -> metric -> value, once at the end: what needs whole
    texts to be written (BLEU)."""

    def bind(self, sizes: Sizes) -> "Task":
        """The question about a source of these sizes."""
        return self._replace(prepare=functools.partial(self.prepare, sizes=sizes))

    def answer(
        self, model: Any, params: Any, inputs: dict[str, Any], **options: Any
    ) -> tuple[Array, dict[str, Array]]:
        """(the output that the task reads, the auxiliary losses of the model by name).

        `options` go to the model's call.
        """
        outputs = model.apply({"params": params}, **inputs, **options)
        return getattr(outputs, self.reads), dict(outputs.losses)


def abstract_inputs(task: Task, batch: Batch) -> dict[str, Any]:
    """Shapes of the arguments of the model's call, for a batch of these shapes.

    Raises ValueError where the task cannot be made of such a batch. Nothing is computed.
    """
    if missing := [name for name in task.needs if name not in batch]:
        raise ValueError(
            f"the task needs batches with {', '.join(missing)}, the source has "
            f"{', '.join(batch)}; choose another task or data.source"
        )
    return jax.eval_shape(lambda b: task.prepare(b, jax.random.key(0)), batch).inputs


def written(task: Task, source: Source, tokens: Sequence[int]) -> str:
    """Tokens as a person reads them: those of the source by it, the task's own by their symbols.

    >>> from attnlab.training import sources, tasks
    >>> written(tasks.TASKS["masked_lm"], sources.Text().load(8), [*b"a b", 256, *b"c"])
    'a b[mask]c'
    """
    size, pieces = source.sizes.vocab_size, []
    for own, run in groupby(map(int, tokens), lambda token: token >= size):
        ids = list(run)
        pieces += [task.symbols[t - size] for t in ids] if own else [source.write(ids)]
    return "".join(pieces)
