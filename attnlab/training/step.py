"""The steps of S seeds in one compiled program, and their evaluation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

from attnlab.training import shard
from attnlab.training.tasks import Example, Task, cross_entropy


class TrainState(NamedTuple):
    """What a run is at a step. Every leaf has a leading seeds axis."""

    params: Any
    opt_state: Any
    step: jax.Array
    window_loss: jax.Array
    """Sum of the losses since the last log line, so that a resumed log is the same too."""


def over_seeds(step: Callable) -> Callable:
    """`step` for a leading seeds axis on every argument.

    One after the other on a CPU, where that is faster and bit-equal to each seed alone; side by
    side on an accelerator.
    """
    if jax.default_backend() == "cpu":
        return lambda *args: lax.map(lambda row: step(*row), args)
    return jax.vmap(step)


def init_state(
    model: Any, task: Task, optimizer: Any, length: int, seed: Any, params: Any = None
) -> TrainState:
    """The state of one seed at step 0, without the seeds axis: with fresh weights, or `params`."""
    if params is None:
        window = jnp.zeros((1, length + 1), jnp.int32)
        inputs = task.prepare(window, jax.random.key(0)).inputs
        params = model.init(jax.random.key(seed), **inputs)["params"]
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(params), zero, jnp.zeros(()))


def train_step(
    model: Any,
    task: Task,
    optimizer: Any,
    state: TrainState,
    tokens: Any,
    seed: Any,
    *,
    accumulate: int = 1,
    label_smoothing: float = 0.0,
) -> TrainState:
    """One optimizer step of one seed on tokens [B, T + 1].

    The loss is sum(w nats) / sum(w) over the targets of the whole batch, w their weights, however
    many parts it goes through in: the gradient is the sum over the parts of the gradients of
    sum(w nats), divided by the sum of w over all parts. (A mean of the parts' means would weigh
    targets of a part that has few of them more.) The batch is prepared whole, so the targets do
    not depend on `accumulate`; dropout does.
    """
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    prepare_key, dropout_key = jax.random.split(key)
    example = task.prepare(tokens, prepare_key)
    count = jnp.maximum(jnp.sum(example.weights), 1)

    def loss(params, part, dropout_key):
        rngs = {"dropout": dropout_key}
        logits = model.apply({"params": params}, **part.inputs, deterministic=False, rngs=rngs)
        nats = cross_entropy(logits, part.targets, label_smoothing) * part.weights
        return jnp.sum(nats) / count

    value_and_grad = functools.partial(jax.value_and_grad(loss), state.params)
    if accumulate == 1:
        value, grads = value_and_grad(example, dropout_key)
    else:
        value, grads = _in_parts(value_and_grad, example, dropout_key, accumulate)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.step + 1, state.window_loss + value)


def _in_parts(call: Callable, example: Example, key: jax.Array, count: int) -> Any:
    """The sum of what `call(part, key)` gives for every part, one after the other."""
    # Part i has the rows i, i + count, ...: so every device has rows of every part.
    parts = jax.tree.map(lambda a: a.reshape(-1, count, *a.shape[1:]).swapaxes(0, 1), example)
    steps = parts, jax.random.split(key, count)
    shapes = jax.eval_shape(lambda s: call(*jax.tree.map(lambda a: a[0], s)), steps)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    add = lambda sums, step: (jax.tree.map(jnp.add, sums, call(*step)), None)
    return lax.scan(add, zeros, steps)[0]


def make_evaluate(model: Any, task: Task, mesh: Mesh, batch_size: int) -> Callable:
    """(params [S, ...], windows, valid) -> mean loss [S] in nats over the targets that count."""

    def sums(params, tokens, valid, key):
        example = task.prepare(tokens, key, valid)
        logits = model.apply({"params": params}, **example.inputs)
        nats = cross_entropy(logits, example.targets) * example.weights
        return jnp.sum(nats), jnp.sum(example.weights)

    @jax.jit
    def batch_sums(params, tokens, valid, key):
        return over_seeds(lambda p: sums(p, tokens, valid, key))(params)

    processes, process = jax.process_count(), jax.process_index()

    def evaluate(params, tokens, valid):
        totals = np.zeros(2)
        for i, start in enumerate(range(0, len(tokens), batch_size)):
            rows = [_fill(a[start : start + batch_size], batch_size) for a in (tokens, valid)]
            mine = [a[process * batch_size // processes :][: batch_size // processes] for a in rows]
            placed = [shard.spread(mesh, a, axis=0) for a in mine]
            # The same masks for every model: the key depends on the batch alone.
            got = batch_sums(params, *placed, jax.random.fold_in(jax.random.key(0), i))
            totals = totals + np.asarray(got, np.float64).T
        return totals[:, 0] / totals[:, 1]

    return evaluate


def _fill(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows of zeros (which do not count) up to `count`."""
    return np.pad(rows, [(0, count - len(rows))] + [(0, 0)] * (rows.ndim - 1))
