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
from attnlab.training.sources.source import Batch
from attnlab.training.tasks.task import Example, Task


class TrainState(NamedTuple):
    """What a run is at a step. Every leaf has a leading seeds axis."""

    params: Any
    opt_state: Any
    step: jax.Array
    window_loss: jax.Array
    """Sum of the losses since the last log line, so that a resumed log is the same too."""
    window_auxiliary: dict[str, jax.Array] = {}  # noqa: RUF012
    """The same of each auxiliary loss of the model, by name."""


def over_seeds(step: Callable) -> Callable:
    """`step` for a leading seeds axis on every argument.

    One after the other on a CPU, where that is faster and bit-equal to each seed alone; side by
    side on an accelerator.
    """
    if jax.default_backend() == "cpu":
        return lambda *args: lax.map(lambda row: step(*row), args)
    return jax.vmap(step)


def init_state(
    model: Any, task: Task, transform: Any, batch: Batch, seed: Any, params: Any = None
) -> TrainState:
    """The state of one seed at step 0, without the seeds axis: with fresh weights, or `params`,
    which may be a function (key, inputs) -> weights. Weights of less than float32 are widened: in
    bfloat16 an update of less than 0.4 % of a weight would change nothing.

    Of `batch` shapes and dtypes count alone.
    """
    row = jax.tree.map(lambda a: jnp.zeros((1, *a.shape[1:]), a.dtype), batch)
    row = lax.optimization_barrier(row)  # else the compiler folds a forward pass of constants
    inputs = task.prepare(row, jax.random.key(0)).inputs
    if params is None or callable(params):
        key = jax.random.key(seed)
        params = params(key, inputs) if params else model.init(key, **inputs)["params"]
    params = jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), params)
    _, losses = jax.eval_shape(lambda p, inputs: task.answer(model, p, inputs), params, inputs)
    auxiliary = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), losses)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, transform.init(params), zero, jnp.zeros(()), auxiliary)


def train_step(
    model: Any,
    task: Task,
    transform: Any,
    state: TrainState,
    batch: Batch,
    seed: Any,
    *,
    accumulate: int = 1,
    label_smoothing: float = 0.0,
) -> TrainState:
    """One step of the optimizer's `transform`, of one seed, on a batch of a source.

    The loss is sum(w l) / sum(w) over the targets of the whole batch, l the task's loss and w their
    weights, however many parts it goes through in: the gradient is the sum over the parts of the
    gradients of sum(w l), divided by the sum of w over all parts. (A mean of the parts' means would
    weigh targets of a part that has few of them more.) The batch is prepared whole, so the targets
    do not depend on `accumulate`; dropout does.

    The auxiliary losses of the model (`Outputs.losses`) are added, each with weight 1. With
    `accumulate` > 1 a model measures them on each part, and their mean over the parts is added: of
    a loss that is no mean over rows, as a product of means, this is another number than that of the
    whole batch. `window_loss` is without them.
    """
    prepare_key, dropout_key = jax.random.split(step_key(seed, state.step))
    example = task.prepare(batch, prepare_key)
    count = jnp.maximum(jnp.sum(example.weights), 1)

    def loss(params, part, dropout_key):
        rngs = {"dropout": dropout_key}
        answer, auxiliary = task.answer(
            model, params, part.inputs, deterministic=False, rngs=rngs
        )
        value = jnp.sum(task.loss(answer, part.targets, label_smoothing) * part.weights) / count
        auxiliary = {name: a / accumulate for name, a in auxiliary.items()}
        return sum(auxiliary.values(), value), (value, auxiliary)

    grad = functools.partial(jax.grad(loss, has_aux=True), state.params)
    if accumulate == 1:
        grads, (value, auxiliary) = grad(example, dropout_key)
    else:
        grads, (value, auxiliary) = _in_parts(grad, example, dropout_key, accumulate)
    updates, opt_state = transform.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    sums = jax.tree.map(jnp.add, state.window_auxiliary, auxiliary)
    return TrainState(params, opt_state, state.step + 1, state.window_loss + value, sums)


def step_key(seed: Any, step: Any) -> jax.Array:
    """The key of a step. `train_step` splits it in two; `fold_in(key, 2)` is another, for draws."""
    return jax.random.fold_in(jax.random.key(seed), step)


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
    """(params [S, ...], rows of a source) -> {"loss" and every metric that is measured: [S]}."""
    measures = [m.measure for m in task.metrics if m.measure is not None]
    measured = [m for m in task.metrics if m.measure is not None]

    def sums(params, batch, key):
        example = task.prepare(batch, key)
        answer, _ = task.answer(model, params, example.inputs)
        losses = task.loss(answer, example.targets, 0.0)
        pairs = [(losses * example.weights, example.weights)]
        pairs += [measure(answer, example) for measure in measures]
        return jnp.array([[jnp.sum(a), jnp.sum(n)] for a, n in pairs])

    @functools.partial(jax.jit, out_shardings=shard.whole(mesh))
    def batch_sums(params, batch, key):
        return over_seeds(lambda p: sums(p, batch, key))(params)

    processes, process = jax.process_count(), jax.process_index()
    names = ["loss", *(m.name for m in measured)]
    divisors = [1.0, *(m.divisor for m in measured)]

    def evaluate(params, rows):
        totals, count = np.zeros(()), len(jax.tree.leaves(rows)[0])
        groups = mesh.shape["data"]
        size = min(batch_size, -(-count // groups) * groups)
        mine = slice(process * size // processes, (process + 1) * size // processes)
        for i, start in enumerate(range(0, count, size)):
            part = jax.tree.map(lambda a: _fill(a[start : start + size], size)[mine], rows)  # noqa: B023
            placed = jax.tree.map(lambda a: shard.spread(mesh, a, axis=0), part)
            # The same masks for every model: the key depends on the batch alone.
            got = batch_sums(params, placed, jax.random.fold_in(jax.random.key(0), i))
            totals = totals + np.asarray(got, np.float64)  # [S, metrics, 2]
        means = totals[..., 0] / totals[..., 1] / divisors
        return dict(zip(names, means.T, strict=True))

    return evaluate


def _fill(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows of zeros (which do not count) up to `count`."""
    return np.pad(rows, [(0, count - len(rows))] + [(0, 0)] * (rows.ndim - 1))
