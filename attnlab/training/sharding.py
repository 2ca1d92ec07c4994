"""Devices: one mesh over all of them, and how each array is sharded over it.

The mesh has two axes. Batches are sharded over "data". Parameters are sharded over "model" (Shoeybi
et al. 2019, arXiv 1909.08053), and on request also over "data", with the optimizer's state
(Rajbhandari et al. 2020, arXiv 1910.02054). XLA derives the communication from the shardings, so a
model needs no code for it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from attnlab.sharing import Params, PyTree


def data_mesh(
    devices: Sequence[jax.Device] | None = None, /, *, model_parallel: int = 1, **batch_sizes: int
) -> Mesh:
    """All devices as "data" x "model", the second axis `model_parallel` long.

    `batch_sizes` are named, for the message: `data_mesh(batch_size=16)`. Raises ValueError where
    the number of devices of a process is no multiple of `model_parallel`, and where the length of
    "data" does not divide a batch.
    """
    devices = jax.devices() if devices is None else devices
    local = len(devices) // jax.process_count()
    if model_parallel < 1 or local % model_parallel:
        raise ValueError(
            f"model_parallel {model_parallel} does not divide the {local} devices of a process; "
            f"use {' or '.join(str(n) for n in range(1, local + 1) if local % n == 0)}"
        )
    # Not `jax.make_mesh`, which may order devices by their links: a group must be in one process,
    # since each process reads its own rows of a batch.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.array(ordered).reshape(-1, model_parallel)
    mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    check_batches(mesh, batch_sizes)
    return mesh


def check_batches(mesh: Mesh, sizes: Mapping[str, int]) -> None:
    """Raises ValueError where the length of "data" does not divide a batch, which it names, or the
    mesh has other axes."""
    if mesh.axis_names != ("data", "model"):
        raise ValueError(f"the mesh has the axes {mesh.axis_names}; make it by sharding.data_mesh")
    count, together = mesh.shape["data"], mesh.shape["model"]
    for name, size in sizes.items():
        if size % count:
            groups = "devices" if together == 1 else f"groups of {together} devices"
            raise ValueError(
                f"{name} {size} is not divisible by {count} {groups}; use a multiple of {count}"
            )


def replicate(mesh: Mesh, tree: PyTree) -> PyTree:
    """Every leaf whole on every device. Each process has the same values."""
    return jax.tree.map(lambda a: _place(mesh, P(), np.asarray(a)), tree)


def shard_batch(mesh: Mesh, rows: np.ndarray, axis: int) -> jax.Array:
    """This process's rows of a batch -> the whole batch, `axis` sharded over "data"."""
    return _place(mesh, P(*(None,) * axis, "data"), rows)


def rows_of_process(batch_size: int) -> slice:
    """The rows of a batch that this process reads."""
    rows = batch_size // jax.process_count()
    return slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)


class StateSharding(NamedTuple):
    """How the state of a training is sharded over a mesh.

    `FitOptions(mesh=data_mesh(model_parallel=4), sharding=StateSharding(shard_axes(config)))`

    Attributes:
      model_axes: params -> the tree of the axes, from the end, that are sharded over "model"; 0 =
        none (`attnlab.models.shard_axes`).
      over_data: shard the longest remaining axis that "data" divides over "data"?
    """

    model_axes: Callable[[Params], PyTree] | None = None
    over_data: bool = False


def state_shardings(mesh: Mesh, spec: StateSharding, state: PyTree) -> PyTree:
    """The tree of a `NamedSharding` for each leaf of one seed's `TrainState`.

    What an optimizer keeps for a parameter (known by the end of its path and by its shape) is
    sharded as the parameter is. An axis that does not divide evenly stays whole.
    """
    named = jax.tree_util.tree_flatten_with_path(state.params)[0]
    axes = [0] * len(named)
    if spec.model_axes is not None:
        axes = jax.tree.leaves(spec.model_axes(state.params))
    model_axis = {
        (_names(path), a.shape): axis for (path, a), axis in zip(named, axes, strict=True)
    }

    def of(path: tuple[object, ...], a: jax.Array) -> NamedSharding:
        names = _names(path)
        ends = (model_axis.get((names[start:], a.shape), 0) for start in range(len(names)))
        return NamedSharding(mesh, _spec(mesh, spec, a.shape, next(filter(None, ends), 0)))

    return jax.tree_util.tree_map_with_path(of, state)


def _spec(mesh: Mesh, spec: StateSharding, shape: tuple[int, ...], model_axis: int) -> P:
    axes: list[str | None] = [None] * len(shape)
    if model_axis and shape[model_axis] % mesh.shape["model"] == 0:
        axes[model_axis] = "model"
    free = [i for i, size in enumerate(shape) if not axes[i] and size % mesh.shape["data"] == 0]
    if spec.over_data and free:
        axes[max(free, key=lambda i: (shape[i], i))] = "data"
    return P(*axes)


def place(shardings: PyTree, tree: PyTree) -> PyTree:
    """NumPy arrays, the same in each process -> sharded arrays."""

    def one(a: np.ndarray, where: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(a.shape, where, a.__getitem__)

    return jax.tree.map(one, tree, shardings)


def gather(tree: PyTree) -> PyTree:
    """NumPy arrays of arrays that may be on devices of other processes; all processes must call."""
    return jax.tree.map(_gather_one, tree)


def _gather_one(a: ArrayLike) -> np.ndarray:
    if not isinstance(a, jax.Array) or a.is_fully_addressable or a.is_fully_replicated:
        return np.asarray(a)
    return np.asarray(multihost_utils.process_allgather(a, tiled=True))


def any_process(flag: bool) -> bool:
    """Is `flag` True in any process? All processes must call."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def wait_for_all(name: str) -> None:
    """Returns when every process has called."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _place(mesh: Mesh, spec: P, local: np.ndarray) -> jax.Array:
    placed: jax.Array = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
    return placed


def _names(path: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", key)) for key in path)
