"""The initial state, a training step and evaluation, of one seed and of several in one program."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from attnlab.data.dataset import Batch, BatchShapes, Dataset, DeviceBatch, DeviceBatches
from attnlab.models import ModelConfig
from attnlab.sharing import Params, PyTree
from attnlab.training import sharding
from attnlab.training.chunked_loss import mean_loss
from attnlab.training.config import TrainConfig
from attnlab.training.objectives.objective import (
    Example,
    Inputs,
    Losses,
    Model,
    Objective,
    input_shapes,
)  # fmt: skip
from attnlab.training.optimizers import Optimizer
from attnlab.training.sharding import StateSharding

InitParams: TypeAlias = Callable[[Array, Inputs], Params]
"""(key, inputs of a model's call) -> parameters."""


class TrainState(NamedTuple):
    """The state of a run at a step. In `fit` every leaf has a leading axis of seeds.

    first = jax.tree.map(lambda a: a[0], result.state)  # of the first seed
    model.apply({"params": first.params}, tokens)

    Attributes:
      params, opt_state, step: after so many steps.
      window: sums since the last log line, so that the log of a resumed run is the same: of the
        "loss", and of each auxiliary loss of the model by its name.
    """

    params: Params
    opt_state: optax.OptState
    step: jax.Array
    window: Losses


def map_over_seeds(step: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`step` for a leading axis of seeds on every argument.

    One seed after the other on a CPU, where that is faster and bit-equal to each seed alone;
    vectorised on an accelerator.

    Args:
      step: function of trees of arrays of one seed.

    Returns:
      The function of the same trees with a leading axis of seeds [S, ...].

    >>> map_over_seeds(jnp.dot)(jnp.ones((2, 3)), jnp.ones((2, 3))).tolist()  # two seeds
    [3.0, 3.0]
    """
    if jax.default_backend() == "cpu":
        return lambda *args: lax.map(lambda seed: step(*seed), args)
    return jax.vmap(step)


def new_params(model: Model, seed: int, inputs: Inputs) -> Params:
    """The parameters of `model.init` for a seed. Equal models share one compiled program, so a
    process compiles it once for all seeds and runs.

    Args:
      model: with `init`.
      seed: of the run.
      inputs: of the model's call; only shapes and dtypes matter.
    """
    try:
        hash(model)
    except TypeError:  # of a module with a list, say
        init: Callable[..., Params] = jax.jit(functools.partial(_init, model))
    else:
        init = functools.partial(_shared_init, model)
    return init(np.uint32(seed), inputs)


def _init(model: Model, seed: np.uint32, inputs: Inputs) -> Params:
    params: Params = model.init(jax.random.key(seed), **inputs)["params"]
    return params


_shared_init = jax.jit(_init, static_argnums=0)


def input_names(model: ModelConfig) -> tuple[str, ...]:
    """The texts that a model reads."""
    return ("source", "tokens") if model.kind == "encoder_decoder" else ("tokens",)


def smallest_inputs(model: ModelConfig) -> Inputs:
    """One token of each text."""
    return dict.fromkeys(input_names(model), jnp.zeros((1, 1), jnp.int32))


def init_state(
    model: Model,
    objective: Objective,
    transform: optax.GradientTransformation,
    batch: BatchShapes | DeviceBatch,
    seed: jax.typing.ArrayLike,
    params: Params | InitParams | None = None,
) -> TrainState:
    """The state of one seed at step 0, without an axis of seeds.

    Args:
      model: with `init` and `apply`.
      objective: what it is trained to predict.
      transform: the optimizer.
      batch: of the dataset; only shapes and dtypes matter.
      seed: of the initial parameters.
      params: parameters to start from, or a function (key, inputs) -> parameters; None: those of
        `model.init`. Parameters below float32 are widened: in bfloat16 an update of less than 0.4 %
        of a parameter would change nothing.

    Returns:
      The state, with float32 parameters and zero sums.

    >>> from attnlab.data import BYTES
    >>> from attnlab.models import ModelConfig
    >>> from attnlab.training import OBJECTIVES
    >>> task, batch = OBJECTIVES["causal_lm"].bind(BYTES), {"tokens": jnp.zeros((1, 9), int)}
    >>> model = ModelConfig(width=8, num_layers=1).build()
    >>> state = jax.eval_shape(lambda: init_state(model, task, optax.sgd(0.1), batch, 0))
    >>> state.params["embedding"]
    ShapeDtypeStruct(shape=(256, 8), dtype=float32)
    """
    row = {name: jnp.zeros((1, *a.shape[1:]), a.dtype) for name, a in batch.items()}
    row = lax.optimization_barrier(row)  # else the compiler folds a forward pass of constants
    inputs = objective.prepare(row, jax.random.key(0)).inputs
    key = jax.random.key(seed)
    if params is None:
        params = model.init(key, **inputs)["params"]
    made: Params = params(key, inputs) if callable(params) else params
    made = jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), made)
    _, losses = jax.eval_shape(lambda p, i: objective.predict(model, p, i), made, inputs)
    window = {name: jnp.zeros(a.shape, a.dtype) for name, a in losses.items()}
    window["loss"] = jnp.zeros(())
    return TrainState(made, transform.init(made), jnp.zeros((), jnp.int32), window)


def train_step(
    model: Model,
    objective: Objective,
    transform: optax.GradientTransformation,
    state: TrainState,
    batch: DeviceBatch,
    seed: jax.typing.ArrayLike,
    *,
    accumulate: int = 1,
    loss_tokens: int = 0,
) -> TrainState:
    """One optimizer step of one seed on a batch of a dataset.

    The loss is sum(w l) / sum(w) over the targets of the whole batch, l the objective's loss and w
    the weights of the targets, for any number of parts `accumulate`: the gradient is the sum over
    the parts of the gradients of sum(w l), divided by the sum of w over all parts. (A mean of the
    parts' means would give targets of a part with few of them more weight.) The batch is prepared
    whole, so the targets do not depend on `accumulate`; dropout does.

    The auxiliary losses of the model (`Outputs.losses`) are added, each with weight 1. With
    `accumulate` > 1 the model computes them on each part and their mean over the parts is added. If
    such a loss is no mean over rows (a product of means, say), this is another number than that of
    the whole batch. `window["loss"]` is without them.

    Args:
      model: with `apply`.
      objective: what it is trained to predict, bound to the sizes of the dataset; with
        `objective.smoothed(0.1)` the targets are smoothed.
      transform: the optimizer.
      state: of `init_state`, or the one that the last step returned.
      batch: name -> array [B, ...].
      seed: of the run; with `state.step` it decides masks and dropout.
      accumulate: parts of the batch, which must divide B.
      loss_tokens: `TrainConfig.loss_tokens`: tokens whose logits are computed at a time.

    Returns:
      The state after the step; its `window["loss"]` has grown by the loss.

        step = jax.jit(functools.partial(train_step, model, objective, optax.adam(1e-3)))
        state = init_state(model, objective, optax.adam(1e-3), batch, seed=0)
        state = step(state, batch, 0)
    """
    prepare_key, dropout_key = jax.random.split(step_key(seed, state.step))
    example = objective.prepare(batch, prepare_key)
    count = jnp.maximum(jnp.sum(example.weights), 1)

    def loss(params: Params, part: Example, key: Array) -> tuple[Array, Losses]:
        value, auxiliary = mean_loss(
            objective, model, params, part, count, tokens=loss_tokens,
            deterministic=False, rngs={"dropout": key},
        )  # fmt: skip
        auxiliary = {name: a / accumulate for name, a in auxiliary.items()}
        return sum(auxiliary.values(), value), {**auxiliary, "loss": value}

    grad = functools.partial(jax.grad(loss, has_aux=True), state.params)
    if accumulate == 1:
        grads, losses = grad(example, dropout_key)
    else:
        grads, losses = _sum_over_parts(grad, example, dropout_key, accumulate)
    updates, opt_state = transform.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    window = jax.tree.map(jnp.add, state.window, losses)
    return TrainState(params, opt_state, state.step + 1, window)


def step_key(seed: jax.typing.ArrayLike, step: jax.typing.ArrayLike) -> Array:
    """The key of a step. `train_step` splits it in two; a generated batch has a third."""
    return jax.random.fold_in(jax.random.key(seed), step)


def _sum_over_parts(
    call: Callable[[Example, Array], PyTree], example: Example, key: Array, count: int
) -> PyTree:
    """The sum of `call(part, key)` over the parts, one after the other."""
    # Part i has the rows i, i + count, ...: so every device has rows of every part.
    parts = jax.tree.map(lambda a: a.reshape(-1, count, *a.shape[1:]).swapaxes(0, 1), example)
    inputs = parts, jax.random.split(key, count)
    shapes = jax.eval_shape(lambda s: call(*jax.tree.map(lambda a: a[0], s)), inputs)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

    def add(sums: PyTree, part: tuple[Example, Array]) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, sums, call(*part)), None

    return lax.scan(add, zeros, inputs)[0]


def state_of_seeds(
    model: Model, objective: Objective, transform: optax.GradientTransformation,
    shapes: BatchShapes, seeds: Sequence[int], params: Params | list[Params] | InitParams | None,
    mesh: Mesh, spec: StateSharding,
) -> tuple[TrainState, PyTree]:  # fmt: skip
    """The state of all seeds at step 0, and its shardings.

    Args:
      model, objective, transform: as of `init_state`.
      shapes: of a batch.
      seeds: of the run.
      params: `FitOptions.params`.
      mesh: of devices.
      spec: how the state is sharded.
    """
    inputs = input_shapes(objective, shapes)
    if params is None and mesh.size == 1:  # by a program that other runs use too
        zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), inputs)
        params = [new_params(model, seed, zeros) for seed in seeds]
    per_seed = params if isinstance(params, list) else [params] * len(seeds)
    if len(per_seed) != len(seeds):
        raise ValueError(
            f"FitOptions.params has {len(per_seed)} trees for {len(seeds)} seeds; give one for each"
        )

    @functools.partial(jax.jit, static_argnames="params" if callable(params) else ())
    def make(seed: Array, params: Params | InitParams | None) -> PyTree:
        state = init_state(model, objective, transform, shapes, seed, params)
        where = sharding.state_shardings(mesh, spec, state)
        return lax.with_sharding_constraint(state, where)

    if not callable(params):  # they may be on one device, and the mesh has several
        per_seed = [sharding.gather(one) for one in per_seed]
    pairs = zip(seeds, per_seed, strict=True)
    states = [sharding.gather(make(np.uint32(seed), params=p)) for seed, p in pairs]
    of_one = sharding.state_shardings(mesh, spec, states[0])
    shardings = jax.tree.map(lambda one: NamedSharding(mesh, P(None, *one.spec)), of_one)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    return sharding.place(shardings, stacked), shardings


def step_of_seeds(
    model: Model, objective: Objective, optimizer: Optimizer, config: TrainConfig,
    dataset: Dataset, mesh: Mesh,
) -> Callable[..., TrainState]:  # fmt: skip
    """(state, batch [S, B, ...], seeds, device arrays) -> state: one step of all seeds.

    A batch that the dataset generates on the device is made inside the step.

        step = jax.jit(step_of_seeds(model, objective, optimizer, config, dataset, mesh))
        state = step(state, host_batch(dataset, config, mesh, 0), seeds, device_arrays)
    """
    smoothed = objective.smoothed(config.label_smoothing)

    def step(
        state: TrainState, batch: DeviceBatch, seeds: Array, device_arrays: DeviceBatch
    ) -> TrainState:
        def of_seed(state: TrainState, batch: DeviceBatch, seed: Array) -> TrainState:
            if isinstance(batches := dataset.batches, DeviceBatches):
                key = jax.random.fold_in(step_key(seed, state.step), 2)
                batch = batches.generate(device_arrays, key, config.batch_size)
                batch = lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data")))
            return train_step(
                model, smoothed, optimizer.transform, state, batch, seed,
                accumulate=config.accumulate, loss_tokens=config.loss_tokens,
            )  # fmt: skip

        new: TrainState = map_over_seeds(of_seed)(state, batch, seeds)
        return new

    return step


def host_batch(dataset: Dataset, config: TrainConfig, mesh: Mesh, step: int) -> DeviceBatch:
    """The batches of all seeds [S, B, ...], sharded over the devices; empty where the dataset
    generates them."""
    if isinstance(dataset.batches, DeviceBatches):
        return {}
    part = sharding.rows_of_process(config.batch_size)
    batches = [dataset.batches(seed, step, config.batch_size, part) for seed in config.seeds]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *batches)
    return {name: sharding.shard_batch(mesh, a, axis=1) for name, a in stacked.items()}


class Evaluator:
    """(params [S, ...], scored rows of a dataset) -> {"loss" and every metric: [S]}.

    Args:
      model: that the parameters are of.
      objective: bound to the sizes of the dataset.
      mesh: of devices.
      batch_size: rows that are computed at a time.

    Every text is scored with the same random masks, whatever the model. Loss and metrics are summed
    for each row by itself, and only rows of the dataset count, whatever the objective does with
    those that fill the last batch or are all padding (`valid` is False). Raises ValueError where no
    target counts.

        evaluate = Evaluator(model, objective, mesh, batch_size=64)
        scores = evaluate(result.state.params, dataset.heldout(0))  # {"loss": [S], ...}
    """

    def __init__(self, model: Model, objective: Objective, mesh: Mesh, batch_size: int) -> None:
        self._model, self._objective, self._mesh = model, objective, mesh
        self._batch_size = batch_size
        self._metrics = [m for m in objective.metrics if m.measure is not None]
        self._sums = jax.jit(self._sums_of_seeds, out_shardings=NamedSharding(mesh, P()))

    def __call__(self, params: Params, rows: Batch) -> dict[str, np.ndarray]:
        totals, count = np.zeros((1, 1, 2)), len(next(iter(rows.values())))
        groups = self._mesh.shape["data"]
        size = min(self._batch_size, -(-count // groups) * groups)
        for number, start in enumerate(range(0, count, self._batch_size)):
            batch = {name: self._place(a[start : start + size], size) for name, a in rows.items()}
            counts = self._place(np.ones(min(size, count - start), bool), size)
            sums = self._sums(params, batch, counts, np.uint32(number))
            totals = totals + np.asarray(sums, np.float64)
        if not totals[..., 0, 1].all():
            raise ValueError(
                f"no target of the {count} scored rows counts; score more rows (evaluation.windows "
                "and evaluation.curve_windows) or longer ones"
            )
        means = totals[..., 0] / totals[..., 1] / [1.0, *(m.divisor for m in self._metrics)]
        names = ["loss", *(m.name for m in self._metrics)]
        return dict(zip(names, means.T, strict=True))

    def _place(self, rows: np.ndarray, size: int) -> Array:
        """A batch of `size` rows on the devices; those at the end are zeros."""
        padded = np.pad(rows, [(0, size - len(rows))] + [(0, 0)] * (rows.ndim - 1))
        return sharding.shard_batch(self._mesh, padded[sharding.rows_of_process(size)], axis=0)

    def _sums_of_seeds(
        self, params: Params, batch: DeviceBatch, counts: Array, number: Array
    ) -> Array:
        """[S, metrics, 2]: sums of amounts and of counts; `counts` [B] is False for the rows that
        fill the batch."""
        # The same masks for every model: the key depends on the number of the batch alone.
        key = jax.random.fold_in(jax.random.key(0), number)
        example = self._objective.prepare(batch, key)
        if "valid" in batch:
            counts = counts & jnp.any(batch["valid"].reshape(len(counts), -1), axis=1)

        def of_row(row: tuple[Array, Array, Example]) -> Array:
            prediction, losses, example = jax.tree.map(lambda a: a[None], row)
            pairs = [(losses * example.weights, example.weights)]
            pairs += [m.measure(prediction, example) for m in self._metrics if m.measure]
            return jnp.array([[jnp.sum(a), jnp.sum(n)] for a, n in pairs])

        def of_seed(params: Params) -> Array:
            prediction, _ = self._objective.predict(self._model, params, example.inputs)
            losses = self._objective.loss(prediction, example.targets, smoothing=0.0)
            sums = jax.vmap(of_row)((prediction, losses, example))
            return jnp.sum(jnp.where(counts[:, None, None], sums, 0), axis=0)

        sums: Array = map_over_seeds(of_seed)(params)
        return sums
