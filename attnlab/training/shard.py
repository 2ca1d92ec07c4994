"""Devices: one mesh over all of them, and where on it each array lies.

The mesh has two axes: batches are cut over "data"; over "model", and the state over "data" where
asked, the weights are cut (Shoeybi et al. 2019, arXiv 1909.08053; Rajbhandari et al. 2020,
arXiv 1910.02054). XLA derives the messages between devices from where arrays lie, so a model
knows nothing of this.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def data_mesh(devices: Any = None, *, model_parallel: int = 1, **batch_sizes: int) -> Mesh:
    """All devices as "data" x "model", the second axis `model_parallel` long.

    `batch_sizes` are named, for the message: `data_mesh(batch_size=16, eval_batch_size=64)`. Raises
    ValueError where the devices of a process are no multiple of `model_parallel`, and where the
    length of "data" does not divide a batch.
    """
    devices = jax.devices() if devices is None else devices
    here = len(devices) // jax.process_count()
    if model_parallel < 1 or here % model_parallel:
        raise ValueError(
            f"model_parallel {model_parallel} does not divide the {here} devices of a process; "
            f"use {' or '.join(str(n) for n in range(1, here + 1) if here % n == 0)}"
        )
    count = len(devices) // model_parallel
    for name, size in batch_sizes.items():
        if size % count:
            groups = "devices" if model_parallel == 1 else f"groups of {model_parallel} devices"
            raise ValueError(
                f"{name} {size} is not divisible by {count} {groups}; use a multiple of {count}"
            )
    # Not `jax.make_mesh`, which may order devices by their wires: a group must lie in one process,
    # since each process reads its own rows of a batch.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.array(ordered).reshape(count, model_parallel)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def whole(mesh: Mesh) -> NamedSharding:
    """Every array whole on every device."""
    return NamedSharding(mesh, P())


def rows(mesh: Mesh) -> NamedSharding:
    """The first axis cut over "data"."""
    return NamedSharding(mesh, P("data"))


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Every leaf whole on every device. Each process holds the same values."""
    return jax.tree.map(lambda a: _place(mesh, P(), np.asarray(a)), tree)


def spread(mesh: Mesh, rows: np.ndarray, axis: int) -> jax.Array:
    """This process's rows of a batch -> the whole batch, `axis` cut over "data"."""
    return _place(mesh, P(*(None,) * axis, "data"), rows)


class Cut(NamedTuple):
    """How the state of a training is cut over a mesh."""

    axes: Callable[[Any], Any] | None = None
    """params -> a tree of ints: which axis of a weight, from its end, is cut over "model"; 0 = none
    (`attnlab.model.splits.split_axes`)"""
    over_data: bool = False
    """Is the longest axis that is left, and that "data" divides, cut over "data"?"""


def places(mesh: Mesh, cut: Cut, state: Any) -> Any:
    """Where the leaves of one seed's `TrainState` lie: a NamedSharding each.

    What an optimizer keeps for a weight (known by the end of its path and by its shape) lies as the
    weight does. An axis that does not divide evenly stays whole.
    """
    named = jax.tree_util.tree_flatten_with_path(state.params)[0]
    axes = jax.tree.leaves(cut.axes(state.params)) if cut.axes else [0] * len(named)
    known = {_names(path): (a.shape, axis) for (path, a), axis in zip(named, axes, strict=True)}

    def of(path: Any, a: Any) -> NamedSharding:
        names, spec = _names(path), [""] * a.ndim
        ends = (known.get(names[start:], ((), 0)) for start in range(len(names)))
        axis = next((axis for shape, axis in ends if axis and shape == a.shape), 0)
        if axis and a.shape[axis] % mesh.shape["model"] == 0:
            spec[axis] = "model"
        free = [i for i in range(a.ndim) if not spec[i] and a.shape[i] % mesh.shape["data"] == 0]
        if cut.over_data and free:
            spec[max(free, key=lambda i: (a.shape[i], i))] = "data"
        return NamedSharding(mesh, P(*(name or None for name in spec)))

    return jax.tree_util.tree_map_with_path(of, state)


def of_seeds(places: Any) -> Any:
    """Where arrays lie that have a leading axis of seeds, which is whole everywhere."""
    return jax.tree.map(lambda place: NamedSharding(place.mesh, P(None, *place.spec)), places)


def put(places: Any, tree: Any) -> Any:
    """NumPy arrays, the same in each process -> arrays that lie as `places` says."""
    make = lambda a, place: jax.make_array_from_callback(a.shape, place, a.__getitem__)
    return jax.tree.map(make, tree, places)


def device_bytes(shapes: Any, places: Any) -> int:
    """Bytes on one device of arrays that lie as `places` says.

    >>> mesh = data_mesh(jax.devices()[:1])
    >>> device_bytes(jax.ShapeDtypeStruct((3, 5), np.float32), whole(mesh))
    60
    """
    sizes = jax.tree.map(
        lambda a, place: int(np.prod(place.shard_shape(a.shape))) * a.dtype.itemsize, shapes, places
    )
    return sum(jax.tree.leaves(sizes))


def gather(tree: Any) -> Any:
    """NumPy arrays of arrays that may lie on the devices of other processes; all must ask."""

    def of(a: Any) -> np.ndarray:
        if getattr(a, "is_fully_addressable", True) or a.is_fully_replicated:
            return np.asarray(a)
        return np.asarray(multihost_utils.process_allgather(a, tiled=True))

    return jax.tree.map(of, tree)


def any_process(flag: bool) -> bool:
    """Is `flag` True on any process? All of them must ask."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def wait_for_all(name: str) -> None:
    """Goes on when every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _place(mesh: Mesh, spec: P, local: np.ndarray) -> jax.Array:
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", key)) for key in path)
