"""Devices: one mesh over all of them, data parallel."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def data_mesh(devices: Any = None, **batch_sizes: int) -> Mesh:
    """All devices along one axis, "data". Raises ValueError where they do not divide a batch.

    `batch_sizes` are named, for the message: `data_mesh(batch_size=16, eval_batch_size=64)`.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    for name, size in batch_sizes.items():
        if size % count:
            raise ValueError(
                f"{name} {size} is not divisible by {count} devices; use a multiple of {count}"
            )
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def whole(mesh: Mesh) -> NamedSharding:
    """Every array whole on every device."""
    return NamedSharding(mesh, P())


def rows(mesh: Mesh) -> NamedSharding:
    """The first axis cut over the devices."""
    return NamedSharding(mesh, P("data"))


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Every leaf whole on every device. Each process holds the same values."""
    return jax.tree.map(lambda a: _place(mesh, P(), np.asarray(a)), tree)


def spread(mesh: Mesh, rows: np.ndarray, axis: int) -> jax.Array:
    """This process's rows of a batch -> the whole batch, `axis` cut over the devices."""
    return _place(mesh, P(*(None,) * axis, "data"), rows)


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
