"""The initial state, the training step and the batches of several seeds."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from attnlab.data.dataset import Dataset, DeviceBatch, DeviceBatches
from attnlab.sharing import Params, PyTree
from attnlab.training import sharding
from attnlab.training.config import TrainConfig
from attnlab.training.objectives.objective import Model, Objective
from attnlab.training.optimizers import Optimizer
from attnlab.training.sharding import StateSharding
from attnlab.training.step import (
    InitParams,
    TrainState,
    generation_key,
    map_over_seeds,
    train_step,
)


def initial_state(
    init: Callable[[Array, Params | InitParams | None], TrainState],
    seeds: Sequence[int],
    params: Params | list[Params] | InitParams | None,
    mesh: Mesh,
    spec: StateSharding,
) -> tuple[TrainState, PyTree]:
    """The state of all seeds at step 0, and its shardings.

    Args:
      init: (seed, parameters to start from) -> the state of one seed.
      seeds: of the run.
      params: `FitOptions.params`.
      mesh: of devices.
      spec: how the state is sharded.
    """

    @functools.partial(jax.jit, static_argnames="params" if callable(params) else ())
    def make(seed: Array, params: Params | InitParams | None) -> PyTree:
        state = init(seed, params)
        where = sharding.state_shardings(mesh, spec, state)
        return jax.lax.with_sharding_constraint(state, where)

    per_seed = params if isinstance(params, list) else [params] * len(seeds)
    if not callable(params):  # they may be on one device, and the mesh has several
        per_seed = [sharding.gather(one) for one in per_seed]
    if len(per_seed) != len(seeds):
        raise ValueError(
            f"FitOptions.params has {len(per_seed)} trees for {len(seeds)} seeds; give one for each"
        )
    pairs = zip(seeds, per_seed, strict=True)
    states = [sharding.gather(make(np.uint32(seed), params=p)) for seed, p in pairs]
    shardings = sharding.with_seed_axis(sharding.state_shardings(mesh, spec, states[0]))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    return sharding.place(shardings, stacked), shardings


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity, for jit
class TrainStep:
    """(state, batch [S, B, ...], seeds, device arrays) -> state: one step of all seeds.

    A batch that the dataset generates on the device is made inside the step.

    Attributes:
      model, objective, optimizer, config, dataset: as of `fit`.
      mesh: of devices.

        step = jax.jit(TrainStep(model, objective, optimizer, config, dataset, mesh))
        state = step(state, host_batch(dataset, config, mesh, 0), seeds, device_arrays)
    """

    model: Model
    objective: Objective
    optimizer: Optimizer
    config: TrainConfig
    dataset: Dataset
    mesh: Mesh

    def __call__(
        self, state: TrainState, batch: DeviceBatch, seeds: Array, device_arrays: DeviceBatch
    ) -> PyTree:
        def one_seed(state: TrainState, batch: DeviceBatch, seed: Array) -> TrainState:
            if isinstance(batches := self.dataset.batches, DeviceBatches):
                key = generation_key(seed, state.step)
                batch = batches.generate(device_arrays, key, self.config.batch_size)
                rows = sharding.shard_rows(self.mesh)
                batch = jax.lax.with_sharding_constraint(batch, dict.fromkeys(batch, rows))
            return train_step(
                self.model,
                self.objective,
                self.optimizer.transform,
                state,
                batch,
                seed,
                accumulate=self.config.accumulate,
                label_smoothing=self.config.label_smoothing,
            )

        return map_over_seeds(one_seed)(state, batch, seeds)


def host_batch(dataset: Dataset, config: TrainConfig, mesh: Mesh, step: int) -> DeviceBatch:
    """The batches of all seeds [S, B, ...], sharded over the devices; empty where the dataset
    generates them."""
    if isinstance(dataset.batches, DeviceBatches):
        return {}
    rows = config.batch_size // jax.process_count()
    part = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    batches = [dataset.batches(seed, step, config.batch_size, part) for seed in config.seeds]
    return {
        name: sharding.shard_batch(mesh, np.stack([batch[name] for batch in batches]), axis=1)
        for name in batches[0]
    }
